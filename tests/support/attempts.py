"""Supervisors and actors that are stopped, replaced, woken and late, on one ledger, beside a model of who is in charge.

Every process that ever was keeps its name for itself and goes on using it. The model says of each call whether it may
succeed; calls whose answer was lost are made again and must answer the same.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from planners.errors import UserError
from tasks.exchange.ledger import Actor, Fenced, Ledger, Process
from tasks.exchange.ledger.fence import ACTIVE, OPEN
from tests.support.ledger import a_process, begin
from tests.support.plan import run_plan

SLOTS = (("trainer", 0), ("replica", 0), ("replica", 1))
Answer = TypeVar("Answer")


@dataclass
class Row:
    """What the model knows of the newest attempt of a slot, or of the newest supervisor."""

    attempt: int
    state: str
    key: str | None = None
    serial: int = 0
    assigned_by: int | None = None


class Attempts:
    """One run; every method is one thing that can happen, and says whether it had an effect."""

    def __init__(self, ledger: Ledger, run_id: str, dice: random.Random) -> None:
        self.ledger, self.run_id, self.dice = ledger, run_id, dice
        self.flow_runs = [f"{run_id}-flow-0"]
        self.is_asked = False
        self.run_state, self.lineage = "running", 0
        first = begin(ledger, run_id, (2, 1, 9), flow_run_id=self.flow_runs[0])
        key = next(row.process_key for row in ledger.actors(run_id))
        self.supervisor = Row(1, "starting", key, 1)
        self.supervisors = [first]
        self.slots: dict[tuple[str, int], Row] = {}
        self.given_out: list[Actor] = []
        self.processes: list[tuple[Actor, Process]] = []

    def call(self, may: bool, call: Callable[[], Answer], refusals: type[Exception] = Fenced) -> Answer | None:
        """Make a call that the model allows or not; with a lost answer, twice."""
        if not may:
            with pytest.raises(refusals):
                call()
            return None
        answer = call()
        if self.dice.random() < 0.3:
            assert call() == answer
        return answer

    def rules(self, supervisor: Actor) -> bool:
        """Whether this supervisor is in charge."""
        return supervisor.attempt == self.supervisor.attempt and self.supervisor.state in ACTIVE

    def is_current(self, actor: Actor) -> bool:
        """Whether this is the newest attempt of its slot."""
        return self.slots[actor.role, actor.slot].attempt == actor.attempt

    # Supervisors

    def take_over(self) -> None:
        is_retry = self.dice.random() < 0.3
        flow_run_id = self.flow_runs[-1] if is_retry else f"{self.run_id}-flow-{len(self.flow_runs)}"
        if not is_retry:
            assert not self.ledger.ask_to_cancel(flow_run_id), "there is no run of that flow run yet"
        stale = self.dice.choice([0, 0, 1])
        seen, process = (self.supervisor.attempt, self.supervisor.serial - stale), a_process()
        is_silent = is_retry or not stale or self.supervisor.state not in ACTIVE
        may = self.run_state != "completed" and is_silent
        taken = self.call(may, lambda: self.ledger.take_over(self.run_id, process, flow_run_id, seen), UserError)
        if taken is None:
            return
        self.is_asked = False
        if not is_retry:
            self.flow_runs.append(flow_run_id)
        for row in self.slots.values():
            row.state = "fenced" if row.state in OPEN else row.state
        self.supervisor = Row(self.supervisor.attempt + 1, "starting", process.key, 1)
        self.supervisors.append(taken)
        self.run_state = "running"

    def assign(self) -> None:
        supervisor, (role, slot) = self.dice.choice(self.supervisors[-2:]), self.dice.choice(SLOTS)
        row = self.slots.get((role, slot))
        after = row.attempt if row else 0
        actor = self.call(
            self.rules(supervisor), lambda: self.ledger.assign(supervisor, role, slot, after, 0, ["here"])
        )
        if actor is not None:
            assert actor == Actor(self.run_id, role, slot, after + 1)
            self.slots[role, slot] = Row(actor.attempt, "assigned", assigned_by=supervisor.attempt)
            self.given_out.append(actor)

    def fence(self) -> None:
        if not self.given_out:
            return
        supervisor, actor = self.dice.choice(self.supervisors[-2:]), self.dice.choice(self.given_out[-3:])
        row = self.slots[actor.role, actor.slot]
        if self.rules(supervisor) and not (self.is_current(actor) and row.assigned_by == supervisor.attempt):
            return  # it knows its own
        seen = self.dice.choice([None, row.serial, row.serial - 1, row.serial - 1])
        spared = self.call(
            self.rules(supervisor), lambda: self.ledger.fence(supervisor, actor, seen_serial=seen) is None
        )
        if not self.rules(supervisor):
            return
        if row.state in OPEN and seen in (None, row.serial):
            row.state = "fenced"
        assert spared == (row.state in OPEN), "who has beaten since was fenced, or who was silent was not"

    def decide(self) -> None:
        supervisor = self.dice.choice(self.supervisors)
        decisions: list[Callable[[], object]] = [
            lambda: self.ledger.add_plan_epoch(supervisor, run_plan("here")),
            lambda: self.ledger.request_evaluation(supervisor, "before", 0),
            lambda: self.ledger.set_mlflow_run(supervisor, "tracked"),
        ]
        self.call(self.rules(supervisor), self.dice.choice(decisions))

    def go_back(self) -> None:
        """To the checkpoint before the first step; its trainer is fenced, and an answer that was lost comes again."""
        supervisor, key = self.dice.choice(self.supervisors), f"{self.dice.random()}"
        lineage = self.call(self.rules(supervisor), lambda: self.ledger.resume_from(supervisor, 0, key))
        if lineage is not None:
            self.lineage += 1
            assert lineage == self.lineage
            trainer = self.slots.get(("trainer", 0))
            if trainer and trainer.state in OPEN:
                trainer.state = "fenced"

    def close(self) -> None:
        supervisor, state = self.dice.choice(self.supervisors), self.dice.choice(["failed", "cancelled"])
        stands = self.call(self.rules(supervisor), lambda: self.ledger.close_run(supervisor, state))
        if stands is not None:
            if self.run_state == "running":
                self.run_state = state
                for row in self.slots.values():
                    row.state = "fenced" if row.state == "assigned" else row.state
            assert stands == self.run_state

    def settle(self) -> None:
        """Somebody saw a supervisor, then found that its process is gone; meanwhile it may have beaten after all."""
        supervisor, state = self.dice.choice(self.supervisors[-2:]), self.dice.choice(["failed", "cancelled"])
        seen = self.supervisor.serial - self.dice.choice([0, 0, 1])
        is_meant = (supervisor.attempt, seen) == (self.supervisor.attempt, self.supervisor.serial)
        is_meant = is_meant and self.run_state in ("running", state)
        assert self.call(True, lambda: self.ledger.settle_run(supervisor, seen, state)) == is_meant
        if is_meant:
            self.run_state = state
            for row in [self.supervisor, *self.slots.values()]:
                row.state = "fenced" if row.state in OPEN else row.state

    def ask(self) -> None:
        """Somebody wants the end of the run as one of its flow runs has it."""
        flow_run_id = self.dice.choice(self.flow_runs[-2:])
        is_meant = flow_run_id == self.flow_runs[-1]
        assert self.call(True, lambda: self.ledger.ask_to_cancel(flow_run_id)) == is_meant
        if is_meant and self.supervisor.state in ACTIVE:
            self.is_asked = True

    def supervisor_beats(self) -> None:
        supervisor = self.dice.choice(self.supervisors[-2:])
        if not self.rules(supervisor):
            if supervisor.attempt != self.supervisor.attempt or self.supervisor.state == "fenced":
                self.call(False, lambda: self.ledger.heartbeat(supervisor))
            return
        beat = self.ledger.heartbeat(supervisor)
        self.supervisor.state, self.supervisor.serial = "running", self.supervisor.serial + 1
        assert beat.wanted == ("leave" if self.is_asked and self.run_state == "running" else "run")

    # Actors

    def register(self) -> None:
        """A process of an attempt, however late, and however many there are of it."""
        if not self.given_out:
            return
        actor, process = self.dice.choice(self.given_out), a_process()
        row = self.slots[actor.role, actor.slot]
        may = self.is_current(actor) and row.state == "assigned"
        self.call(may, lambda: self.ledger.register(actor, process))
        if may:
            row.state, row.key, row.serial = "starting", process.key, 1
            self.processes.append((actor, process))

    def beat(self) -> None:
        if not self.processes:
            return
        actor, _ = self.dice.choice(self.processes)
        row = self.slots[actor.role, actor.slot]
        if not self.is_current(actor) or row.state == "fenced":
            self.call(False, lambda: self.ledger.heartbeat(actor))
            return
        wanted = self.ledger.heartbeat(actor).wanted
        assert wanted == ("run" if self.run_state == "running" else "leave")
        if row.state in ACTIVE:
            row.state, row.serial = "running", row.serial + 1

    def work(self) -> None:
        if not self.processes:
            return
        actor, _ = self.dice.choice(self.processes)
        may = self.is_current(actor) and self.slots[actor.role, actor.slot].state in ACTIVE
        if actor.role == "trainer":
            self.call(may, lambda: self.ledger.record_version(actor, 0, "path"))
        else:
            key = f"{self.dice.random()}"
            self.call(may, lambda: self.ledger.lease_group(actor, 0, key))

    def finish(self) -> None:
        if not self.processes:
            return
        actor, _ = self.dice.choice(self.processes[-3:])
        row, state = self.slots[actor.role, actor.slot], self.dice.choice(["done", "failed"])
        may = self.is_current(actor) and row.state != "fenced"
        self.call(may, lambda: self.ledger.finish(actor, state))
        if may and row.state in ACTIVE:
            row.state = state

    # The whole

    def random_action(self) -> None:
        actions = [self.assign, self.register, self.beat, self.work, self.supervisor_beats] * 3
        actions += [self.fence, self.finish, self.ask] * 2
        actions += [self.take_over, self.decide, self.go_back, self.close, self.settle]
        self.dice.choice(actions)()

    def compare(self) -> None:
        """The ledger says the same as the model, and only who is at work holds anything."""
        run = self.ledger.find_run(run_id=self.run_id)
        assert run is not None
        assert (run.state, run.flow_run_id, run.lineage) == (self.run_state, self.flow_runs[-1], self.lineage)
        found = {
            (row.role, row.slot): Row(row.attempt, row.state, row.process_key, row.serial, row.assigned_by)
            for row in self.ledger.actors(self.run_id)
        }
        assert found == {("supervisor", 0): self.supervisor, **self.slots}
        leased = sum(row.state == "leased" for row in self.ledger.groups(self.run_id))
        if not any(row.state in ACTIVE for (role, _), row in self.slots.items() if role == "replica"):
            assert leased == 0, "what a dead actor held was not given out again"
