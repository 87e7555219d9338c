"""A supervisor's run in a ledger of its own, and a launcher under whose eyes nothing really starts."""

import json
from pathlib import Path

from flows.running.context import RunContext
from flows.running.launcher import FLOWS
from planners.hardware.machine import Machine
from planners.plan.run import MachineShare
from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger, Process
from tasks.machine.processes import process_key
from tests.support.ledger import RUN, a_process, begin
from tests.support.places import settings_of
from tests.support.plan import run_plan

PLAN = run_plan("here")
HERE = Machine(name="here", devices=())


class FakeLauncher:
    """Starting an actor registers it; `script` says what happens to it at each look."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.ended: set[str] = set()
        self.actors: dict[str, Actor] = {}
        self.joins = True
        self.is_away = False
        self.pids: dict[str, int] = {}

    def start(self, actor: Actor, share: MachineShare) -> str:
        flow = FLOWS[actor.role]
        self.started.append(flow)
        flow_run_id = f"{flow}-{len(self.started)}"
        if self.joins:
            self.ledger.register(actor, self._process(flow_run_id))
            self.ledger.heartbeat(actor, "running")
            self.actors[flow_run_id] = actor
        return flow_run_id

    def _process(self, flow_run_id: str) -> Process:
        pid = self.pids.get(flow_run_id)
        return Process(process_key(pid), pid, "here") if pid else a_process()

    def cancel(self, flow_run_id: str) -> None:
        self.cancelled.append(flow_run_id)
        if not self.is_away:
            self.ended.add(flow_run_id)

    def has_ended(self, flow_run_id: str) -> bool:
        return flow_run_id in self.ended


def make(tmp_path: Path, **run: object) -> tuple[RunContext, FakeLauncher]:
    settings = settings_of(tmp_path, tmp_path, f"sqlite:///{tmp_path / 'ledger.db'}")
    experiment: Experiment = parse_experiment(
        {"workload": {"prompts_per_step": 1}, "run": {"steps": 1, "restarts": 1, **run}}, "test"
    )
    ledger = Ledger(settings.shared.ledger_url)
    supervisor = begin(ledger, RUN, (1, 1, 1), flow_run_id="flow-1")
    ledger.request_evaluation(supervisor, "before", 0)
    directory = RunDirectory(tmp_path)
    directory.create()
    process = a_process()
    return (
        RunContext(RUN, experiment, directory, ledger, settings, supervisor, process, None, None, HERE),
        FakeLauncher(ledger),
    )


def train_run(launcher: FakeLauncher) -> None:
    """What trainer and replica would do until the last step is trained."""
    ledger = launcher.ledger
    trainer = max((a for a in launcher.actors.values() if a.role == "trainer"), key=lambda actor: actor.attempt)
    replica = max((a for a in launcher.actors.values() if a.role == "replica"), key=lambda actor: actor.attempt)
    if ledger.progress(RUN).step == 0:
        ledger.record_version(trainer, 0, "w0")
        ledger.set_loaded(replica, 0, 0)
        assert ledger.claim_evaluation(replica, 0)
        ledger.record_evaluation(replica, "before", json.dumps({}))
        lease = ledger.lease_group(replica, 0, "lease")
        assert lease is not None
        ledger.complete_group(replica, lease.group_id, 0, 1.0, {"scored": 2}, 4)
        assert ledger.take_groups(trainer, 0)
        ledger.record_step(trainer, 0, json.dumps({"reward/mean": 1.0}))
        ledger.record_version(trainer, 1, "w1")
        ledger.set_loaded(replica, 0, 1)


def finish_run(launcher: FakeLauncher) -> None:
    """What they would do: one step, both evaluations."""
    train_run(launcher)
    ledger = launcher.ledger
    replica = max((a for a in launcher.actors.values() if a.role == "replica"), key=lambda actor: actor.attempt)
    if ledger.claim_evaluation(replica, 1):
        ledger.record_evaluation(replica, "after", json.dumps({}))
