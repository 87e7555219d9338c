"""Questions: the same for every replica, never one that is held out, and a clear refusal of data that cannot serve."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment
from tasks.data.prompts import Item, PromptSource, generator_names, open_generator
from tests.support.places import REPOSITORY


class ByteTokenizer:
    """One token per byte, and `<eos>` as one more."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        ids: list[int] = []
        for number, part in enumerate(text.split("<eos>")):
            ids += ([256] if number else []) + list(part.encode())
        return ids


def experiment(data: dict[str, Any], **sections: dict[str, Any]) -> Experiment:
    reward = {"kind": "character_share" if data.get("kind") in ("toy", "jsonl") else "reasoning_gym"}
    tree = {"data": data, "reward": reward, "prompt": {"template": "{question}", "prefill": "", "stop": "<eos>"}}
    return parse_experiment(tree | sections, "test")


def source(data: dict[str, Any], **sections: dict[str, Any]) -> PromptSource:
    return PromptSource(experiment(data, **sections), ByteTokenizer())


TOY: dict[str, Any] = {"kind": "toy", "heldout_size": 16}
SUMS: dict[str, Any] = {"kind": "reasoning_gym", "task": "chain_sum"}


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n}", "answer": f"a{n}"}) for n in range(30)) + "\n")
    return {"kind": "jsonl", "path": str(path), "heldout_size": 10}


@pytest.mark.parametrize("kind", ["toy", "sums", "rows"])
def test_replicas_agree_and_no_held_out_question_is_trained_on(kind: str, rows: dict[str, Any]) -> None:
    data = {"toy": TOY, "sums": SUMS, "rows": rows}[kind]
    one, other = source(data), source(data)
    heldout = {item.question for item in one.heldout()}
    assert len(heldout) == len(one.heldout()) == experiment(data).data.heldout_size
    assert one.heldout() == other.heldout()
    # In any order: a replica sees only the indices it leases.
    forward = [one.item(index) for index in range(400)]
    backward = [other.item(index) for index in reversed(range(400))]
    assert forward == backward[::-1]
    assert not heldout & {item.question for item in forward}


@pytest.mark.parametrize("kind", ["toy", "sums", "rows"])
def test_the_run_seed_changes_training_and_not_the_held_out_set(kind: str, rows: dict[str, Any]) -> None:
    data = {"toy": TOY, "sums": SUMS, "rows": rows}[kind]
    one, other = source(data), source(data, run={"seed": 1})
    assert one.heldout() == other.heldout()
    assert [one.item(index) for index in range(20)] != [other.item(index) for index in range(20)]


def test_the_laptop_questions_are_those_of_the_recipe() -> None:
    """Items come from the generator at 1,000,000 · (seed + 1) in order, unless a question is held out."""
    prompts = source(SUMS)
    first_block, second_block = (open_generator(experiment(SUMS).data, seed) for seed in (1_000_000, 1_000_000 + 500))
    heldout = {item.question for item in prompts.heldout()}
    in_order = [*first_block, *second_block]
    same = 0
    for index, entry in enumerate(in_order):
        if entry["question"] not in heldout:
            assert prompts.item(index).question == entry["question"]
            same += 1
    assert 100 < same < 900
    assert open_generator(experiment(SUMS).data, 10_000_000)[0]["question"] == prompts.heldout()[0].question


def test_training_still_sees_many_questions() -> None:
    prompts = source(SUMS)
    counts = Counter(prompts.item(index).question for index in range(1000))
    assert len(counts) > 80  # about 200 exist, 100 are held out
    assert max(counts.values()) < 60


def test_toy_asks_for_the_character_it_expects() -> None:
    prompts = source(TOY)
    for index in range(50):
        item = prompts.item(index)
        assert item.question.endswith(f"say {item.answer}")
    assert {prompts.item(index).answer for index in range(50)} == set("abc")


def test_each_epoch_of_rows_is_a_new_permutation(rows: dict[str, Any]) -> None:
    prompts = source(rows)
    epochs = [[prompts.item(epoch * 20 + place).question for place in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(len(set(epoch)) == 20 for epoch in epochs)


def test_a_repeated_question_is_wholly_held_out_or_wholly_trained_on(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"q{n % 15}", "answer": "a"}) for n in range(60)))
    prompts = source({"kind": "jsonl", "path": str(path), "heldout_size": 5})
    heldout = {item.question for item in prompts.heldout()}
    assert len(heldout) == 5
    assert not heldout & {prompts.item(index).question for index in range(200)}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"question": "q", "answer": "a"}\n\n{"question": "q"', r"Line 3 of .*rows\.jsonl is not JSON"),
        ('{"question": "q", "answer": "a"}\n["q", "a"]', r"Line 2 of .* lacks a text"),
        ('{"question": "q"}', r"Line 1 of .* lacks a text for `question` or `answer`"),
        ('{"question": "q", "answer": 4}', r"Line 1 of .* lacks a text"),
        ('{"question": " ", "answer": "4"}', r"Line 1 of .* lacks a text"),
        ("\n", "has no questions"),
        ('{"question": "q", "answer": "a"}', r"has 1 questions; .* remain 0 .*prompts_per_step 8"),
    ],
)
def test_bad_rows_are_refused_by_line(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines)
    with pytest.raises(UserError, match=message):
        source({"kind": "jsonl", "path": str(path), "heldout_size": 1})


