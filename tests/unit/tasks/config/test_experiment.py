"""Reading experiments: overrides, and faults that name what is wrong and the remedy."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from planners.errors import UserError
from tasks.config.data import DataSource, Evaluation, JsonlSource
from tasks.config.experiment import Experiment
from tasks.config.files import load_experiment, read_resolved_experiment
from tasks.config.rewards import PythonReward, Reward
from tasks.training.algorithms import Algorithm
from tests.support.places import EXPERIMENTS

TINY = EXPERIMENTS / "tiny.yaml"


def kinds_of(union: Any) -> tuple[type[BaseModel], ...]:
    """The models of a union that is told apart by `kind`."""
    kinds: tuple[type[BaseModel], ...] = get_args(get_args(union)[0])
    return kinds


KINDS_OF_DATA, KINDS_OF_REWARD, KINDS_OF_EVALUATION = map(kinds_of, (DataSource, Reward, Evaluation))


def test_overrides_change_single_values() -> None:
    experiment = load_experiment(TINY, ["optimizer.lr=5e-7", "run.steps=3", "workload.max_staleness=0"])
    assert experiment.optimizer.lr == 5e-7
    assert experiment.run.steps == 3
    assert experiment.workload.max_staleness == 0
    assert experiment.model.source == "tiny-random"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", r"unknown key 'optimizer.lrr' \(did you mean 'lr'\?\)"),
        ("algoritm.clip=1", r"unknown key 'algoritm' \(did you mean 'algorithm'\?\)"),
        ("run.steps=many", r"'run.steps' is 'many': input should be a valid integer"),
        ("workload.max_staleness=-1", r"'workload.max_staleness' is -1: input should be greater than or equal to 0"),
        ("workload.group_size=1", "advantages are normalised within a group: set it to 2 or more"),
        ("workload.max_new_tokens=5000", "above model.max_context 512"),
        ("optimizer.minibatches=9", "each minibatch needs at least one group"),
        (
            "rewards.0.kind=reasoning_gym",
            "no reward scores the source toy of kind toy; .* scores its own questions only",
        ),
        ("rewards.1={kind: reasoning_gym, sources: [toy]}", "the source toy is of kind toy: name other sources"),
        ("rewards.0.sources=[tiy]", "character_share is for the source tiy, but the sources are toy"),
        ("rewards.1.kind=character_share", "two rewards are called character_share: give one another name"),
        ("rewards.0.name=mean", "the metric reward/mean is another one's: give the reward mean another name"),
        ("rewards.1={kind: python, function: mine.py}", "is not of the form file.py:function or module:function"),
        ("rewards.1.kind=python", r"'rewards.1.function' is missing"),
        ("rewards.0.function=a.py:f", "'rewards.0.function' is a key of kind python, but the kind is character_share"),
        ("rewards.0.sha256=", "'rewards.0.sha256' is a key of kind python"),
        ("data.0.kind=jsonl", "'data.0.path' is missing"),
        (
            "data.0.kind=jsnl",
            r"'data.0.kind' is 'jsnl', which is none: did you mean 'jsonl'\? the kinds are reasoning_gym, jsonl, toy",
        ),
        ("data.1.weight=2", "'data.1' lacks the key 'kind': the kinds are reasoning_gym, jsonl, toy"),
        (
            "evaluations.1={kind: source, source: {kind: toyy}}",
            r"'evaluations.1.source.kind' is 'toyy', .*'toy'\? the kinds are reasoning_gym, jsonl, toy",
        ),
        ("data.0.wieght=2", r"unknown key 'data.0.wieght' \(did you mean 'weight'\?\)"),
        ("data.0.weight=0", "greater than 0"),
        ("data.1.kind=toy", "two sources are called toy: give one another name"),
        ("data.2.kind=toy", "has '2' where a list of 1 stands: name one by its number from 0, .* or the next by 1"),
        ("data.path=rows.jsonl", "has 'path' where a list of 1 stands: .* as in data.0.weight=2"),
        ("evaluations.0.source.kind=toy", "'evaluations.0.source' is a key of kind source, but the kind is held_out"),
        ("evaluations.1={kind: source, source: {kind: toy}}", "two sources are called toy"),
        ("evaluations.1={kind: source, source: {kind: jsonl}}", r"'evaluations.1.source.path' is missing"),
        ("prompt.template=hello", r"'prompt.template': it lacks the placeholder \{question\}"),
        ("lr=1", "not of the form section.key=value, as in optimizer.lr=1e-6"),
        ("data=[]", r"data is a list, whose entries are changed one by one, as in data\.0\.kind=reasoning_gym"),
        ("run.steps.deep=1", "'steps', which holds a plain value"),
        ("run.name=[", "not valid YAML"),
        ('prompt.prefill="\\ud800"', "half of a surrogate pair"),
        ("prompt.prefill=\udcff", "not valid YAML"),
        ("data.0.parameters=" + "[" * 600, "nested too deeply"),
        ("run.name=Laptop", "use up to 100 lower-case letters, digits and hyphens"),
        (f"run.name={'a' * 101}", "use up to 100 lower-case letters, digits and hyphens"),
        ("sampling.temperature=0.009", r"greater than or equal to 0\.01"),
        ("run.steps=true", r"'run.steps' is true: input should not be true or false"),
        ("planner.zero_stage=true", "should not be true or false"),
        ("run.steps=", r"'run.steps' is empty: input should be a valid integer"),
        ("optimizer.lr=.inf", r"'optimizer.lr' is inf: input should be a finite number"),
        ("optimizer.gradient_clip=.nan", "finite number"),
        ("workload.max_staleness=101", "less than or equal to 100"),
        (
            "workload.response_lengths={kind: samples, tokns: [1]}",
            r"response_lengths.tokns' \(did you mean 'tokens'\?\)",
        ),
        ("workload.response_lengths={kind: samples, tokens: [true, 5]}", "should not be true or false"),
        ("run.name=!!timestamp x", r"is not valid YAML \(.*\): quote it"),
        ("workload.response_lengths={kind: samples, tokens: [0]}", "greater than or equal to 1"),
        (
            "workload.response_lengths={kind: samples, tokens: [17]}",
            "reaches 17 tokens, above workload.max_new_tokens 16",
        ),
        ("workload.prompt_lengths={kind: samples, tokens: [33]}", "prompt_lengths reaches 33 tokens, above .* 32"),
        ("workload.prompts_per_step=50000", "200000 answers per step, above 100000"),
        ("cluster.device_types=[]", "at least 1 item"),
        ("workload.reward_s=1e300", "less than or equal to 86400"),
        ("run.seed=99999999999999999999", "'run.seed' is 9+: input should be less than or equal to 2147483647"),
        ("evaluations.0.seed=4294967296", "less than or equal to 2147483647"),
        ("run.steps=99999999999999", "'run.steps' is 9+: input should be less than or equal to 1000000"),
        ("evaluations.0.samples=100000", "less than or equal to 1000"),
        ("run.heartbeat_deadline_s=0.001", "greater than or equal to 5"),
        ("rollout.scoring_processes=100000", "is 100000: input should be less than or equal to 256"),
        ("tracking.tags={mlflow.runName: x}", "'tracking.tags': the tag mlflow.runName has a reserved name"),
        ("tracking.tags={hexflow.run: x}", "reserved name"),
        ("tracking.tags={what?: x}", "MLflow takes no tag 'what\\?'"),
        ("tracking.experiment=''", "at least 1 character"),
        ("algorithm.clip=-1", r"'algorithm.clip' is -1: input should be greater than 0"),
        (
            "algorithm.kind=nonesuch",
            r"'algorithm.kind' is 'nonesuch', which is none: the kinds are decoupled_ppo, cispo",
        ),
        ("algorithm.kind=7", "'algorithm.kind' is '7', which is none"),
        (
            "data.0.task=chain_sum",  # even at its default
            "'data.0.task' is a key of kind reasoning_gym, but the kind is toy: leave it out or change the kind",
        ),
        ("data.0.parameters={}", "'data.0.parameters' is a key of kind reasoning_gym, but the kind is toy"),
        ("data.0.path=some.jsonl", "'data.0.path' is a key of kind jsonl, but the kind is toy"),
        ("workload.response_lengths={mean: 3}", "'workload.response_lengths' lacks the key 'kind'"),
        ("workload.response_lengths={kind: log-normal, mean: .inf, q99: 1, cap: 1}", r"response_lengths.mean' is inf"),
    ],
)
def test_a_fault_is_named_with_its_remedy(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_experiment(TINY, [override])


def test_files_that_are_no_experiments(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=rf"There is no experiment file .*absent.yaml; shipped ones lie in {TINY.parent}"
    ):
        load_experiment(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match=f"did you mean {TINY}"):
        load_experiment(tmp_path / "tiney.yaml")
    with pytest.raises(UserError, match="is a directory: name one experiment file"):
        load_experiment(tmp_path)
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(UserError, match="must hold keys and values, not a list"):
        load_experiment(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    with pytest.raises(UserError, match="is not valid YAML"):
        load_experiment(tmp_path / "broken.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no text in UTF-8"):
        load_experiment(tmp_path / "binary.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(UserError, match=r"empty\.yaml is empty"):
        load_experiment(tmp_path / "empty.yaml", ["run.steps=1"])


def test_marks_separators_and_surrogate_pairs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text('\ufeffprompt: {prefill: "\\ud83d\\ude00 one\u2028two"}\n', encoding="utf-8")
    assert load_experiment(path).prompt.prefill == "\U0001f600 one\u2028two"
    assert load_experiment(path, ['prompt.prefill="\\ud83d\\ude00"']).prompt.prefill == "\U0001f600"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run:\n  steps: 1\n  seed: 2\n  steps: 3\n", "line 4: the key 'steps' is there twice"),
        ("run: {steps: 1}\nrun: {seed: 1}\n", "line 2: the key 'run' is there twice"),
        ("run:\n", "'run' is empty: it must hold keys and values"),
        ("1: 2\n", "keys should be strings"),
        ("tracking: {tags: {day: 2026-13-45}}\n", "not valid YAML: month must be"),
        pytest.param("[" * 100_000 + "]" * 100_000, "nested too deeply", id="brackets"),
        pytest.param("a:\n  " + "- " * 100_000, "nested too deeply", id="dashes"),
        ('run: {name: a}\nprompt: {template: "\\ud83d\\ude00\n  \\ude00"}', "line 3: half of a surrogate pair"),
        ('prompt: {template: "\\ud800"}', "line 1: half of a surrogate pair"),
        ("a: 1\nb: 2\nc: 3\nd: 4\ne: 5\nf: 6\n", "unknown key 'd' [^;]*; and 2 more"),
        ("run: {steps: 1}\n---\nrun: {steps: 2}\n", "expected a single document"),
    ],
)
def test_yaml_that_says_something_else_than_it_seems_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_experiment(tmp_path / "bad.yaml")


def test_keys_that_are_merged_may_be_overridden(tmp_path: Path) -> None:
    """A YAML merge (`<<`) brings the same keys on purpose."""
    (tmp_path / "merged.yaml").write_text("run: &base {steps: 1}\nworkload: {}\noptimizer:\n  <<: {lr: 1}\n  lr: 2\n")
    assert load_experiment(tmp_path / "merged.yaml").optimizer.lr == 2


def test_relative_paths_start_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the file at the file, those of overrides at the working directory; `~` is the user's home."""
    for place in ("file", "here"):
        (tmp_path / place / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    written = tmp_path / "file" / "mine.yaml"
    written.write_text(
        "model: {source: model}\ndata: [{kind: toy}, {kind: jsonl, path: questions.jsonl}]\n"
        "evaluations: [{kind: source, source: {kind: jsonl, path: exam.jsonl}}]\n"
        "rewards: [{kind: math_verify}, {kind: python, function: 'mine.py:one'}, {kind: python, function: 'a.b:two'}]\n"
    )
    experiment = load_experiment(written)
    assert experiment.model.source == str(tmp_path / "file" / "model")
    assert paths_of(experiment) == [
        str(tmp_path / "file" / "questions.jsonl"),
        str(tmp_path / "file" / "exam.jsonl"),
        str(tmp_path / "file" / "mine.py:one"),
        str(tmp_path / "file" / "a" / "b.py:two"),
    ]
    overrides = [
        "data.1.path=~/questions.jsonl",
        "model.source=model",
        "evaluations.0.source={kind: jsonl, path: e.jsonl}",
    ]
    overrides += ["rewards.1.function=own:one", "rewards.2={kind: python, function: ~/own.py:two}"]
    experiment = load_experiment(written, overrides)
    assert experiment.model.source == str(tmp_path / "here" / "model")
    assert paths_of(experiment) == [
        str(tmp_path / "questions.jsonl"),
        str(tmp_path / "here" / "e.jsonl"),
        str(tmp_path / "here" / "own.py:one"),
        str(tmp_path / "own.py:two"),
    ]


def paths_of(experiment: Experiment) -> list[str]:
    files = [source.path for source in experiment.sources if isinstance(source, JsonlSource)]
    return files + [reward.function for reward in experiment.rewards if isinstance(reward, PythonReward)]


def test_overrides_reach_into_lists() -> None:
    overrides = ["data.0.weight=3", "data.1.kind=jsonl", "data.1.path=/rows.jsonl", "rewards.0.timeout_s=9"]
    experiment = load_experiment(TINY, overrides)
    assert [(source.kind, source.weight) for source in experiment.data] == [("toy", 3), ("jsonl", 1)]
    assert experiment.rewards[0].timeout_s == 9
    assert experiment.evaluations[0].size == 16


def test_a_list_that_the_file_leaves_out_can_be_begun_by_overrides(tmp_path: Path) -> None:
    (tmp_path / "short.yaml").write_text("rewards: [{kind: character_share}]")
    experiment = load_experiment(tmp_path / "short.yaml", ["data.0.kind=toy"])
    assert [source.kind for source in experiment.data] == ["toy"]


def test_a_stored_experiment_that_is_damaged_is_told(tmp_path: Path) -> None:
    path = tmp_path / "experiment.json"
    path.write_text(load_experiment(TINY).model_dump_json())
    assert read_resolved_experiment(path) == load_experiment(TINY)
    path.write_text("{")
    with pytest.raises(UserError, match=r"the experiment of the run, cannot be read .*: start a new run"):
        read_resolved_experiment(path)
    path.write_text('{"run": {"stepps": 1}}')
    with pytest.raises(UserError, match="did you mean 'steps'"):
        read_resolved_experiment(path)


@pytest.mark.parametrize("kind", [kind.model_fields["kind"].default for kind in kinds_of(Algorithm)])
def test_the_resolved_algorithm_survives_storage(kind: str) -> None:
    experiment = load_experiment(TINY, [f"algorithm.kind={kind}", "algorithm.kl_coefficient=0.5"])
    assert experiment.algorithm.kind == kind
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kind=cispo", "algorithm.clip=0.2"], "clip' is a key of kind decoupled_ppo, but the kind is cispo"),
        (["algorithm.weight_cap=5"], "weight_cap' is a key of kind cispo, but the kind is decoupled_ppo"),
    ],
)
def test_a_key_of_another_kind_is_refused_even_at_its_default(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=f"algorithm.{message}"):
        load_experiment(TINY, overrides)


