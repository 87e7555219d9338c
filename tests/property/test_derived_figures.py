"""Every figure that the ledger derives equals a recount of all rows, whatever has happened.

The recounts read the whole run, as the ledger itself must not: groups by state and reason, answers, tokens, staleness
and reward, the next step and the groups out, the newest version, what may go from storage, which checkpoints count.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import Row, Table, select

from tasks.exchange.ledger import Ledger, Progress
from tasks.exchange.ledger.consumption import next_step
from tasks.exchange.ledger.drops import GUILTY_FROM
from tasks.exchange.ledger.groups import run_and_groups_out
from tasks.exchange.ledger.schema import actors, groups, policy_versions, prompts, steps, weight_claims
from tasks.exchange.trajectories import Outcome
from tests.support.world import SIZES, World


class Rows:
    """All rows of a run, at one moment at which nobody writes."""

    def __init__(self, ledger: Ledger, run_id: str) -> None:
        def read(table: Table) -> list[Row[Any]]:
            with ledger.read() as connection:
                return list(connection.execute(select(table).where(table.c.run_id == run_id)))

        self.groups, self.prompts, self.steps = read(groups), read(prompts), read(steps)
        self.actors = read(actors)
        self.versions, self.claims = read(policy_versions), read(weight_claims)
        self.consumed = [row for row in self.groups if row.state == "consumed"]

    @property
    def next_step(self) -> int:
        return max((row.step + 1 for row in self.consumed), default=0)

    def progress(self, run_steps: int) -> Progress:
        kept = [row for row in self.groups if row.state in ("scored", "consumed")]
        last = [row.reward_mean for row in self.consumed if row.step == self.next_step - 1]
        newest = max(((row.number, row.lineage) for row in self.versions if row.state == "live"), default=None)
        return Progress(
            step=max((row.step + 1 for row in self.steps), default=0),
            steps=run_steps,
            groups={
                state: sum(row.state == state for row in self.groups)
                for state in ("leased", "scored", "consumed", "dropped")
            },
            dropped=dict(Counter(row.drop_reason for row in self.groups if row.state == "dropped")),
            outcomes={o.value: sum(getattr(row, f"{o}_answers") for row in kept) for o in Outcome},
            quarantined_prompts=sum(row.state == "quarantined" for row in self.prompts),
            response_tokens=sum(row.response_tokens for row in self.consumed),
            consumed=len(self.consumed),
            max_staleness_seen=max((row.step - row.version for row in self.consumed), default=0),
            latest_version=None if newest is None else (newest[1], newest[0]),
            reward_mean=sum(last) / len(last) if last else None,
            accused_prompts=sum(row.deaths > 0 and row.state != "quarantined" for row in self.prompts),
            deadly_prompts=sum(row.deaths >= GUILTY_FROM and row.state == "quarantined" for row in self.prompts),
            engine_deaths=sum(row.state == "died" for row in self.actors),
        )

    def unused_versions(self) -> set[tuple[int, int]]:
        over = {(row.lineage, row.number) for row in self.versions if row.state in ("retired", "abandoned")}
        return over - {(row.lineage, row.number) for row in self.claims}

    def disposable(self, keep_steps: int, checkpoint_step: int) -> set[int]:
        kept_from = min(checkpoint_step, self.next_step - keep_steps)
        consumed = {row.group_id for row in self.consumed if row.step < kept_from}
        return consumed | {row.group_id for row in self.groups if row.state == "dropped"}

    def proven(self, lineage: int) -> set[tuple[int, int]]:
        proven = {(row.lineage, row.step + 1) for row in self.steps}
        is_reported = any(row.step == self.next_step - 1 for row in self.steps)
        return proven if is_reported or not self.next_step else proven | {(lineage, self.next_step)}


def assert_figures_are_recounts(world: World) -> None:
    ledger, run_id = world.ledger, world.run_id
    rows = Rows(ledger, run_id)
    derived, recounted = ledger.progress(run_id), rows.progress(world.steps)
    assert replace(derived, reward_mean=None) == replace(recounted, reward_mean=None)
    assert derived.reward_mean == pytest.approx(recounted.reward_mean)
    with ledger.read() as connection:
        assert next_step(connection, run_id) == rows.next_step
        run, out = run_and_groups_out(connection, run_id)
        assert out == sum(row.state != "dropped" for row in rows.groups)
    assert ledger.latest_version(run_id) == recounted.latest_version
    assert ledger.retire_versions(world.trainer, 100, world.files) == rows.unused_versions() & world.files
    for step in (0, world.trained):
        assert ledger.disposable_groups(run_id, world.payloads, 1, step) == rows.disposable(1, step) & world.payloads
    found = sorted(world.checkpoints)
    assert set(ledger.proven_checkpoints(run_id, found)) == rows.proven(run.lineage) & world.checkpoints


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    path: Path = tmp_path_factory.mktemp("figures")
    opened = Ledger(f"sqlite:///{path / 'ledger.db'}")
    yield opened
    opened.close()


@settings(max_examples=20)
@given(sizes=SIZES, replicas=st.integers(1, 3), seed=st.integers(0, 2**32), actions=st.integers(0, 100))
def test_every_derived_figure_is_a_recount_of_the_rows(
    ledger: Ledger, sizes: tuple[int, int, int], replicas: int, seed: int, actions: int
) -> None:
    world = World(ledger, f"run-{len(ledger.list_runs())}", sizes, replicas, random.Random(seed))
    assert_figures_are_recounts(world)
    for _ in range(actions):
        if world.random_action(with_failures=True):
            assert_figures_are_recounts(world)
    while not world.finished:
        world.fair_round()
        assert_figures_are_recounts(world)
