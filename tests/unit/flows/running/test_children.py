"""A process that a flow runs: how it ended is told, and an actor's own death is said in its name."""

import sys
from pathlib import Path
from typing import Any

import pytest

from flows import rollout as rolling_out
from flows.running.children import ProcessFailed, run_until_it_ends
from planners.plan.run import MachineShare
from tasks.config.settings import Settings
from tasks.exchange.ledger import Ledger
from tests.support.ledger import RUN, a_process, assign, begin
from tests.support.plan import run_plan

SHARE = MachineShare(machine="here", device_type="cpu", kind="cpu", devices=(0,))


@pytest.mark.parametrize(
    ("last_act", "how", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by SIGSEGV", "was ended by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", None, "was ended by SIGKILL"),
        ("sys.exit(3)", None, "ended with status 3"),
    ],
)
def test_how_a_process_ended_is_told(tmp_path: Path, last_act: str, how: str | None, message: str) -> None:
    argv = [sys.executable, "-c", f"import os, signal, sys; print('bye', flush=True); {last_act}"]
    with pytest.raises(ProcessFailed, match=f"(?s)The process of it {message}; the end of .*bye") as caught:
        run_until_it_ends(argv, SHARE, "it", tmp_path / "log")
    assert caught.value.how == how


@pytest.mark.parametrize(("how", "state"), [("its process was ended by SIGSEGV", "died"), (None, "running")])
def test_a_replica_that_can_say_nothing_any_more_is_said_to_have_died(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, how: str | None, state: str
) -> None:
    ledger = Ledger(settings.shared.ledger_url)
    epoch = ledger.add_plan_epoch(begin(ledger), run_plan("here"))

    def run_and_fail(*arguments: Any) -> None:
        ledger.register(actor, a_process())
        ledger.heartbeat(actor)
        raise ProcessFailed("it failed", how)

    actor = assign(ledger, "replica")
    monkeypatch.setattr(rolling_out, "run_until_it_ends", run_and_fail)
    with pytest.raises(ProcessFailed):
        rolling_out.rollout.fn(RUN, epoch, 0, actor.attempt)
    row = next(row for row in ledger.actors(RUN) if row.role == "replica")
    assert (row.state, row.message) == (state, how or "")
