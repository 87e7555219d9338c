"""A small world on a real ledger, for the property tests: lagging, dying replicas, a trainer that crashes and resumes.

The model beside the ledger knows what the ledger cannot: the true (lineage, number) of every token, and what lies on
storage. Every method of `World` is one thing that can happen, and checks what must hold of it. Answers of the ledger
are lost at random, and what was asked is asked again, or never. Beats are begun and end at different times, some hang
on for long, and who looks for the silent and the stuck fences them late.

Questions repeat: the one at a prompt index is `index % questions`. Replicas name it, or die before they do.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st
from sqlalchemy import select

from tasks.exchange.ledger import Actor, Fenced, GroupRow, Lease, Ledger
from tasks.exchange.ledger.drops import GUILTY_FROM
from tasks.exchange.ledger.schema import prompts
from tests.support.ledger import begin, fence, join, supervisor_of

Version = tuple[int, int]
SIZES = st.tuples(st.integers(1, 3), st.integers(0, 3), st.integers(1, 4))
"""Groups a step, staleness bound, steps."""


@dataclass
class Heard:
    """What the ledger has of a replica's last beat: its number, the work it counted, and whether any was in hand."""

    number: int = 1
    work: int = 0
    is_busy: bool = False


@dataclass
class Replica:
    """`lost` are the leases whose answers never came, with the beats begun since; `seen` is from a look of before."""

    actor: Actor
    engine: Version = (0, 0)
    claimed: Version | None = None
    loading: bool = False
    in_flight: dict[int, list[Version]] = field(default_factory=dict)
    leases: int = 0
    draining: bool = False
    lost: dict[int, int] = field(default_factory=dict)
    work: int = 0
    beats: int = 1
    beat: tuple[Heard, frozenset[int]] | None = None
    heard: Heard = field(default_factory=Heard)
    seen: Heard | None = None


