"""A person's own function: kept with the run as it was, and refused before any work where it cannot be used."""

import hashlib
import subprocess
import time
from pathlib import Path

import pytest

from planners.errors import UserError
from tasks.config.rewards import MathVerifyReward, PythonReward
from tasks.rewards import python
from tasks.rewards.python import check_functions, keep_functions, open_function

GOOD = "def score(prompt, answer, item):\n    return 1.0\n"


def reward(path: Path, source: str | None, function: str = "score") -> PythonReward:
    if source is not None:
        path.write_text(source)
    return PythonReward(function=f"{path}:{function}")


@pytest.mark.parametrize(
    "source",
    [
        GOOD,
        "def score(prompt: str, answer: str, item: dict, /) -> float: return 1.0",
        "def score(prompt, answer, item, scale=2): return 1.0",
        "def score(*args): return 1.0",
        "class Score:\n    def __call__(self, prompt, answer, item): return 1.0\nscore = Score()",
        "print('a line on standard output is no reply'); import dataclasses\n"
        "@dataclasses.dataclass\nclass A:\n    x: 'int' = 1\ndef score(prompt, answer, item): return A().x",
    ],
)
def test_what_can_be_called_with_prompt_answer_and_item_is_taken(source: str, tmp_path: Path) -> None:
    check_functions([MathVerifyReward(), reward(tmp_path / "mine.py", source)])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            None,
            r"mine\.py, which the function of the reward score names, cannot be read .*: it must lie beside the exp",
        ),
        ("def score(prompt answer):", r"mine\.py cannot be imported \(SyntaxError"),
        ("import nothing_of_this_name", r"cannot be imported \(ModuleNotFoundError: No module named 'nothing_of"),
        ("raise SystemExit(0)", r"cannot be imported \(SystemExit"),
        ("import os; os._exit(0)", "cannot be used: the process that imported it died"),
        ("def reward(prompt, answer, item): return 1", "mine.py has no function score"),
        ("score = 5", "has no function score: define one there"),
        ("async def score(prompt, answer, item): return 1", "score in .* is a coroutine or a generator: write a plain"),
        ("def score(prompt, answer, item): yield 1", "score in .* is a coroutine or a generator: write a plain"),
        (
            "def score(answer): return 1",
            r"is called with prompt, answer and item, and takes other arguments \(too many",
        ),
        ("def score(a, b, c, d): return 1", r"takes other arguments \(missing a required argument: 'd'\)"),
        ("def score(prompt, answer, *, item): return 1", "takes other arguments"),
    ],
)
def test_what_cannot_is_refused_with_the_reason(source: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_functions([reward(tmp_path / "mine.py", source)])


def test_a_file_that_hangs_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "CHECK_DEADLINE_S", 3.0)
    source = f"import subprocess; child = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w')"
    source += ".write(str(child.pid))\nwhile True: pass"
    with pytest.raises(UserError, match=r"Importing .*mine\.py:score took over 3 s and was ended"):
        check_functions([reward(tmp_path / "mine.py", source)])
    give_up = time.monotonic() + 20
    while subprocess.run(["ps", "-p", (tmp_path / "pid").read_text(), "-o", "stat="], capture_output=True).stdout.strip(
        b"Z\n "
    ):
        assert time.monotonic() < give_up


def test_neither_the_working_directory_nor_neighbours_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run imports a copy, from other directories: what works only here must not pass."""
    (tmp_path / "neighbour.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="No module named 'neighbour'"):
        check_functions([reward(tmp_path / "mine.py", "import neighbour\n" + GOOD)])


def test_the_copy_is_what_the_run_scores_with(tmp_path: Path) -> None:
    given = reward(tmp_path / "mine.py", GOOD)
    kept = keep_functions([MathVerifyReward(), given], tmp_path / "run" / "rewards")
    assert kept[0] == MathVerifyReward()
    copy = kept[1]
    assert isinstance(copy, PythonReward)
    checksum = hashlib.sha256(GOOD.encode()).hexdigest()
    assert copy.function == f"{tmp_path / 'run' / 'rewards'}/score-{checksum[:12]}.py:score"
    assert (copy.sha256, copy.label) == (checksum, "score")
    (tmp_path / "mine.py").write_text("def score(prompt, answer, item): return 2.0")
    assert open_function(copy)("", "", {}) == 1.0
    assert keep_functions(kept, tmp_path / "run" / "rewards") == kept
    Path(copy.function.removesuffix(":score")).write_text(GOOD + "# changed")
    with pytest.raises(UserError, match="is not the file that the run was started with: its checksum is another"):
        open_function(copy)


def test_a_relative_function_of_the_form_is_refused() -> None:
    with pytest.raises(UserError, match=r"mine\.py:score of a reward is relative: give the absolute path"):
        check_functions([PythonReward(function="mine.py:score")])
