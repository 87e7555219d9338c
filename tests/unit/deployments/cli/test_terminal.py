"""A command that is at work says so."""

import threading

import pytest

from deployments.cli import terminal
from deployments.cli.terminal import BAD_INPUT, complain, telling


def test_what_is_done_is_said_again_and_again_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "TELL_EVERY_S", 0.0)
    said: list[str] = []
    heard = threading.Event()

    def say(what: str) -> None:
        said.append(what)
        if what.startswith("planning"):
            heard.set()

    with telling(say) as tell:
        tell("preparing")
        tell("planning")
        assert heard.wait(10)
    assert "planning, 0 s so far" in said
    assert "telling" not in {thread.name for thread in threading.enumerate()}, "nothing is said when it is over"


def test_a_complaint_shows_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    """Libraries put the URL that they did not reach into their errors."""
    assert complain("no answer from http://me:hush@host:4200/api.") == BAD_INPUT
    assert capsys.readouterr().err == "hexflow: no answer from http://…@host:4200/api.\n"