class World:
    """Replicas and a trainer on one ledger; every method is one thing that can happen."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        sizes: tuple[int, int, int],
        replicas: int,
        dice: random.Random,
        questions: int = 3,
    ) -> None:
        self.ledger, self.run_id, self.dice, self.questions = ledger, run_id, dice, questions
        self.prompts_per_step, self.max_staleness, self.steps = sizes
        begin(ledger, run_id, sizes)
        self.trainer = self.register("trainer", 0)
        self.lineage, self.trained, self.taken = 0, 0, False
        self.live: set[Version] = set()
        self.files: set[Version] = set()
        self.checkpoints: set[Version] = set()
        self.payloads: set[int] = set()
        self.consumed: dict[int, list[int]] = {}
        self.tokens: dict[int, list[Version]] = {}
        self.prompt_of: dict[int, int] = {}
        self.damaged: set[int] = set()
        self.deaths = 0
        self.died_alone: Counter[int] = Counter()
        """How often a question was the only one in flight when an engine died."""
        self.publish()
        self.replicas = [Replica(self.register("replica", slot)) for slot in range(replicas)]

    def register(self, role: str, slot: int) -> Actor:
        return join(self.ledger, role, slot, self.run_id)

    @property
    def finished(self) -> bool:
        return self.trained == self.steps

    # The trainer

    def publish(self) -> None:
        version = (self.lineage, self.trained)
        self.ledger.record_version(self.trainer, self.trained, "path")
        self.live.add(version)
        self.files.add(version)
        unused = self.ledger.retire_versions(self.trainer, self.dice.choice([1, 2]), self.files)
        assert version not in unused
        assert unused <= self.files
        self.files -= {gone for gone in unused if self.dice.random() < 0.8}
        assert unused.isdisjoint({replica.claimed for replica in getattr(self, "replicas", [])})

    def take(self) -> bool:
        if self.finished or self.taken:
            return False
        rows = self.ledger.take_groups(self.trainer, self.trained)
        if rows is None:
            return False
        assert self.ledger.take_groups(self.trainer, self.trained) == rows
        self._consume(rows)
        return True

    def find_damage(self) -> bool:
        """Payloads of the step that was taken cannot be read; some rank says so."""
        if not self.taken:
            return False
        ids = self.consumed.pop(self.trained)
        damaged = set(self.dice.sample(ids, self.dice.randint(1, len(ids))))
        self.damaged |= damaged
        self.taken = False
        rows = self.ledger.drop_damaged(self.trainer, self.trained, damaged)
        assert self.ledger.drop_damaged(self.trainer, self.trained, damaged) == rows
        if rows is not None:
            self._consume(rows)
        return True

    def _consume(self, rows: list[GroupRow]) -> None:
        """A step was decided."""
        self.consumed[self.trained] = [row.group_id for row in rows]
        assert self.damaged.isdisjoint(self.consumed[self.trained])
        every = [group_id for step in self.consumed.values() for group_id in step]
        assert len(rows) == self.prompts_per_step
        assert len(set(every)) == len(every) == len({self.prompt_of[group_id] for group_id in every})
        for row in rows:
            assert set(self.tokens[row.group_id]) <= self.live
            for _, number in self.tokens[row.group_id]:
                assert 0 <= self.trained - number <= self.max_staleness
        self.taken = True

    def train(self) -> bool:
        if not self.taken:
            return False
        self.trained, self.taken = self.trained + 1, False
        self.checkpoints.add((self.lineage, self.trained))
        self.publish()
        if self.dice.random() < 0.8:  # else it dies before it reports, or another one does
            self.ledger.record_step(self.trainer, self.trained - 1, "{}")
        return True

    def tidy(self) -> bool:
        """Delete payloads that nobody needs; some deletions fail, and are asked for again."""
        named = self.ledger.disposable_groups(self.run_id, self.payloads, 1, self.dice.randint(0, self.trained))
        assert named <= self.payloads
        gone = {group_id for group_id in named if self.dice.random() < 0.8}
        self.payloads -= gone
        return bool(gone)

    def crash_and_resume(self) -> bool:
        zombie, step = self.trainer, self.dice.randint(0, self.trained)
        supervisor, key = supervisor_of(self.ledger, self.run_id), f"lineage {self.lineage}"
        self.lineage = self.ledger.resume_from(supervisor, step, key)
        if self.dice.random() < 0.3:
            assert self.ledger.resume_from(supervisor, step, key) == self.lineage
        for write in (
            lambda: self.ledger.take_groups(zombie, self.trained),
            lambda: self.ledger.record_version(zombie, self.trained + 1, "path"),
        ):
            with pytest.raises(Fenced):
                write()
        self.trainer = self.register("trainer", 0)
        self.trained, self.taken = step, False
        self.live = {version for version in self.live if version[1] <= step}
        self.consumed = {taken: groups for taken, groups in self.consumed.items() if taken < step}
        self.publish()
        return True

    # The replicas

    def claim(self, replica: Replica) -> bool:
        latest = self.ledger.latest_version(self.run_id)
        assert latest is not None
        if replica.loading or latest == replica.engine or not self.ledger.claim_version(replica.actor, *latest):
            return False
        replica.claimed, replica.loading = latest, True
        return True

    def load(self, replica: Replica) -> bool:
        if not replica.loading or replica.claimed is None or replica.engine == replica.claimed:
            return False
        replica.engine = replica.claimed
        for group_id in replica.in_flight:
            kept = self.tokens[group_id] if self.dice.random() < 0.8 else []  # `continue`, or `restart`
            self.tokens[group_id] = [*kept, replica.engine]
        return True

    def report_loaded(self, replica: Replica) -> bool:
        if not replica.loading or replica.engine != replica.claimed:
            return False
        self.ledger.set_loaded(replica.actor, *replica.engine)
        replica.loading = False
        return True

    def ask(self, replica: Replica) -> Lease | None:
        return self.ledger.lease_group(replica.actor, replica.engine[1], f"lease-{replica.leases}")

    def lease(self, replica: Replica) -> bool:
        lease = self.ask(replica)
        if lease is None:
            return False
        assert not replica.draining, "it was told to begin nothing new"
        if self.dice.random() < 0.3:
            assert self.ask(replica) == lease
        replica.leases += 1
        assert isinstance(lease, Lease)
        assert lease.group_id not in self.prompt_of
        self.prompt_of[lease.group_id] = lease.prompt_index
        self.tokens[lease.group_id] = [replica.engine]
        replica.in_flight[lease.group_id] = self.tokens[lease.group_id]
        return True

    def lose_lease(self, replica: Replica) -> bool:
        """A lease whose answer is lost, and which the replica never asks for again."""
        lease = self.ask(replica)
        if lease is None:
            return False
        replica.leases += 1
        self.prompt_of[lease.group_id] = lease.prompt_index
        self.tokens[lease.group_id] = [replica.engine]
        replica.lost[lease.group_id] = 0
        return True

    def begin_beat(self, replica: Replica) -> bool:
        """What a beat says is as it was when it began."""
        if replica.beat is not None:
            return False
        replica.beats += 1
        is_busy = bool(replica.in_flight) or replica.loading
        replica.beat = Heard(replica.beats, replica.work, is_busy), frozenset(replica.in_flight)
        replica.lost = {group_id: beats + 1 for group_id, beats in replica.lost.items()}
        return True

    def end_beat(self, replica: Replica) -> bool:
        """The ledger hears it; where the answer is lost, twice. Returns whether that may have moved anything."""
        if replica.beat is None:
            return False
        (said, named), replica.beat = replica.beat, None
        had_lost = bool(replica.lost)
        telling: dict[str, Any] = {"may_rest_s": 1.0 if said.is_busy else None, "named": named, "number": said.number}
        for _ in range(self.dice.randint(1, 2)):
            wanted = self.ledger.heartbeat(replica.actor, "running", "", said.work, **telling).wanted
            assert wanted == ("drain" if replica.draining else "run")
        replica.heard = said
        fates = {row.group_id: (row.state, row.drop_reason) for row in self.ledger.groups(self.run_id)}
        for group_id in replica.in_flight:
            assert fates[group_id] != ("dropped", "lease_lost"), "what a replica works on was given out again"
        for group_id, beats in list(replica.lost.items()):
            if fates[group_id] == ("leased", None):
                assert beats <= 2, "three beats begun after a lease did not name it, and it is still out"
                continue
            assert beats >= 2 or fates[group_id][1] != "lease_lost", "given out before two beats begun after the lease"
            del replica.lost[group_id]
        return had_lost

    def look(self, replica: Replica) -> bool:
        """The supervisor sees how far the beats are."""
        rows = self.ledger.actors(self.run_id)
        row = next(row for row in rows if (row.role, row.slot) == ("replica", replica.actor.slot))
        replica.seen = Heard(row.serial, row.work, row.may_rest_s is not None)
        assert replica.seen == replica.heard
        return True

    def fence_late(self, replica: Replica) -> bool:
        """The supervisor fences who was silent or stuck when it looked, however long ago that was."""
        if replica.seen is None:
            self.look(replica)
        seen, replica.seen = replica.seen, None
        assert seen is not None
        if self.dice.random() < 0.5:  # while it waits for a lock, a token comes
            replica.work += 1
            self.begin_beat(replica)
            self.end_beat(replica)
        heard, zombie, supervisor = replica.heard, replica.actor, supervisor_of(self.ledger, self.run_id)
        if self.dice.random() < 0.5:
            fenced = self.ledger.fence(supervisor, zombie, seen_serial=seen.number)
            assert (fenced is not None) == (heard.number == seen.number), "fenced although it had beaten, or not at all"
        else:
            fenced = self.ledger.fence(supervisor, zombie, seen_work=seen.work)
            is_stuck = heard.is_busy and heard.work == seen.work
            assert (fenced is not None) == is_stuck, "fenced although it had got on, or not at all"
        if fenced is None:
            return False
        self.return_after(replica, zombie)
        return True

    def complete(self, replica: Replica) -> bool:
        if not replica.in_flight:
            return False
        replica.work += 1
        group_id = self.dice.choice(list(replica.in_flight))
        del replica.in_flight[group_id]
        numbers = [number for _, number in self.tokens[group_id]]
        newest = max(numbers) if self.dice.random() < 0.5 else None
        counts = {outcome: self.dice.randint(0, 3) for outcome in ("scored", "timeout", "error", "truncated")}
        facts: dict[str, Any] = {"oldest_version": min(numbers), "reward_mean": self.dice.random(), "counts": counts}
        facts["response_tokens"] = self.dice.randint(0, 99)
        self.payloads.add(group_id)
        kept = self.ledger.complete_group(replica.actor, group_id, **facts, newest_version=newest)
        assert self.ledger.complete_group(replica.actor, group_id, **facts, newest_version=newest) == kept
        return True

    def drop(self, replica: Replica) -> bool:
        if not replica.in_flight:
            return False
        group_id = self.dice.choice(list(replica.in_flight))
        del replica.in_flight[group_id]
        reason = self.dice.choice(["too_few_scored", "aborted"])
        for _ in range(self.dice.randint(1, 2)):
            self.ledger.drop_group(replica.actor, group_id, reason)
        return True

    def question(self, group_id: int) -> int:
        return self.prompt_of[group_id] % self.questions

    def name_question(self, replica: Replica) -> bool:
        """There are few questions, so one that is quarantined comes back."""
        if not replica.in_flight:
            return False
        group_id = self.dice.choice(list(replica.in_flight))
        return self.name(replica, group_id)

    def name(self, replica: Replica, group_id: int) -> bool:
        """Name the question of one group, which is not answered where that is not wanted."""
        key = f"question-{self.question(group_id)}"
        is_wanted = self.ledger.name_question(replica.actor, group_id, key)
        assert self.ledger.name_question(replica.actor, group_id, key) == is_wanted
        if not is_wanted:
            del replica.in_flight[group_id]
        return True

    def drain(self, replica: Replica) -> bool:
        """Told so, it hands over what it has begun: no group is lost by it."""
        if replica.draining:
            return False
        for _ in range(self.dice.randint(1, 2)):
            self.ledger.want(supervisor_of(self.ledger, self.run_id), replica.actor, "drain")
        replica.draining = True
        return True

    def leave_and_return(self, replica: Replica) -> bool:
        """Once it has nothing in flight; another comes into its place."""
        if not replica.draining or replica.in_flight:
            return False
        self.ledger.finish(replica.actor, "done")
        replica.actor = self.register("replica", replica.actor.slot)
        self._begin_again(replica)
        return True

    def die_and_return(self, replica: Replica) -> bool:
        zombie = replica.actor
        if self.dice.random() < 0.5:
            fence(self.ledger, zombie)
        else:
            replica.actor = self.register("replica", zombie.slot)
        self.return_after(replica, zombie)
        return True

    def return_after(self, replica: Replica, zombie: Actor) -> None:
        """The one who was fenced can do nothing any more, and the slot's next attempt joins and loads."""
        with pytest.raises(Fenced):
            self.ledger.lease_group(zombie, 0, f"lease-{replica.leases}")
        for group_id in replica.in_flight:
            with pytest.raises(Fenced):
                self.ledger.complete_group(zombie, group_id, 0, 0.5, {}, 9)
        if replica.actor == zombie:
            replica.actor = self.register("replica", zombie.slot)
        self._begin_again(replica)

    def engine_dies(self, replica: Replica) -> bool:
        """It ends by itself, whatever it was answering, and somebody has seen it."""
        held = [row.group_id for row in self.ledger.groups(self.run_id) if row.state == "leased"]
        # Of a lease whose answer was lost nobody knows that it was not being answered.
        lost = [group_id for group_id in (*replica.in_flight, *replica.lost) if group_id in held]
        if len(lost) == 1:
            self.died_alone[self.question(lost[0])] += 1
        self.deaths += 1
        self.ledger.heartbeat(replica.actor)
        for _ in range(self.dice.randint(1, 2)):
            self.ledger.finish(replica.actor, "died", "SIGSEGV")
        replica.actor = self.register("replica", replica.actor.slot)
        self._begin_again(replica)
        return True

    def blamed_alone_twice(self) -> bool:
        """Whether whoever is in quarantine for the death of engines has ended two of them alone."""
        with self.ledger.read() as connection:
            deadly = connection.scalars(
                select(prompts.c.prompt_index).where(
                    prompts.c.run_id == self.run_id, prompts.c.state == "quarantined", prompts.c.deaths >= GUILTY_FROM
                )
            ).all()
        return all(self.died_alone[index % self.questions] >= 2 for index in deadly)

    def _begin_again(self, replica: Replica) -> None:
        """The next attempt of the slot holds nothing and has the newest version."""
        self.payloads |= replica.in_flight.keys()  # it may have died after it wrote them
        replica.in_flight, replica.claimed, replica.loading, replica.draining = {}, None, False, False
        replica.lost, replica.work, replica.beats, replica.beat, replica.seen = {}, 0, 1, None, None
        replica.heard = Heard()
        latest = self.ledger.latest_version(self.run_id)
        assert latest is not None
        assert self.ledger.claim_version(replica.actor, *latest)
        self.ledger.set_loaded(replica.actor, *latest)
        replica.engine = replica.claimed = latest

    # Schedules

    def random_action(self, with_failures: bool) -> bool:
        replica = self.dice.choice(self.replicas)
        if with_failures and self.dice.random() < 0.15:
            failures = [
                self.crash_and_resume,
                lambda: self.drop(replica),
                lambda: self.die_and_return(replica),
                lambda: self.name_question(replica),
                lambda: self.engine_dies(replica),
                self.find_damage,
                lambda: self.lose_lease(replica),
                *[lambda: self.fence_late(replica)] * 2,
            ]
            return self.dice.choice(failures)()
        actions = [
            self.take,
            self.train,
            self.tidy,
            lambda: self.claim(replica),
            lambda: self.load(replica),
            lambda: self.report_loaded(replica),
            lambda: self.upgrade(replica),
            lambda: self.lease(replica),
            lambda: self.lease(replica),
            lambda: self.complete(replica),
            lambda: self.drain(replica),
            lambda: self.leave_and_return(replica),
            lambda: self.begin_beat(replica),
            lambda: self.end_beat(replica),
            lambda: self.look(replica),
        ]
        return self.dice.choice(actions)()

    def upgrade(self, replica: Replica) -> bool:
        return self.claim(replica) | self.load(replica) | self.report_loaded(replica)

    def fair_round(self) -> bool:
        moved = False
        for replica in self.replicas:
            moved |= self.upgrade(replica)
            while self.lease(replica):
                moved = True
            while self.complete(replica):
                moved = True
            moved |= self.leave_and_return(replica)
            self.begin_beat(replica)
            moved |= self.end_beat(replica)
        return self.take() | self.train() | moved
