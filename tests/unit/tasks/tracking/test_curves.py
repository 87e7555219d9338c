"""The curves of a run, from a ledger with steps, spans and evaluations."""

import json
from collections.abc import Mapping

import pytest

from tasks.exchange.ledger import Actor, Ledger
from tasks.tracking.curves import Curves
from tasks.tracking.tracker import Tracker
from tests.support.ledger import RUN, B, go_back, join, lease, load, score, supervisor_of, take


class Recorder(Tracker):
    """Keeps the points instead of sending them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.points: list[tuple[str, int, float]] = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.points += [(name, step, value) for name, value in metrics.items()]

    def of(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for known, step, value in self.points if known == name]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def train_step(ledger: Ledger, trainer: Actor, replica: Actor, step: int) -> None:
    """Consume B groups at `step`, tell of it, and make the version after it."""
    for leased in [lease(ledger, replica, step) for _ in range(B)]:
        score(ledger, replica, leased)
    take(ledger, trainer, step)
    ledger.record_step(trainer, step, json.dumps({"reward/mean": step / 10, "loss": 1.0, "step_s": 2.0}))
    ledger.record_version(trainer, step + 1, f"path-{step + 1}")
    load(ledger, replica, (0, step + 1))


def test_each_step_is_tracked_once_with_what_runs_are_compared_by(
    ledger: Ledger, trainer: Actor, replica: Actor, recorder: Recorder
) -> None:
    curves = Curves(recorder, ledger, RUN, 0)
    curves.follow(ledger.progress(RUN))
    assert recorder.points == []
    for step in (0, 1):
        train_step(ledger, trainer, replica, step)
        curves.follow(ledger.progress(RUN))
        curves.follow(ledger.progress(RUN))
    assert recorder.of("reward/mean") == [(0, 0.0), (1, 0.1)]
    assert recorder.of("step_s") == [(0, 2.0), (1, 2.0)]
    assert recorder.of("loss") == []


def test_a_step_that_is_trained_anew_is_tracked_anew(
    ledger: Ledger, trainer: Actor, replica: Actor, recorder: Recorder
) -> None:
    curves = Curves(recorder, ledger, RUN, 0)
    train_step(ledger, trainer, replica, 0)
    curves.follow(ledger.progress(RUN))
    go_back(ledger, 0)
    curves.follow(ledger.progress(RUN))
    again = join(ledger, "trainer")
    take(ledger, again, 0)
    ledger.record_step(again, 0, json.dumps({"reward/mean": 0.7}))
    curves.follow(ledger.progress(RUN))
    assert recorder.of("reward/mean") == [(0, 0.0), (0, 0.7)]


def test_a_later_supervisor_does_not_repeat_the_steps_before_its_own(
    ledger: Ledger, trainer: Actor, replica: Actor, recorder: Recorder
) -> None:
    for step in (0, 1):
        train_step(ledger, trainer, replica, step)
    Curves(recorder, ledger, RUN, 1).follow(ledger.progress(RUN))
    assert recorder.of("reward/mean") == [(1, 0.1)]


def test_the_share_that_replicas_wait_is_of_what_they_told_since_the_last_step(
    ledger: Ledger, trainer: Actor, replica: Actor, recorder: Recorder
) -> None:
    curves = Curves(recorder, ledger, RUN, 0)
    for step, (busy, wait) in enumerate([((0, 3), (3, 4)), ((4, 5), (5, 6))]):
        for kind, (start_s, end_s) in (("busy", busy), ("wait", wait)):
            ledger.record_span(replica, kind, f"{start_s}", end_s - start_s, end_ago_s=-end_s)
        train_step(ledger, trainer, replica, step)
        curves.follow(ledger.progress(RUN))
    shares = recorder.of("wait/rollouts_for_trainer")
    assert [step for step, _ in shares] == [0, 1]
    assert [share for _, share in shares] == pytest.approx([0.25, 0.5], abs=0.02)


def test_an_evaluation_stands_at_the_version_it_examined(
    ledger: Ledger, trainer: Actor, replica: Actor, recorder: Recorder
) -> None:
    curves = Curves(recorder, ledger, RUN, 0)
    ledger.request_evaluation(supervisor_of(ledger), "before", 0)
    curves.track_evaluations()
    assert recorder.points == []
    assert ledger.claim_evaluation(replica, 0)
    result = {"sampled": [[0.0, 1.0], [1.0, 1.0]], "greedy": [1.0, 1.0], "others": {"hard": {"sampled": [[0.5]]}}}
    ledger.record_evaluation(replica, "before", json.dumps(result))
    curves.track_evaluations()
    curves.track_evaluations()
    assert recorder.points == [
        ("eval/held_out", 0, 0.75),
        ("eval/held_out_greedy", 0, 1.0),
        ("eval/others/hard", 0, 0.5),
    ]
