"""The supervisor against a real ledger and a hand-written launcher: completion, restarts, budgets, stalls."""

import json
from pathlib import Path

import pytest

from flows import supervisor as supervising
from flows.context import RunContext
from flows.supervisor import RunFailed, Supervisor
from planners.plan import Placement, Placements
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.experiment import Experiment, parse_experiment
from tasks.settings import Settings

RUN = "run"
ROLE = {"train": "trainer", "rollout": "replica"}


class FakeLauncher:
    """Starting a placement registers its actor; `script` says what happens to it at each look."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.started: list[tuple[str, int | None]] = []
        self.cancelled: list[str] = []
        self.ended: set[str] = set()
        self.actors: dict[str, Actor] = {}
        self.joins = True

    def start(self, placement: Placement, resume_step: int | None) -> str:
        self.started.append((placement.role, resume_step))
        flow_run_id = f"{placement.role}-{len(self.started)}"
        if self.joins:
            actor = self.ledger.register(RUN, ROLE[placement.role], placement.slot, pid=1, machine="here")
            self.ledger.heartbeat(actor, "running")
            self.actors[flow_run_id] = actor
        return flow_run_id

    def cancel(self, flow_run_id: str) -> None:
        self.cancelled.append(flow_run_id)
        self.ended.add(flow_run_id)

    def has_ended(self, flow_run_id: str) -> bool:
        return flow_run_id in self.ended


def placement(role: str) -> Placement:
    return Placement.model_validate(
        {"role": role, "slot": 0, "machine": "here", "device_type": "cpu", "kind": "cpu", "devices": [0]}
    )


PLACED = Placements(placement("train"), (placement("rollout"),))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervising, "_POLL_S", 0.0)


def make(tmp_path: Path, **run: object) -> tuple[RunContext, FakeLauncher]:
    settings = Settings(tmp_path, tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}")
    experiment: Experiment = parse_experiment(
        {"workload": {"prompts_per_step": 1}, "run": {"steps": 1, "restarts": 1, **run}}, "test"
    )
    ledger = Ledger(settings.ledger_url)
    ledger.create_run(RUN, prompts_per_step=1, max_staleness=1, steps=1, max_attempts_per_prompt=2)
    ledger.request_evaluation(RUN, "before", 0)
    directory = RunDirectory(tmp_path)
    directory.create()
    actor = ledger.register(RUN, "supervisor", 0, pid=1, machine="here")
    return RunContext(RUN, experiment, directory, ledger, settings, actor, None, None), FakeLauncher(ledger)


def finish_run(launcher: FakeLauncher) -> None:
    """What trainer and replica would do: one step, both evaluations."""
    ledger = launcher.ledger
    trainer = max((a for a in launcher.actors.values() if a.role == "trainer"), key=lambda actor: actor.attempt)
    replica = max((a for a in launcher.actors.values() if a.role == "replica"), key=lambda actor: actor.attempt)
    if ledger.progress(RUN).step == 0:
        ledger.record_version(trainer, 0, "w0")
        ledger.set_loaded(replica, 0, 0)
        assert ledger.claim_evaluation(replica, 0)
        ledger.record_evaluation(replica, "before", json.dumps({}))
        lease = ledger.lease_group(replica, 0)
        assert lease is not None
        ledger.complete_group(replica, lease.group_id, 0, 1.0, {"scored": 2}, 4)
        assert ledger.take_groups(trainer, 0)
        ledger.record_step(trainer, 0, json.dumps({"reward/mean": 1.0}))
        ledger.record_version(trainer, 1, "w1")
        ledger.set_loaded(replica, 0, 1)
    if ledger.claim_evaluation(replica, 1):
        ledger.record_evaluation(replica, "after", json.dumps({}))


def test_a_run_ends_when_trained_and_evaluated(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    seen: list[int] = []

    def on_progress(progress: object) -> None:
        seen.append(1)
        finish_run(launcher)

    Supervisor(run, PLACED, launcher, on_progress).run()
    assert [role for role, _ in launcher.started] == ["train", "rollout"]
    assert seen


def test_a_dead_replica_is_started_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            launcher.ended.add("rollout-2")  # its flow run is over although its heartbeat is fresh
        if looks >= 3:
            finish_run(launcher)

    Supervisor(run, PLACED, launcher, on_progress).run()
    assert launcher.started == [("train", None), ("rollout", None), ("rollout", None)]


def test_a_dead_trainer_goes_on_from_its_checkpoint_in_a_new_lineage(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, step_deadline_s=0.2, start_deadline_s=0.2)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            launcher.ledger.finish(launcher.actors["train-1"], "failed", "killed")

    run.ledger.resume_from(RUN, 0)
    before = run.ledger.find_run(run_id=RUN)
    with pytest.raises(RunFailed, match="No step"):
        Supervisor(run, PLACED, launcher, on_progress).run()
    after = run.ledger.find_run(run_id=RUN)
    assert launcher.started[-1] == ("train", 0)
    assert before is not None
    assert after is not None
    assert after.lineage == before.lineage + 1


def test_a_replica_that_left_before_the_end_is_started_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    looks = 0

    def on_progress(progress: object) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            launcher.ledger.finish(launcher.actors["rollout-2"], "done")
        if looks >= 3:
            finish_run(launcher)

    Supervisor(run, PLACED, launcher, on_progress).run()
    assert [role for role, _ in launcher.started] == ["train", "rollout", "rollout"]


def test_a_run_that_is_ended_elsewhere_is_not_kept_alive(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    with pytest.raises(RunFailed, match="ended elsewhere"):
        Supervisor(run, PLACED, launcher, lambda progress: launcher.ledger.set_run_state(RUN, "cancelled")).run()
    assert len(launcher.started) == 2


def test_the_restart_budget_ends(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=1)

    def on_progress(progress: object) -> None:
        launcher.ended.add(f"rollout-{len(launcher.started)}")

    with pytest.raises(RunFailed, match=r"budget run\.restarts is spent"):
        Supervisor(run, PLACED, launcher, on_progress).run()


def test_what_never_worked_is_not_tried_again(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)

    def on_progress(progress: object) -> None:
        launcher.ledger.heartbeat(launcher.actors["rollout-2"], "starting")
        launcher.ledger.finish(launcher.actors["rollout-2"], "failed", "not enough memory: 2 GiB short")

    with pytest.raises(RunFailed, match="could not start: not enough memory"):
        Supervisor(run, PLACED, launcher, on_progress).run()
    assert len(launcher.started) == 2


def test_a_flow_run_that_ends_before_joining_is_noticed(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, restarts=0)
    launcher.joins = False

    def on_progress(progress: object) -> None:
        launcher.ended.add("train-1")

    with pytest.raises(RunFailed, match="ended before it joined"):
        Supervisor(run, PLACED, launcher, on_progress).run()


def test_a_stall_names_the_actors(tmp_path: Path) -> None:
    run, launcher = make(tmp_path, step_deadline_s=0.1, start_deadline_s=0.1)
    with pytest.raises(RunFailed, match=r"No step was finished.*replica 0 running.*trainer 0 running"):
        Supervisor(run, PLACED, launcher, lambda progress: None).run()


def test_children_that_do_not_leave_are_cancelled(tmp_path: Path) -> None:
    run, launcher = make(tmp_path)
    supervisor = Supervisor(run, PLACED, launcher, lambda progress: finish_run(launcher))
    supervisor.run()
    supervisor.end_children(patience_s=0.1, deadline_s=5.0)
    assert launcher.cancelled == ["train-1", "rollout-2"]
