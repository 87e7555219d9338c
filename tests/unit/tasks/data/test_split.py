"""Questions: the same for every replica, never one that is held out, and a clear refusal of data that cannot serve."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planners.errors import UserError
from tasks.config.files import load_experiment
from tasks.data.chat import Chat
from tasks.data.item import Item
from tasks.data.split import Questions
from tasks.generators import open_generator
from tests.support.data import SUMS, TOY, ByteTokenizer, data_experiment
from tests.support.places import EXPERIMENTS, REPOSITORY

BEFORE = REPOSITORY / "tests" / "golden" / "questions.json"
"""Questions and first prompts of the release before sources could be mixed, recorded with it."""


def questions(*data: dict[str, Any], size: int = 16, **sections: Any) -> Questions:
    evaluations = [{"kind": "held_out", "size": size}]
    return Questions(data_experiment(*data, **{"evaluations": evaluations, **sections}))


def held_out(prompts: Questions) -> tuple[Item, ...]:
    return prompts.examinations[0].items


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) for n in range(36)) + "\n")
    return {"kind": "jsonl", "path": str(path)}


class LaptopTokenizer(ByteTokenizer):
    """Knows the laptop run's stop token."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [256] if text == "<|im_end|>" else super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize(
    ("recorded", "file", "overrides"),
    [
        ("laptop", "laptop", ["workload.max_prompt_tokens=400"]),
        ("laptop, seed 1", "laptop", ["workload.max_prompt_tokens=400", "run.seed=1"]),
        ("tiny", "tiny", []),
        ("rows", "tiny", ["data.0={kind: jsonl, path: rows.jsonl}", "evaluations.0.size=10"]),
    ],
)
def test_a_single_source_asks_what_it_asked_before(
    recorded: str, file: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) + "\n" for n in range(60))
    )
    before = json.loads(BEFORE.read_text())[recorded]
    experiment = load_experiment(EXPERIMENTS / f"{file}.yaml", overrides)
    prompts = Questions(experiment)
    training = [prompts.item(index) for index in range(50)]
    assert [[item.question, item.answer] for item in training] == before["training"]
    if "held_out" in before:
        assert [[item.question, item.answer] for item in held_out(prompts)] == before["held_out"]
    assert bytes(Chat(experiment, LaptopTokenizer()).encode(training[0])).decode() == before["first_prompt"]


@pytest.mark.parametrize("kind", ["toy", "sums", "rows"])
def test_replicas_agree_and_no_held_out_question_is_trained_on(kind: str, rows: dict[str, Any]) -> None:
    data = {"toy": TOY, "sums": SUMS, "rows": rows}[kind]
    one, other = questions(data), questions(data)
    heldout = {item.question for item in held_out(one)}
    assert len(heldout) == len(held_out(one)) == 16
    assert held_out(one) == held_out(other)
    # In any order: a replica sees only the indices it leases.
    forward = [one.item(index) for index in range(400)]
    backward = [other.item(index) for index in reversed(range(400))]
    assert forward == backward[::-1]
    assert not heldout & {item.question for item in forward}


@pytest.mark.parametrize("kind", ["toy", "sums", "rows"])
def test_the_run_seed_changes_training_and_not_the_held_out_set(kind: str, rows: dict[str, Any]) -> None:
    data = {"toy": TOY, "sums": SUMS, "rows": rows}[kind]
    one, other = questions(data), questions(data, run={"seed": 1})
    assert held_out(one) == held_out(other)
    assert [one.item(index) for index in range(20)] != [other.item(index) for index in range(20)]


def test_the_laptop_questions_are_those_of_the_recipe() -> None:
    """Items come from the generator at 1,000,000 · (seed + 1) in order, unless a question is held out."""
    prompts = questions(SUMS, size=100)
    blocks = [open_generator("chain_sum", SUMS["parameters"], seed) for seed in (1_000_000, 1_000_000 + 500)]
    heldout = {item.question for item in held_out(prompts)}
    in_order = [*blocks[0], *blocks[1]]
    same = 0
    for index, entry in enumerate(in_order):
        if entry["question"] not in heldout:
            assert prompts.item(index).question == entry["question"]
            same += 1
    assert 100 < same < 900
    first = open_generator("chain_sum", SUMS["parameters"], 10_000_000)[0]
    assert first["question"] == held_out(prompts)[0].question


def test_training_still_sees_many_questions() -> None:
    prompts = questions(SUMS, size=100)
    counts = Counter(prompts.item(index).question for index in range(1000))
    assert len(counts) > 80  # about 200 exist, 100 are held out
    assert max(counts.values()) < 60


def test_toy_asks_for_the_character_it_expects() -> None:
    prompts = questions(TOY)
    for index in range(50):
        item = prompts.item(index)
        assert item.question.endswith(f"say {item.answer}")
    assert {prompts.item(index).answer for index in range(50)} == set("abc")


