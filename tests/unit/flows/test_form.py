"""The form of the `rl` deployment: it begins as the laptop run, and takes and gives back what a file can say."""

from pathlib import Path

import pytest
from prefect.utilities.schema_tools.validation import validate

from flows.rl import rl
from tasks.config.experiment import LAPTOP, Experiment
from tasks.config.files import load_experiment
from tests.support.places import EXPERIMENTS

SCHEMA = rl.parameters.model_dump_for_openapi()


def test_the_form_begins_as_the_laptop_run() -> None:
    assert Experiment.model_validate(SCHEMA["properties"]["experiment"]["default"]) == LAPTOP


@pytest.mark.parametrize(
    ("file", "overrides"),
    [
        *((path.name, []) for path in sorted(EXPERIMENTS.glob("*.yaml"))),
        ("tiny.yaml", ["data.1={kind: jsonl, path: /a.jsonl, weight: 2}", "data.2={kind: reasoning_gym}"]),
        ("tiny.yaml", ["rewards.1={kind: python, function: '/a.py:f', sources: [toy]}", "rewards.2.kind=math_verify"]),
        ("tiny.yaml", ["evaluations.1={kind: source, source: {kind: jsonl, path: /b.jsonl}}"]),
    ],
)
def test_what_a_file_says_passes_through_the_form(file: str, overrides: list[str]) -> None:
    experiment = load_experiment(Path(EXPERIMENTS / file), overrides)
    parameters = {"experiment": experiment.model_dump(mode="json")}
    assert validate(parameters, SCHEMA, raise_on_error=False) == []
    assert rl.validate_parameters(parameters)["experiment"] == experiment


def test_a_key_of_another_kind_does_not() -> None:
    tree = LAPTOP.model_dump(mode="json")
    tree["data"][0]["path"] = "/a.jsonl"
    assert validate({"experiment": tree}, SCHEMA, raise_on_error=False) != []