@pytest.mark.parametrize(
    ("tree", "sentences"),
    [
        (
            {"algorithm": {"lr": 1e-6, "temperature": 1.0, "clip": 0.2}},
            [
                "`algorithm.temperature` has moved, write `sampling.temperature`",
                "`algorithm.lr` has moved, write `optimizer.lr`",
                "write `algorithm.kind: decoupled_ppo` for the one of before",
            ],
        ),
        ({"algorithm": {"kind": "cispo", "adam_beta2": 0.9}}, ["write `optimizer.beta2`"]),
        ({"algorithm": {"minibatches": 2, "zero_stage": 1}}, ["`optimizer.minibatches`", "`planner.zero_stage`"]),
        ({"algorithm": {"tokens_per_micro_batch": 2}}, ["`planner.micro_batch_tokens`"]),
        (
            {"data": {"kind": "toy", "heldout_size": 5}, "reward": {"kind": "math_verify", "processes": 2}},
            [
                "`data` is a list of sources now, write `data: [{kind: …}]`",
                "`data.heldout_size` has moved, write `evaluations: [{kind: held_out, size: …}]`",
                "`reward` is a list now, write `rewards: [{kind: …}]`",
                "`reward.processes` has moved, write `rollout.scoring_processes`",
            ],
        ),
        (
            {"run": {"evaluation_samples": 4}},
            ["write `evaluations: [{kind: held_out, samples: …}]`", "write one to keep the prompt of before"],
        ),
    ],
)
def test_experiments_of_before_are_told_what_to_write(
    tree: dict[str, object], sentences: list[str], tmp_path: Path
) -> None:
    """In files, in overrides and in the experiment of a run of before."""
    (tmp_path / "old.yaml").write_text(json.dumps(tree))  # which is YAML
    with pytest.raises(UserError) as of_file:
        load_experiment(tmp_path / "old.yaml")
    (tmp_path / "experiment.json").write_text(json.dumps(tree))
    with pytest.raises(UserError) as of_run:
        read_resolved_experiment(tmp_path / "experiment.json")
    for sentence in sentences:
        assert sentence in str(of_file.value)
        assert sentence in str(of_run.value)
    with pytest.raises(UserError, match=r"`algorithm.lr` has moved, write `optimizer.lr`"):
        load_experiment(TINY, ["algorithm.lr=1e-6"])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            "data.1={kind: jsonl, path: /a.jsonl, weight: 0.3}",
            "evaluations.1={kind: source, source: {kind: reasoning_gym}}",
        ],
        ["rewards.1={kind: python, function: '/a.py:f', weight: -1, sources: [toy]}"],
    ],
)
def test_the_resolved_experiment_survives_storage(overrides: list[str]) -> None:
    experiment = load_experiment(TINY, overrides)
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


