"""What is the owner's alone stays so, whoever made it first and whatever the umask is."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from planners.errors import UserError
from tasks.config.settings import Settings
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Ledger
from tasks.machine.private import make_private
from tasks.machine.processes import ProcessGroup
from tasks.readiness import require_places
from tests.support.stack import until


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """As the most careless user has it."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def run_to_its_end(argv: list[str], log: Path) -> None:
    process = ProcessGroup.start(argv, {}, log)
    until(lambda: process.poll() is not None, 30.0, "the process's end")


def test_a_directory_is_made_closed_and_one_of_before_is_closed(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    assert mode(old) == 0o777
    for directory in (old, tmp_path / "a" / "new"):
        assert mode(make_private(directory, "HEXFLOW_HOME")) == 0o700


def test_a_directory_of_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a place for all it may have been made before, or be a link: whose it is could take every lock in it."""
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(UserError, match=r"belongs to the user .*: name a directory of your own in HEXFLOW_LOCAL"):
        make_private(tmp_path, "HEXFLOW_LOCAL")


def test_a_link_of_somebody_elses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may lead to a directory of one's own, and elsewhere tomorrow."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    own, seen = tmp_path.lstat(), link.lstat()
    theirs = os.stat_result([*seen[:4], own.st_uid + 1, *seen[5:10]])
    monkeypatch.setattr(Path, "lstat", lambda path: theirs if path == link else own)
    with pytest.raises(UserError, match="belongs to the user"):
        make_private(link, "HEXFLOW_LOCAL")


def test_home_runs_ledger_and_logs_are_their_owners_alone(settings: Settings) -> None:
    require_places(settings)
    Ledger(settings.shared.ledger_url).close()
    run = RunDirectory(settings.shared.runs / "run-1")
    run.create()
    run_to_its_end([sys.executable, "-c", ""], settings.local.logs / "x.log")
    database = Path(str(make_url(settings.shared.ledger_url).database))
    assert [mode(place) for place in (settings.local.home, settings.local.logs, run.root, run.logs)] == [0o700] * 4
    assert [mode(file) for file in (database, Path(f"{database}.lock"), settings.local.logs / "x.log")] == [0o600] * 3


def test_what_a_process_of_ours_writes_is_closed_as_well(tmp_path: Path) -> None:
    file = tmp_path / "made"
    run_to_its_end([sys.executable, "-c", f"open({str(file)!r}, 'w').close()"], tmp_path / "log")
    assert mode(file) == 0o600
