"""How far an evaluation in a process of its own is: a byte for each token and answer, in a file beside its result."""

from pathlib import Path


def count_work(out: Path, amount: int) -> None:
    """Say that so much more is done of the evaluation that will write its result to `out`."""
    with _file(out).open("ab") as file:
        file.write(b"." * amount)


def work_so_far(out: Path) -> int:
    """What has been counted."""
    file = _file(out)
    return file.stat().st_size if file.exists() else 0


def _file(out: Path) -> Path:
    return out.with_name(out.name + ".work")