UNIONS: dict[str, tuple[type[BaseModel], ...]] = {
    "data": KINDS_OF_DATA,
    "rewards": KINDS_OF_REWARD,
    "evaluations": KINDS_OF_EVALUATION,
}


def test_every_field_says_what_it_is_and_in_which_unit() -> None:
    """The descriptions are the form in the Prefect UI."""
    for section, field in Experiment.model_fields.items():
        assert field.description, section
        kinds = UNIONS.get(section) or get_args(field.annotation) or [type(field.default)]
        for name, inner in [pair for kind in kinds for pair in kind.model_fields.items()]:
            words = inner.description or ""
            assert words, f"{section}.{name}"
            assert not name.endswith("_s") or "econds" in words, f"{section}.{name} has no unit"
            assert "tokens" not in name or "tokens" in words, f"{section}.{name} has no unit"


def test_the_form_offers_the_kinds_of_a_union_as_a_choice() -> None:
    """The Prefect UI knows no `oneOf`."""
    schema = Experiment.model_json_schema()
    choices = schema["properties"]["algorithm"]["anyOf"]
    assert [choice["$ref"].rpartition("/")[2] for choice in choices] == [kind.__name__ for kind in kinds_of(Algorithm)]
    assert schema["properties"]["algorithm"]["default"]["kind"] == "decoupled_ppo"
    assert schema["$defs"]["Cispo"]["properties"]["kind"]["default"] == "cispo"
    for section, union in (("data", DataSource), ("rewards", Reward), ("evaluations", Evaluation)):
        assert len(schema["properties"][section]["items"]["anyOf"]) == len(kinds_of(union)) > 1
    assert len(schema["$defs"]["SourceEvaluation"]["properties"]["source"]["anyOf"]) == len(kinds_of(DataSource))


def test_no_default_is_empty_in_the_form() -> None:
    """The Prefect UI takes a 0 that is chosen among some for nothing, and shows an empty field."""
    sections = Experiment.model_json_schema()["$defs"].values()
    choices = [field for section in sections for field in section.get("properties", {}).values() if "enum" in field]
    assert len(choices) >= 3
    assert all(field.get("default") or "default" not in field for field in choices)
