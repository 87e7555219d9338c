"""Who is replaced for silence or for standing still, by the supervisor's own clock, and who is left alone."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flows.running import supervisor as supervising
from flows.running.context import RunContext
from flows.running.supervisor import Supervisor
from tasks.exchange.ledger import Actor
from tests.support.ledger import RUN
from tests.support.supervising import PLAN, FakeLauncher, finish_run, make

Beats = Callable[[Actor, int], dict[str, Any]]
"""What an actor's beat says at a look of the supervisor, the first being 0."""


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "POLL_S", 0.0)


def watch(run: RunContext, launcher: FakeLauncher, beats: Beats, looks_s: Sequence[float]) -> list[str]:
    """Let actors beat while a supervisor looks at these seconds, and then the run end; what is told of replacements."""
    times, told, look = iter([0.0, *looks_s]), [0.0], 0
    lines: list[str] = []

    def on_progress(progress: object) -> None:
        nonlocal look
        if (now := next(times, None)) is None:
            finish_run(launcher)
        told[0] = told[0] if now is None else now
        for actor in {actor.role: actor for actor in launcher.actors.values()}.values():
            launcher.ledger.heartbeat(actor, "running", "generating", **beats(actor, look))
        look += 1

    Supervisor(run, 0, PLAN, launcher, on_progress, lines.extend, lambda: told[0]).run()
    return lines


def test_a_replica_that_beats_but_stands_still_is_replaced_and_it_is_said_why(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    leases = []

    def beats(actor: Actor, look: int) -> dict[str, Any]:
        if actor != launcher.actors["rollout-2"]:
            return {"may_rest_s": 300.0, "work": look}
        leases.append(launcher.ledger.lease_group(actor, 0, "lease"))
        return {"may_rest_s": 300.0, "work": min(look, 2)}

    lines = watch(run, launcher, beats, range(0, 400, 10))
    assert launcher.started == ["train", "rollout", "rollout"]
    (line,) = lines
    assert "replica 0, attempt 1, died: it beat, but its count of work stood still at 2 for 310 s" in line
    assert line.endswith("(run.work_deadline_s; last it said 'generating'); starting it again (1 of 1)")
    first, *_ = launcher.ledger.groups(RUN)
    assert leases[0] is not None
    assert (first.group_id, first.drop_reason) == (leases[0].group_id, "lease_lost")


@pytest.mark.parametrize(
    "beats",
    [
        lambda actor, look: {"may_rest_s": 300.0, "work": look // 20},
        lambda actor, look: {"work": 2},
        lambda actor, look: {"work": 2, "may_rest_s": 1200.0 if look > 25 else 300.0},
    ],
    ids=["who gets on slowly", "who waits at a shut gate", "who loads weights for long"],
)
def test_who_has_a_reason_to_stand_still_is_left_alone(tmp_path: Path, beats: Beats) -> None:
    run, launcher = make(tmp_path)
    assert watch(run, launcher, beats, range(0, 1200, 10)) == []
    assert len(launcher.started) == 2


def test_who_is_not_heard_is_not_known_to_stand_still(tmp_path: Path) -> None:
    """Its network was away, and what it did meanwhile comes with its next beat."""
    run, launcher = make(tmp_path, heartbeat_deadline_s=900.0, work_deadline_s=100.0)
    heartbeat = launcher.ledger.heartbeat

    def only_now_and_then(actor: Actor, state: str, message: str = "", look: int = 0) -> object:
        return heartbeat(actor, state, message, look, may_rest_s=100.0) if look % 50 < 3 else None

    launcher.ledger.heartbeat = only_now_and_then  # type: ignore[assignment,method-assign]
    assert watch(run, launcher, lambda actor, look: {"look": look}, range(0, 1000, 10)) == []


@pytest.mark.parametrize("gap_s", [3600.0, 30.0])
def test_a_supervisor_that_was_stopped_blames_nobody(tmp_path: Path, gap_s: float) -> None:
    """Whatever the clock said meanwhile, a whole deadline begins anew: for beats, for work, for starts, for steps."""
    run, launcher = make(tmp_path, work_deadline_s=60.0, step_deadline_s=70.0, start_deadline_s=5.0)

    def beats(actor: Actor, look: int) -> dict[str, Any]:
        return {"may_rest_s": 60.0, "work": 0}

    looks_s = [*range(0, 56, 5), *(55 + gap_s + second for second in range(0, 56, 5))]
    assert watch(run, launcher, beats, looks_s) == []
    assert len(launcher.started) == 2
