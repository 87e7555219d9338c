"""What a run needs is checked before it starts, and refused with the reason."""

import json
from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.experiment import Experiment, load_experiment
from tasks.readiness import make_ready
from tasks.settings import Settings

TINY = Path(__file__).parent.parent / "deployments" / "experiments" / "tiny.yaml"


def tiny(*overrides: str) -> Experiment:
    return load_experiment(TINY, list(overrides))


def rows_experiment(path: Path, questions: list[str]) -> Experiment:
    path.write_text("\n".join(json.dumps({"question": text, "answer": "a"}) for text in questions))
    return tiny("data.kind=jsonl", f"data.path={path}", "data.heldout_size=4", "workload.max_prompt_tokens=8")


def test_the_tiny_experiment_is_ready(settings: Settings) -> None:
    assert (make_ready(tiny(), settings) / "config.json").is_file()


def test_every_row_of_a_file_is_checked(settings: Settings, tmp_path: Path) -> None:
    """One over-long prompt far down would end a run hours after its start."""
    questions = [f"q{number}" for number in range(600)]
    make_ready(rows_experiment(tmp_path / "rows.jsonl", questions), settings)
    for number in (500, 550):  # in training or held out, whichever the seed chose
        spoilt = [text if n != number else "far too long" for n, text in enumerate(questions)]
        with pytest.raises(UserError, match=f"'far too long' in line {number + 1} of data.path has 12 tokens"):
            make_ready(rows_experiment(tmp_path / "rows.jsonl", spoilt), settings)
