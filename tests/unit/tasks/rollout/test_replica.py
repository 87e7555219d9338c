"""A replica against a real ledger and a hand-written engine: gate, payloads, new weights, evaluation, leaving."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from planners.errors import UserError
from tasks.config.experiment import Experiment
from tasks.config.files import parse_experiment
from tasks.data.item import Item
from tasks.data.split import Examination, Questions
from tasks.environments.single_turn import SingleTurn
from tasks.exchange.layout import RunDirectory
from tasks.exchange.ledger import Actor, Ledger
from tasks.exchange.payloads import load_group
from tasks.exchange.trajectories import Outcome, Segment
from tasks.exchange.weights import publish_weights
from tasks.lifecycle.work import Told, Work
from tasks.rewards.pool import ScoringFailed, Verdict
from tasks.rollout.answering import Answerer
from tasks.rollout.engine import Answer, EngineDied, InFlight, Sampling
from tasks.rollout.replica import Replica, ReplicaParts
from tasks.rollout.versions import WholeVersions
from tasks.tracking.tracker import Tracker
from tests.support.ledger import begin, go_back, join, supervisor_of

RUN = "run"


class FakeEngine:
    """Answers with two tokens after `hold` is set; names the version it has loaded."""

    replica = "fake"

    def __init__(self) -> None:
        self.loaded = (0, 0)
        self.hold = asyncio.Event()
        self.hold.set()
        self._aborted: set[str] = set()

    async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
        version = self.loaded[1]
        while not self.hold.is_set():
            if request_id in self._aborted:
                return Answer((), "aborted")
            await asyncio.sleep(0.01)
        return Answer((Segment((5, 6), (-0.5, -0.5), version, self.replica),), "stop")

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(request_ids)

    async def load(self, lineage: int, number: int, path: Path, in_flight: InFlight) -> None:
        self.loaded = (lineage, number)

    async def shutdown(self) -> None:
        pass


class FakeText:
    """A tokenizer, questions, prompts and scorer in one: the reward alternates so that groups have a spread."""

    names = ("share",)
    examinations = (Examination("held-out", (Item("a", "", {}), Item("b", "", {})), 2),)

    def __init__(self, outcome: Outcome = Outcome.SCORED) -> None:
        self.outcome = outcome
        self.fault = "the scorer said no."
        self._scored = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))

    def item(self, prompt_index: int) -> Item:
        return Item(str(prompt_index), "", {})

    def text(self, item: Item) -> str:
        return item.question

    def encode(self, item: Item) -> list[int]:
        return [1, 2]

    async def score(self, prompt: str, answer_text: str, item: Mapping[str, Any]) -> Verdict:
        assert answer_text == "5", "the stop token is no part of the text"
        self._scored += 1
        reward = float(self._scored % 2) if self.outcome is Outcome.SCORED else float("nan")
        return Verdict(self.outcome, reward, (reward,))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    begin(ledger, RUN, (2, 1, 4))
    return ledger


@pytest.fixture
def experiment() -> Experiment:
    return parse_experiment({"workload": {"prompts_per_step": 2, "group_size": 2, "max_staleness": 1}}, "test")


def make_replica(
    ledger: Ledger,
    experiment: Experiment,
    tmp_path: Path,
    engine: FakeEngine,
    text: FakeText,
    work: Work | None = None,
    say: Callable[[str], object] = lambda what: None,
) -> Replica:
    actor = join(ledger, "replica", run_id=RUN)
    run = RunDirectory(tmp_path)
    run.create()
    work = work or Work()
    answerer = Answerer(engine, SingleTurn(text, text, text), Sampling(1.0, 4, (6,)), work.add)
    tracker, questions = Tracker.child(None, lambda: None, "replica", {}), cast(Questions, text)
    versions = WholeVersions(ledger, actor, run, lambda damage: None)
    parts = (experiment, ledger, actor, run, engine, answerer, questions, tracker, 8, work, say, versions)
    return Replica(ReplicaParts(*parts))


async def until(condition: Callable[[], bool], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"did not happen: {what}")


def publish(
    ledger: Ledger, tmp_path: Path, trainer: Actor, lineage: int, number: int, read_as: bytes = b"weights"
) -> None:
    def fill(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(b"weights")

    path = publish_weights(RunDirectory(tmp_path), lineage, number, fill)
    (path / "model.safetensors").write_bytes(read_as)
    ledger.record_version(trainer, number, str(path))


def in_state(ledger: Ledger, state: str) -> int:
    return ledger.progress(RUN).groups[state]


def test_it_stops_at_the_gate_and_goes_on_with_new_weights(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    async def scenario() -> None:
        work = Work()
        replica = make_replica(ledger, experiment, tmp_path, FakeEngine(), FakeText(), work)
        running = asyncio.create_task(replica.run())
        await until(lambda: in_state(ledger, "scored") == 4, "four groups at version 0")
        await asyncio.sleep(0.5)
        assert work.told() == Told(4 * 2, None, frozenset()), "who waits at a shut gate has nothing in hand"
        assert in_state(ledger, "scored") + in_state(ledger, "leased") == 4, "more were begun than the gate allows"
        trainer = join(ledger, "trainer", run_id=RUN)
        publish(ledger, tmp_path, trainer, 0, 0)
        taken = ledger.take_groups(trainer, 0)
        assert taken is not None
        publish(ledger, tmp_path, trainer, 0, 1)
        await until(lambda: in_state(ledger, "scored") == 4, "two more groups at version 1")
        assert work.told().count >= 4 * 2 + 1 + 2 * 2, "answers and loads are the work that its beats count"
        replica.leave()
        await running
        group = load_group(RunDirectory(tmp_path).group_path(taken[0].group_id))
        assert [trajectory.oldest_version for trajectory in group.trajectories] == [0, 0]
        assert group.reward_names == ("share",)
        assert [trajectory.parts for trajectory in group.trajectories] == [(t.reward,) for t in group.trajectories]
        newest = ledger.take_groups(trainer, 1)
        assert newest is not None
        assert ledger.claimed_versions(RUN) == {(0, 1)}

    asyncio.run(scenario())


def test_a_group_that_cannot_be_scored_is_dropped_and_its_prompt_leased_again(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    said: list[str] = []

    async def scenario() -> None:
        text = FakeText(Outcome.ERROR)
        replica = make_replica(ledger, experiment, tmp_path, FakeEngine(), text, say=said.append)
        running = asyncio.create_task(replica.run())
        await until(lambda: ledger.progress(RUN).dropped.get("too_few_scored", 0) >= 3, "three drops")
        text.outcome = Outcome.SCORED
        await until(lambda: in_state(ledger, "scored") == 4, "the places are given out again")
        replica.leave()
        await running

    asyncio.run(scenario())
    assert said[0] == "no two answers of a group could be scored: the scorer said no."
    assert said[-1] == ""


def test_answers_of_an_abandoned_lineage_are_dropped(ledger: Ledger, experiment: Experiment, tmp_path: Path) -> None:
    async def scenario() -> None:
        trainer = join(ledger, "trainer", run_id=RUN)
        publish(ledger, tmp_path, trainer, 0, 0)
        engine = FakeEngine()
        engine.hold.clear()
        replica = make_replica(ledger, experiment, tmp_path, engine, FakeText())
        running = asyncio.create_task(replica.run())
        await until(lambda: in_state(ledger, "leased") == 4, "four groups in flight")
        lineage = go_back(ledger, 0)
        trainer = join(ledger, "trainer", run_id=RUN)
        publish(ledger, tmp_path, trainer, lineage, 0)
        await until(lambda: engine.loaded == (lineage, 0), "the new lineage is loaded")
        engine.hold.set()
        await until(lambda: in_state(ledger, "scored") == 4, "all groups under the new lineage")
        replica.leave()
        await running

    asyncio.run(scenario())


def test_a_prompt_that_does_not_fit_is_dropped_and_quarantined(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    class LongPrompt(FakeText):
        def encode(self, item: Item) -> list[int]:
            if item.question == "1":
                raise UserError("too long")
            return [1, 2]

    async def scenario() -> None:
        replica = make_replica(ledger, experiment, tmp_path, FakeEngine(), LongPrompt())
        running = asyncio.create_task(replica.run())
        await until(lambda: in_state(ledger, "scored") == 4, "four groups of other prompts")
        replica.leave()
        await running
        assert ledger.progress(RUN).dropped == {"prompt_too_long": 2}
        assert ledger.progress(RUN).quarantined_prompts == 1

    asyncio.run(scenario())


def test_a_quarantined_question_is_not_answered_at_any_index(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    class Repeating(FakeText):
        def item(self, prompt_index: int) -> Item:
            return Item("bad" if prompt_index % 2 else str(prompt_index), "", {}, "mine")

        def encode(self, item: Item) -> list[int]:
            if item.question == "bad":
                raise UserError("too long")
            return [1, 2]

    async def scenario() -> None:
        replica = make_replica(ledger, experiment, tmp_path, FakeEngine(), Repeating())
        running = asyncio.create_task(replica.run())
        await until(lambda: in_state(ledger, "scored") == 4, "four groups of other questions")
        replica.leave()
        await running
        dropped = ledger.progress(RUN).dropped
        # Prompts 1 and 3 may be out at once; from the verdict on none is tried.
        assert 2 <= dropped["prompt_too_long"] <= 4
        assert dropped["quarantined"] >= 1
        assert {row.prompt_index % 2 for row in ledger.groups(RUN) if row.state == "scored"} == {0}

    asyncio.run(scenario())


class Faulty(FakeText):
    """What a question says goes wrong with it."""

    def item(self, prompt_index: int) -> Item:
        if prompt_index == 1:
            raise ZeroDivisionError("a generator's own fault")
        return Item("\ud800" if prompt_index == 3 else str(prompt_index), "", {})

    def encode(self, item: Item) -> list[int]:
        if item.question == "5":
            raise TypeError("a tokenizer's")
        return [1, 2]

    async def score(self, prompt: str, answer_text: str, item: Mapping[str, Any]) -> Verdict:
        if item["question"] == "7":
            raise ValueError("a scorer's")
        return await super().score(prompt, answer_text, item)


def test_what_goes_wrong_with_one_question_ends_that_question(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    async def scenario() -> None:
        trainer = join(ledger, "trainer", run_id=RUN)
        publish(ledger, tmp_path, trainer, 0, 0)
        replica = make_replica(ledger, experiment, tmp_path, FakeEngine(), Faulty())
        running = asyncio.create_task(replica.run())
        for step in range(4):
            await until(lambda: in_state(ledger, "scored") >= 2, "a step's groups")
            assert ledger.take_groups(trainer, step)
            publish(ledger, tmp_path, trainer, 0, step + 1)
        await until(lambda: ledger.progress(RUN).quarantined_prompts == 4, "all four are given up")
        replica.leave()
        await running

    asyncio.run(scenario())
    progress = ledger.progress(RUN)
    assert progress.dropped == {"failed": 8}
    assert progress.quarantined_prompts == 4
    consumed = {row.prompt_index for row in ledger.groups(RUN) if row.state == "consumed"}
    assert consumed.isdisjoint({1, 3, 5, 7})


@pytest.mark.parametrize(
    "error", [EngineDied("it was ended by SIGSEGV", by_itself=True), ScoringFailed("no process to be had")]
)
def test_what_is_gone_is_no_questions_fault(
    ledger: Ledger, experiment: Experiment, tmp_path: Path, error: Exception
) -> None:
    class Dying(FakeEngine):
        async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
            raise ValueError("what comes of it") if request_id.endswith("0") else error

    with pytest.raises(type(error)):
        asyncio.run(make_replica(ledger, experiment, tmp_path, Dying(), FakeText()).run())
    assert ledger.progress(RUN).dropped == {}


def test_an_error_of_every_question_ends_the_replica_and_is_named(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    class BrokenEngine(FakeEngine):
        async def generate(self, request_id: str, prompt_ids: Sequence[int], sampling: Sampling) -> Answer:
            raise ValueError("the engine is gone")

    async def scenario() -> None:
        await make_replica(ledger, experiment, tmp_path, BrokenEngine(), FakeText()).run()

    with pytest.raises(ValueError, match="the engine is gone"):
        asyncio.run(scenario())


def test_it_evaluates_when_asked(ledger: Ledger, experiment: Experiment, tmp_path: Path) -> None:
    async def scenario() -> None:
        said: list[str] = []
        ledger.request_evaluation(supervisor_of(ledger, RUN), "before", 0)
        work = Work()
        replica = make_replica(ledger, experiment, tmp_path, FakeEngine(), FakeText(), work, said.append)
        running = asyncio.create_task(replica.run())
        await until(lambda: ledger.evaluations(RUN)["before"].state == "done", "an evaluation")
        await until(lambda: said == ["evaluating version 0, before training", ""], "that it answers again")
        replica.leave()
        await running
        result = ledger.evaluations(RUN)["before"].result
        assert result is not None
        assert len(result["greedy"]) == 2
        assert [len(samples) for samples in result["sampled"]] == [2, 2]
        assert work.told().count >= 6, "it is not seen to get on, however long it takes"

    asyncio.run(scenario())


def test_a_damaged_version_is_left_out_and_the_next_one_loaded(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    """A replica that ended on it would end again and again, and with it the run's restarts."""

    async def scenario() -> None:
        engine = FakeEngine()
        replica = make_replica(ledger, experiment, tmp_path, engine, FakeText())
        running = asyncio.create_task(replica.run())
        trainer = join(ledger, "trainer", run_id=RUN)
        publish(ledger, tmp_path, trainer, 0, 0)
        await until(lambda: in_state(ledger, "scored") == 4, "four groups at version 0")
        assert ledger.take_groups(trainer, 0) is not None
        path = RunDirectory(tmp_path).weights_path(0, 1)
        publish(ledger, tmp_path, trainer, 0, 1, b"damaged")
        assert ledger.take_groups(trainer, 1) is not None
        publish(ledger, tmp_path, trainer, 0, 2)
        await until(lambda: engine.loaded == (0, 2), "the next version is loaded")
        assert path.exists()
        replica.leave()
        await running

    asyncio.run(scenario())


