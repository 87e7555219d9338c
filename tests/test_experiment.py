"""Reading experiments: overrides, and faults that name what is wrong and the remedy."""

from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.experiment import Experiment, load_experiment

TINY = Path(__file__).parent.parent / "deployments" / "experiments" / "tiny.yaml"


def test_overrides_change_single_values() -> None:
    experiment = load_experiment(TINY, ["algorithm.lr=5e-7", "run.steps=3", "workload.max_staleness=0"])
    assert experiment.algorithm.lr == 5e-7
    assert experiment.run.steps == 3
    assert experiment.workload.max_staleness == 0
    assert experiment.model.source == "tiny-random"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.lrr=1", r"unknown key 'algorithm.lrr' \(did you mean 'lr'\?\)"),
        ("algoritm.lr=1", r"unknown key 'algoritm' \(did you mean 'algorithm'\?\)"),
        ("run.steps=many", r"'run.steps' is 'many': input should be a valid integer"),
        ("workload.max_staleness=-1", r"'workload.max_staleness' is -1: input should be greater than or equal to 0"),
        ("workload.group_size=1", "advantages are normalised within a group: set it to 2 or more"),
        ("workload.max_new_tokens=5000", "above model.max_context 512"),
        ("algorithm.minibatches=9", "each minibatch needs at least one group"),
        ("reward.kind=reasoning_gym", "scores its own questions only"),
        ("data.kind=jsonl", "data.path is empty"),
        ("prompt.template=hello", r"lacks the placeholder \{question\}"),
        ("lr=1", "not of the form section.key=value"),
        ("run.steps.deep=1", "'steps', which holds a plain value"),
        ("run.name=[", "not valid YAML"),
    ],
)
def test_a_fault_is_named_with_its_remedy(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment(TINY, [override])


def test_files_that_are_no_experiments(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no experiment file"):
        load_experiment(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="must hold sections"):
        load_experiment(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_experiment(tmp_path / "broken.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"cannot be read|not valid YAML"):
        load_experiment(tmp_path / "binary.yaml")


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    overrides = ["data.kind=jsonl", "data.path=questions.jsonl", "model.source=model", "reward.kind=math_verify"]
    experiment = load_experiment(TINY, overrides)
    assert experiment.data.path == str(tmp_path / "questions.jsonl")
    assert experiment.model.source == str(tmp_path / "model")


def test_the_resolved_experiment_survives_storage() -> None:
    experiment = load_experiment(TINY)
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_every_field_says_what_it_is_and_in_which_unit() -> None:
    """The descriptions are the form in the Prefect UI."""
    for section, field in Experiment.model_fields.items():
        assert field.description, section
        for name, inner in type(field.default).model_fields.items():
            words = inner.description or ""
            assert words, f"{section}.{name}"
            assert not name.endswith("_s") or "econds" in words, f"{section}.{name} has no unit"
            assert "tokens" not in name or "tokens" in words, f"{section}.{name} has no unit"