def test_each_epoch_of_rows_is_a_new_permutation(rows: dict[str, Any]) -> None:
    prompts = questions(rows)
    epochs = [[prompts.item(epoch * 20 + place).question for place in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(len(set(epoch)) == 20 for epoch in epochs)


def test_a_repeated_question_is_wholly_held_out_or_wholly_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n % 15}", "answer": "a"}) for n in range(60)))
    prompts = questions({"kind": "jsonl", "path": str(path)}, size=5)
    heldout = {item.question for item in held_out(prompts)}
    assert len(heldout) == 5
    assert not heldout & {prompts.item(index).question for index in range(200)}


def test_a_batch_larger_than_the_data_is_refused(rows: dict[str, Any]) -> None:
    questions(rows, workload={"prompts_per_step": 20})
    with pytest.raises(UserError, match=r"remain 20 of the source rows .* the 21 that it gives of workload\.prompts"):
        questions(rows, workload={"prompts_per_step": 21})
    questions(rows, TOY, size=32, workload={"prompts_per_step": 39})
    with pytest.raises(UserError, match=r"remain 20 of the source rows .* the 21 that it gives"):
        questions(rows, TOY, size=32, workload={"prompts_per_step": 41})


def test_a_file_without_questions_to_train_on_is_refused(rows: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="has 36 questions, all of them kept for evaluation"):
        questions(rows, size=100)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (5000, r"size is 5000 for reasoning-gym's chain_sum with these parameters, which has only about 200 different"),
        (200, r"chain_sum with these parameters are practically all held out: .* or widen the generator's parameters"),
    ],
)
def test_a_generator_with_too_few_questions_is_refused(size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        questions(SUMS, size=size)


def test_the_toy_cannot_hold_out_all_it_has() -> None:
    with pytest.raises(UserError, match=r"the source toy, which has only about 300 different questions: lower it\.$"):
        questions(TOY, size=301)


# Several sources


def test_two_sources_are_mixed_by_weight(rows: dict[str, Any]) -> None:
    prompts = questions(rows, TOY | {"weight": 3})
    seen = [prompts.item(index) for index in range(80)]
    counts = Counter(item.source for item in seen)
    assert counts["toy"] + counts["rows"] == 80
    assert abs(counts["toy"] - 60) <= 2
    one_epoch = [item.question for item in seen if item.source == "rows"][:20]
    assert len(set(one_epoch)) == len(one_epoch), "a file's questions come round once an epoch, as they would alone"


def test_held_out_questions_are_of_all_sources_in_their_shares(rows: dict[str, Any]) -> None:
    asked = held_out(questions(rows, TOY | {"weight": 3}, size=20))
    assert Counter(item.source for item in asked) == {"rows": 5, "toy": 15}


def test_a_question_that_two_sources_have_is_held_out_of_both(tmp_path: Path) -> None:
    for name in ("one", "two"):
        lines = [{"question": f"q{n}", "answer": name} for n in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = [{"kind": "jsonl", "path": str(tmp_path / f"{name}.jsonl")} for name in ("one", "two")]
    prompts = questions(*files, size=20)
    asked = {item.question for item in held_out(prompts)}
    assert len(asked) == len(held_out(prompts)) == 20
    assert not asked & {prompts.item(index).question for index in range(200)}


def test_an_evaluation_of_its_own_source_is_not_trained_on_either(rows: dict[str, Any]) -> None:
    exam = {"kind": "source", "source": rows | {"name": "exam"}, "size": 10, "samples": 5}
    prompts = questions(rows, evaluations=[{"kind": "held_out", "size": 6}, exam])
    first, second = prompts.examinations
    assert [(e.name, len(e.items), e.samples) for e in (first, second)] == [("held-out", 6, 2), ("exam", 10, 5)]
    asked = {item.question for examination in prompts.examinations for item in examination.items}
    assert len(asked) == 16
    assert {prompts.item(index).question for index in range(20)} == {f"q{n}" for n in range(36)} - asked
    assert {item.source for item in second.items} == {"exam"}


def test_what_can_be_known_before_a_run_is_all_that_is_asked_of_files(rows: dict[str, Any]) -> None:
    prompts = questions(rows, TOY, size=8, workload={"prompts_per_step": 8})
    known = list(prompts.known())
    assert {f"q{n}" for n in range(36)} <= {item.question for item in known}
    assert len(known) == 8 + 32 + 8


# Keys


def test_a_question_has_the_same_key_wherever_it_comes_from_and_another_in_another_source(
    rows: dict[str, Any],
) -> None:
    one, other = questions(SUMS, size=100), questions(SUMS, size=100, run={"seed": 1})
    keys: dict[str, str] = {}
    for prompts in (one, other):
        for index in range(300):
            item = prompts.item(index)
            assert keys.setdefault(item.question, item.key) == item.key
    assert len(set(keys.values())) == len(keys)
    assert all(key.startswith("chain_sum:") for key in keys.values())
    renamed = questions(rows | {"name": "mine"}).item(0)
    assert renamed.key.startswith("mine:")
    assert Item("q1", "a", {}, "mine").key != Item("q1", "a", {}, "yours").key
