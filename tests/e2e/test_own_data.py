"""docs/own-data.md, as it is written: its files, and the first of its commands, through the real stack."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tasks.config.files import read_resolved_experiment
from tasks.config.rewards import PythonReward
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.exchange.payloads import load_group
from tests.support.places import REPOSITORY
from tests.support.stack import hexflow

pytestmark = pytest.mark.e2e

PAGE = (REPOSITORY / "docs" / "own-data.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_the_page_trains_as_it_is_written(stack_settings: Settings, tmp_path: Path) -> None:
    assert len(PAGE.splitlines()) <= 66, "one screen"
    blocks = dict(FENCE.findall(PAGE))
    for name, language in (("questions.jsonl", "json"), ("rewards.py", "python"), ("mine.yaml", "yaml")):
        assert f"**`{name}`**" in PAGE
        (tmp_path / name).write_text(blocks[language])
    program, *arguments = shlex.split(blocks["sh"].splitlines()[0])
    assert program == "hexflow"
    done = hexflow(*arguments, timeout_s=540, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    (root,) = stack_settings.shared.runs.glob("mine-*")
    run, ledger = RunDirectory(root), Ledger(stack_settings.shared.ledger_url)
    summary = json.loads(run.summary.read_text())
    assert (summary["status"], summary["steps"], summary["eval_items"]) == ("completed", 3, 4)
    # The reward of every trained answer is the sum of its parts by weight.
    consumed = [row.group_id for row in ledger.groups(root.name) if row.state == "consumed"]
    groups = [load_group(run.group_path(group_id)) for group_id in consumed]
    assert {group.reward_names for group in groups} == {("math_verify", "brief")}
    answers = [answer for group in groups for answer in group.trained]
    assert all(answer.reward == pytest.approx(answer.parts[0] + 0.2 * answer.parts[1]) for answer in answers)
    assert any(answer.parts[1] > 0 for answer in answers)
    metrics = ledger.steps(root.name)[-1].metrics
    assert metrics["reward/mean"] == pytest.approx(metrics["reward/math_verify"] + 0.2 * metrics["reward/brief"])
    # The run keeps the function.
    own = read_resolved_experiment(run.experiment).rewards[1]
    assert isinstance(own, PythonReward)
    assert Path(own.function.rpartition(":")[0]).parent == run.rewards
    assert own.sha256 is not None
