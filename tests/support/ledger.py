"""A small run and what its actors do, for the tests of the ledger; the fixtures are in conftest.py."""

import itertools

from tasks.exchange.ledger import Actor, GroupRow, Lease, Ledger

RUN = "run"
B, ETA, STEPS = 2, 1, 3
_keys = itertools.count()


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
