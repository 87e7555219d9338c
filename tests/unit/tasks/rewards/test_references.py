"""Reference answers that cannot be scored are named by their lines before a run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.config.data import JsonlSource
from tasks.config.rewards import MathVerifyReward, PythonReward, Reward
from tasks.data.item import Item
from tasks.data.sources.rows import LINE
from tasks.rewards.references import check_references

SOURCE = JsonlSource(path="sums.jsonl")


def items(answers: Sequence[str]) -> list[Item]:
    return [Item(f"q{n}", answer, {LINE: n}, SOURCE.label) for n, answer in enumerate(answers, start=1)]


def own_reward(tmp_path: Path, body: str, timeout_s: float = 5.0) -> Reward:
    (tmp_path / "own.py").write_text(f"def own(prompt, answer, item):\n    {body}\n")
    return PythonReward(function=f"{tmp_path / 'own.py'}:own", timeout_s=timeout_s)


def test_lines_that_no_reward_can_score_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    check_references([MathVerifyReward()], [SOURCE], items(["12", "1/2", "$x^2$"]))
    with pytest.raises(UserError, match=r"in line 2, 4 of sums: math_verify: \S.* Mend or remove these lines"):
        check_references([MathVerifyReward()], [SOURCE], items(["12", "", "3", " "]))
    assert capfd.readouterr().err == ""


def test_a_low_score_is_no_fault_and_many_lines_are_cut_short(tmp_path: Path) -> None:
    check_references([own_reward(tmp_path, "return -3.5")], [SOURCE], items(["a", "b"]))
    raises = own_reward(tmp_path, "raise ValueError('no ' + answer)")
    with pytest.raises(UserError, match=r"line 1, 2, .*, 10 and 5 more of sums: .* no x"):
        check_references([raises], [SOURCE], items(["x"] * 15))


def test_one_that_hangs_is_named_too(tmp_path: Path) -> None:
    hangs = own_reward(tmp_path, "while item['metadata']['line_number'] == 2: pass\n    return 1", timeout_s=1.0)
    with pytest.raises(UserError, match=r"line 2 of sums: .* took over 1 s"):
        check_references([hangs], [SOURCE], items(["a", "b"]))


def test_questions_that_come_from_no_file_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.rewards.references.ScoringPool", None)
    check_references([MathVerifyReward()], [SOURCE], [Item("q", "12", {}, SOURCE.label)])