def test_draining_hands_over_what_is_in_flight_and_leaves(
    ledger: Ledger, experiment: Experiment, tmp_path: Path
) -> None:
    """And begins nothing new, although the gate is open again."""

    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold.clear()
        replica = make_replica(ledger, experiment, tmp_path, engine, FakeText())
        running = asyncio.create_task(replica.run())
        await until(lambda: in_state(ledger, "leased") == 4, "four groups in flight")
        (actor,) = (row for row in ledger.actors(RUN) if row.role == "replica")
        ledger.want(supervisor_of(ledger, RUN), Actor(RUN, "replica", actor.slot, actor.attempt), "drain")
        replica.drain()
        engine.hold.set()
        await asyncio.wait_for(running, timeout=10)
        assert in_state(ledger, "scored") == 4
        assert ledger.progress(RUN).dropped == {}

    asyncio.run(scenario())


def test_leaving_drops_what_is_in_flight(ledger: Ledger, experiment: Experiment, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.hold.clear()
        replica = make_replica(ledger, experiment, tmp_path, engine, FakeText())
        running = asyncio.create_task(replica.run())
        await until(lambda: in_state(ledger, "leased") == 4, "four groups in flight")
        replica.leave()
        await asyncio.wait_for(running, timeout=10)
        assert in_state(ledger, "leased") == 0
        assert ledger.progress(RUN).dropped == {"aborted": 4}

    asyncio.run(scenario())