def test_a_batch_larger_than_the_data_is_refused(rows: dict[str, Any]) -> None:
    source(rows, workload={"prompts_per_step": 20})
    with pytest.raises(UserError, match=r"remain 20 to train on, fewer than workload\.prompts_per_step 21"):
        source(rows, workload={"prompts_per_step": 21})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file .*missing\.jsonl, which data\.path names"):
        source({"kind": "jsonl", "path": str(tmp_path / "missing.jsonl")})
    with pytest.raises(UserError, match=r"data\.path missing\.jsonl is relative .* give the absolute path"):
        source({"kind": "jsonl", "path": "missing.jsonl"})
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(UserError, match=r"latin\.jsonl cannot be read as UTF-8"):
        source({"kind": "jsonl", "path": str(tmp_path / "latin.jsonl")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"task": "zzz"}, "'zzz' is not a reasoning-gym generator"),
        ({"parameters": {"min_term": 2}}, r"has 'min_term', which chain_sum does not take \(it takes min_terms"),
        ({"parameters": {"min_terms": 3, "max_terms": 2}}, "do not fit chain_sum: max_terms must be >= min_terms"),
        ({"parameters": {"min_terms": "x"}}, "do not fit chain_sum"),
        ({"parameters": {"seed": 1}}, "has 'seed'"),
        ({"heldout_size": 5000}, r"heldout_size is 5000, but .* only about 200 different questions"),
        ({"heldout_size": 200}, "practically all held out"),
    ],
)
def test_a_generator_that_cannot_serve_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        source(SUMS | change)


def test_the_toy_cannot_hold_out_all_it_has() -> None:
    with pytest.raises(UserError, match=r"data\.kind toy has only about 300 different questions: lower it\.$"):
        source(TOY | {"heldout_size": 301})


def test_a_prompt_is_template_question_and_prefill() -> None:
    prompt = {"template": "Q: {question} {x}\nA:", "prefill": " so", "stop": "<eos>"}
    prompts = source(TOY, prompt=prompt)
    assert bytes(prompts.encode(Item("{2}", "", {}))) == b"Q: {2} {x}\nA: so"
    assert prompts.stop_token_ids == (256,)


def test_a_prompt_beyond_the_limit_is_refused() -> None:
    prompts = source(TOY, workload={"max_prompt_tokens": 8})
    assert len(prompts.encode(Item("x" * 8, "", {}))) == 8
    with pytest.raises(UserError, match=r"'xxxxxxxxx' has 9 tokens, above workload\.max_prompt_tokens 8"):
        prompts.encode(Item("x" * 9, "", {}))


@pytest.mark.parametrize("stop", ["<end>", ""])
def test_a_stop_that_is_not_one_token_is_refused(stop: str) -> None:
    with pytest.raises(UserError, match=r"prompt\.stop .* tokens of this model's tokenizer"):
        source(TOY, prompt={"template": "{question}", "prefill": "", "stop": stop})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.text(), st.text(), st.dictionaries(st.text(), json_values))
def test_an_item_survives_the_way_to_its_scorer(question: str, answer: str, metadata: dict[str, Any]) -> None:
    item = Item(question, answer, metadata)
    line = item.to_json()
    assert "\n" not in line
    assert Item.from_json(line) == item


def test_the_generators_are_known_without_importing_them() -> None:
    """Importing all of them takes ten seconds, too long to be told of a misspelt name."""
    code = (
        "import sys\nfrom planners.errors import UserError\nfrom tasks.config.data import DataSection\n"
        "from tasks.data.prompts import open_generator\n"
        "try: open_generator(DataSection(task='chain_sums'), 0)\n"
        "except UserError as error: print(error, 'reasoning_gym' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", code], cwd=REPOSITORY, text=True, timeout=60)
    assert said == "data.task 'chain_sums' is not a reasoning-gym generator (did you mean 'chain_sum'?). False\n"

    from reasoning_gym.factory import DATASETS

    assert generator_names() == sorted(DATASETS)
