"""A small run and what its actors do, for the tests of the ledger; the fixtures are in conftest.py."""

import itertools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import isfunction
from typing import Any

from tasks.exchange.ledger import Actor, Beat, GroupRow, Lease, Ledger, Process
from tasks.exchange.ledger.database import Database

RUN = "run"
B, ETA, STEPS = 2, 1, 3
_keys = itertools.count()


def a_process(pid: int = 1, machine: str = "here") -> Process:
    """A process that never was before."""
    return Process(f"elsewhere/{pid}/{next(_keys)}", pid, machine)


def public_calls() -> set[str]:
    """Names of all calls that processes make on a ledger."""
    parts = [part for part in Ledger.__mro__ if issubclass(part, Database) and part is not Database]
    return {name for part in parts for name, call in vars(part).items() if isfunction(call) and name[0] != "_"}


def timeless(answer: Any) -> Any:
    """An answer of the ledger without the times and the counts of beats in it, which no two of them share."""
    if isinstance(answer, Beat):
        return answer.wanted, answer.supervisor[0]
    if is_dataclass(answer):
        names = [field.name for field in fields(answer) if not field.name.endswith("_s") and field.name != "serial"]
        return {name: timeless(getattr(answer, name)) for name in names}
    if isinstance(answer, Mapping):
        return {key: timeless(value) for key, value in answer.items()}
    return [timeless(value) for value in answer] if isinstance(answer, list | tuple) else answer


def begin(
    ledger: Ledger,
    run_id: str = RUN,
    sizes: tuple[int, int, int] = (B, ETA, STEPS),
    flow_run_id: str | None = None,
    pid: int = 1,
) -> Actor:
    """Begin a run of `sizes` (B, η, steps); returns its supervisor."""
    prompts_per_step, max_staleness, steps = sizes
    return ledger.begin_run(
        run_id,
        a_process(pid),
        prompts_per_step=prompts_per_step,
        max_staleness=max_staleness,
        steps=steps,
        max_attempts_per_prompt=2,
        flow_run_id=flow_run_id,
    )


def supervisor_of(ledger: Ledger, run_id: str = RUN) -> Actor:
    """The run's newest supervisor."""
    attempt = next(row.attempt for row in ledger.actors(run_id) if row.role == "supervisor")
    return Actor(run_id, "supervisor", 0, attempt)


def assign(ledger: Ledger, role: str, slot: int = 0, run_id: str = RUN, machine: str = "here") -> Actor:
    """The slot's next attempt, as the run's supervisor gives it out."""
    after = max((row.attempt for row in ledger.actors(run_id) if (row.role, row.slot) == (role, slot)), default=0)
    return ledger.assign(supervisor_of(ledger, run_id), role, slot, after, epoch=0, machines=[machine])


def join(ledger: Ledger, role: str, slot: int = 0, run_id: str = RUN, pid: int = 1, machine: str = "here") -> Actor:
    """The slot's next attempt, given out and registered."""
    actor = assign(ledger, role, slot, run_id, machine)
    ledger.register(actor, a_process(pid, machine))
    return actor


def fence(ledger: Ledger, actor: Actor) -> None:
    """Declare an actor dead, as the run's supervisor does."""
    assert ledger.fence(supervisor_of(ledger, actor.run_id), actor) is not None


def go_back(ledger: Ledger, step: int, run_id: str = RUN) -> int:
    """Resume from the checkpoint of `step`, as the run's supervisor does; returns the new lineage."""
    return ledger.resume_from(supervisor_of(ledger, run_id), step, f"go-back-{next(_keys)}")


def load(ledger: Ledger, replica: Actor, version: tuple[int, int]) -> None:
    assert ledger.claim_version(replica, *version)
    ledger.set_loaded(replica, *version)


def ask(ledger: Ledger, replica: Actor, version: int) -> Lease | None:
    """Ask for a lease under a key of its own."""
    return ledger.lease_group(replica, version, f"lease-{next(_keys)}")


def lease(ledger: Ledger, replica: Actor, version: int = 0) -> Lease:
    leased = ask(ledger, replica, version)
    assert leased is not None
    return leased


def score(ledger: Ledger, replica: Actor, leased: Lease, oldest: int | None = None) -> bool:
    version = leased.version if oldest is None else oldest
    return ledger.complete_group(replica, leased.group_id, version, 0.5, {"scored": 3, "timeout": 1}, 12)


def take(ledger: Ledger, trainer: Actor, step: int) -> list[GroupRow]:
    rows = ledger.take_groups(trainer, step)
    assert rows is not None
    return rows


def states(ledger: Ledger) -> list[tuple[int, str, str | None]]:
    return [(row.prompt_index, row.state, row.drop_reason) for row in ledger.groups(RUN)]


def run_two_steps(ledger: Ledger, trainer: Actor, replica: Actor) -> None:
    """Consume groups 1, 2 at step 0 and 3, 4 at step 1; the replica holds versions up to 2, with 5, 6 out."""
    for step in (0, 1):
        for leased in [lease(ledger, replica, step) for _ in range(2)]:
            score(ledger, replica, leased)
        take(ledger, trainer, step)
        ledger.record_step(trainer, step, "{}")
        ledger.record_version(trainer, step + 1, f"path-{step + 1}")
        load(ledger, replica, (0, step + 1))
    score(ledger, replica, lease(ledger, replica, 2))
    lease(ledger, replica, 2)
