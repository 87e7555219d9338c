"""An event-driven run of a plan: engines, the staleness gate, weight updates, failures; one seed, one outcome.

Time comes from engine iterations (`IterationPlan`), never from a replica's steady-state rate. With n answers in
progress and S tokens in their caches an iteration takes t(n, S) = base(n) + κ·S + b·S/n, so k iterations in which
nobody starts or ends take

    k·base(n) + κ·(k·S + n·k(k−1)/2) + b·(k·S/n + k(k−1)/2)

and a replica is one event per answer. Leases and consumption are `planners.staleness`, the functions that the ledger
uses. Each replica keeps its concurrency filled: it leases a group when a slot is free and none of its answers waits.

Weights: after step i the trainer publishes version i + 1 and pauses for its sync seconds, and the replicas for theirs
once the version has been transferred: written, in sync mode `storage`. Answers in progress go on under the new
weights; the time to rebuild their caches is not counted, here or in the planner. A replica that fails drops its groups,
whose place is given out again, and comes back after `repair_s` with the latest version.
"""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from planners.errors import UserError
from planners.plan.plan import ClusterPlan, DemandPlan, IterationPlan
from planners.plan.run import ReplicaPlan
from planners.staleness import choose_groups, may_lease

SHOWN_STEPS, SHOWN_ANSWERS = (60, 300), (30_000, 500_000)
"""Of the simulation whose step time is shown beside the planner's, at least and at most."""
MOST_ANSWERS = 20_000_000
"""Of any simulation: a core simulates about 100,000 a second."""


@dataclass(frozen=True)
class Span:
    """Something that took time, for the Gantt chart. `actor` is `trainer` or a replica's number."""

    actor: str
    kind: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """What happened. Rates are over the steps after the first `warm_up`."""

    steps: int
    seconds: float
    throughput_tokens_per_s: float
    step_s: float
    usd_per_million_tokens: float
    staleness: dict[int, int]
    dropped: dict[str, int]
    trainer_wait_share: float
    gate_wait_share: float
    trainer_busy_share: float
    slots_used_share: float
    spans: tuple[Span, ...]


@dataclass
class _Replica:
    """One engine. Answers end at an iteration number, so time passes for all of them at once."""

    plan: ReplicaPlan
    costs: IterationPlan
    number: int
    version: int = 0
    iteration: int = 0
    clock_s: float = 0.0
    cached: float = 0.0
    epoch: int = 0
    down_until_s: float = 0.0
    running: list[tuple[int, int, int]] = field(default_factory=list)  # (last iteration, group, tokens)
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (group, tokens)
    slot_s: float = 0.0
    gate_s: float = 0.0
    idle_since_s: float | None = None

    def span_s(self, iterations: int) -> float:
        """Seconds of so many iterations with the answers now in progress."""
        n, k, costs = len(self.running), iterations, self.costs
        if n == 0:
            return 0.0
        pairs = k * (k - 1) / 2
        return (
            k * costs.base_s[n - 1]
            + costs.per_cached_token_s * (k * self.cached + n * pairs)
            + costs.per_context_s * (k * self.cached / n + pairs)
        )

    def advance(self, now_s: float) -> None:
        """Pass the whole iterations that end by `now_s`; the clock stays where the last one ended."""
        if not self.running or now_s <= self.clock_s:
            self.clock_s = max(self.clock_s, now_s)
            return
        most = self.running[0][0] - self.iteration
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            if self.clock_s + self.span_s(middle) <= now_s + 1e-9:
                low = middle
            else:
                high = middle - 1
        self.step(low)

    def step(self, iterations: int) -> None:
        """Pass exactly so many iterations."""
        seconds = self.span_s(iterations)
        self.clock_s += seconds
        self.slot_s += seconds * len(self.running)
        self.cached += iterations * len(self.running)
        self.iteration += iterations


class Simulator:
    """State of one run. `run` is the only entry."""

    def __init__(
        self,
        plan: ClusterPlan,
        *,
        seed: int = 0,
        failures_per_h: float = 0.0,
        repair_s: float = 300.0,
        keep_spans: bool = False,
        tell: Callable[[int], object] | None = None,
    ) -> None:
        self.plan = plan
        self.tell = tell
        self.demand = plan.demand
        self.draw = random.Random(seed)
        self.failures_per_h, self.repair_s, self.keep_spans = failures_per_h, repair_s, keep_spans
        self.replicas = [_Replica(r, plan.iterations[r.layout], i) for i, r in enumerate(plan.replicas)]
        self.events: list[tuple[float, int, str, int, int]] = []
        self.sequence = 0
        self.groups_out = self.next_group = self.version = 0
        self.unfinished: dict[int, tuple[int, int, int]] = {}  # group: (answers left, version, replica)
        self.finished: dict[int, int] = {}  # group: version
        self.scoring: dict[int, int] = {}
        self.scorers: list[float] = []  # when each that has worked is free again
        self.step = 0
        self.step_ends_s: list[float] = []
        self.step_tokens: list[float] = []
        self.tokens_of: dict[int, float] = {}
        self.training_until_s: float | None = None
        self.arrival_s = 0.0
        self.waited_since_s, self.trainer_wait_s = 0.0, 0.0
        self.staleness: Counter[int] = Counter()
        self.dropped: Counter[str] = Counter()
        self.spans: list[Span] = []
        self.last_span: dict[str, int] = {}

    def run(self, steps: int, warm_up: int) -> Simulation:
        """Simulate so many training steps and report on those after the warm-up."""
        self.goal = steps
        for replica in self.replicas:
            self._fill(replica, 0.0)
            if self.failures_per_h:
                self._push(self.draw.expovariate(self.failures_per_h / 3600), "fail", replica.number, 0)
        self._try_train(0.0)
        while self.step < steps:
            now_s, _, kind, number, epoch = heapq.heappop(self.events)
            self._handle(now_s, kind, number, epoch)
        return self._report(steps, warm_up)

    def _push(self, at_s: float, kind: str, number: int, epoch: int) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (at_s, self.sequence, kind, number, epoch))

    def _handle(self, now_s: float, kind: str, number: int, epoch: int) -> None:
        if kind == "answer":
            replica = self.replicas[number]
            if epoch == replica.epoch:
                self._end_answers(replica)
        elif kind == "scored":
            if number in self.scoring:
                self.finished[number] = self.scoring.pop(number)
                self._try_train(now_s)
        elif kind == "trained":
            self._publish(now_s)
        elif kind == "free":
            self.training_until_s = None
            self._try_train(now_s)
        elif kind == "arrived":
            self._load(now_s, number)
        elif kind == "fail":
            self._fail(self.replicas[number], now_s)
        elif kind == "repaired":
            self._repair(self.replicas[number], now_s)

    # Generation

    def _fill(self, replica: _Replica, now_s: float) -> None:
        """Lease and start answers until every slot is taken or the gate is shut; then schedule the next end."""
        if not replica.running:
            replica.clock_s = max(replica.clock_s, now_s)
        if replica.down_until_s > now_s:
            return
        started = 0
        while len(replica.running) < replica.plan.concurrency:
            if not replica.waiting and not self._lease(replica):
                break
            group, tokens = replica.waiting.popleft()
            heapq.heappush(replica.running, (replica.iteration + tokens, group, tokens))
            replica.cached += self.demand.prompt_tokens
            started += 1
        replica.clock_s += started * replica.costs.prefill_s
        self._note_idle(replica)
        self._schedule(replica)

    def _schedule(self, replica: _Replica) -> None:
        replica.epoch += 1
        if replica.running:
            end_s = replica.clock_s + replica.span_s(replica.running[0][0] - replica.iteration)
            self._push(end_s, "answer", replica.number, replica.epoch)

    def _lease(self, replica: _Replica) -> bool:
        """One more group for this replica, if the gate lets it."""
        b, eta = self.demand.prompts_per_step, self.demand.max_staleness
        if self.groups_out >= self.goal * b or not may_lease(self.groups_out, replica.version, b, eta):
            return False
        self.groups_out += 1
        group, self.next_group = self.next_group, self.next_group + 1
        lengths = [self._answer_tokens() for _ in range(self.demand.group_size)]
        self.unfinished[group] = (len(lengths), replica.version, replica.number)
        self.tokens_of[group] = float(sum(lengths))
        replica.waiting.extend((group, tokens) for tokens in lengths)
        return True

    def _answer_tokens(self) -> int:
        """A length in whole tokens that keeps the mean: 1.6 is 1 or 2, the latter in 60 % of the cases."""
        points = self.demand.response_points
        whole, rest = divmod(points[int(self.draw.random() * len(points))], 1)
        return max(1, int(whole) + (rest > 0 and self.draw.random() < rest))

    def _note_idle(self, replica: _Replica) -> None:
        """Slots that the gate keeps empty count as waiting once none is taken."""
        if replica.running:
            if replica.idle_since_s is not None:
                replica.gate_s += max(0.0, replica.clock_s - replica.idle_since_s)
                self._span(str(replica.number), "wait", replica.idle_since_s, replica.clock_s)
                replica.idle_since_s = None
        elif replica.idle_since_s is None:
            replica.idle_since_s = replica.clock_s

    def _end_answers(self, replica: _Replica) -> None:
        """The next answer ends, with all that end in the same iteration."""
        start_s = replica.clock_s
        replica.step(replica.running[0][0] - replica.iteration)
        self._span(str(replica.number), "generate", start_s, replica.clock_s)
        now_s = replica.clock_s
        while replica.running and replica.running[0][0] <= replica.iteration:
            _, group, tokens = heapq.heappop(replica.running)
            replica.cached -= self.demand.prompt_tokens + tokens
            left, version, owner = self.unfinished[group]
            if left > 1:
                self.unfinished[group] = (left - 1, version, owner)
                continue
            del self.unfinished[group]
            self.scoring[group] = version
            self._push(self._scored_s(now_s), "scored", group, 0)
        self._fill(replica, now_s)

    def _scored_s(self, now_s: float) -> float:
        """When a group whose last answer ends now is scored: first come, first served."""
        if self.demand.scorers is None:
            return now_s + self.plan.reward_s
        starts_s = now_s if len(self.scorers) < self.demand.scorers else max(now_s, heapq.heappop(self.scorers))
        heapq.heappush(self.scorers, starts_s + self.plan.reward_s)
        return starts_s + self.plan.reward_s

    # Training

    def _try_train(self, now_s: float) -> None:
        """Start a step if the consumption rule gives it groups."""
        b, eta = self.demand.prompts_per_step, self.demand.max_staleness
        if self.training_until_s is not None or len(self.finished) < b:
            return
        for group in [g for g, v in self.finished.items() if v + eta < self.step]:
            self._drop(group, "stale")
        ready = [(g, v + eta) for g, v in self.finished.items()]
        pending = [v + eta for _, v, _ in self.unfinished.values()] + [v + eta for v in self.scoring.values()]
        chosen = choose_groups(ready, pending, self.step, b)
        if chosen is None:
            return
        self.trainer_wait_s += now_s - self.waited_since_s
        self._span("trainer", "wait", self.waited_since_s, now_s)
        tokens = 0.0
        for group in chosen:
            self.staleness[self.step - self.finished.pop(group)] += 1
            tokens += self.tokens_of.pop(group)
        self.step_tokens.append(tokens)
        self.training_until_s = now_s + self._train_s(tokens)
        self._span("trainer", "train", now_s, self.training_until_s)
        self._push(self.training_until_s, "trained", 0, 0)

    def _train_s(self, tokens: float) -> float:
        """A step takes time in proportion to its tokens."""
        mean = sum(self.demand.response_points) / len(self.demand.response_points)
        expected = mean * self.demand.prompts_per_step * self.demand.group_size
        return self.plan.train_s * tokens / expected

    def _publish(self, now_s: float) -> None:
        """A new version: the trainer pauses at once, the replicas when it arrives."""
        self.step += 1
        self.version = self.step
        self.step_ends_s.append(now_s)
        if self.tell is not None:
            self.tell(self.step)
        self.waited_since_s = self.training_until_s = now_s + self.plan.sync_train_s
        self._span("trainer", "sync", now_s, self.waited_since_s)
        self.arrival_s = max(self.arrival_s, now_s) + self.plan.transfer_s
        self._push(self.arrival_s, "arrived", self.version, 0)
        self._push(self.waited_since_s, "free", 0, 0)

    def _load(self, now_s: float, version: int) -> None:
        for replica in self.replicas:
            if replica.down_until_s > now_s:
                continue
            replica.advance(now_s)
            self._span(str(replica.number), "sync", replica.clock_s, replica.clock_s + self.plan.sync_rollout_s)
            replica.clock_s += self.plan.sync_rollout_s
            replica.version = version
        for replica in self.replicas:
            self._fill(replica, now_s)

    # Failures

    def _drop(self, group: int, reason: str) -> None:
        self.finished.pop(group, None)
        self.unfinished.pop(group, None)
        self.tokens_of.pop(group, None)
        self.groups_out -= 1
        self.dropped[reason] += 1

    def _fail(self, replica: _Replica, now_s: float) -> None:
        """All groups that this replica was generating are dropped."""
        for group in [g for g, (_, _, owner) in self.unfinished.items() if owner == replica.number]:
            self._drop(group, "lease_lost")
        replica.running.clear()
        replica.waiting.clear()
        replica.cached = 0.0
        replica.epoch += 1
        replica.clock_s = replica.down_until_s = now_s + self.repair_s
        self._span(str(replica.number), "down", now_s, replica.down_until_s)
        self._push(replica.down_until_s, "repaired", replica.number, 0)
        for other in self.replicas:
            if other is not replica and len(other.running) < other.plan.concurrency:
                other.advance(now_s)
                self._fill(other, now_s)

    def _repair(self, replica: _Replica, now_s: float) -> None:
        replica.version = self.version
        self._fill(replica, now_s)
        self._push(now_s + self.draw.expovariate(self.failures_per_h / 3600), "fail", replica.number, 0)

    # Report

    def _span(self, actor: str, kind: str, start_s: float, end_s: float) -> None:
        if self.keep_spans and end_s > start_s:
            last = self.spans[self.last_span[actor]] if actor in self.last_span else None
            if last and last.kind == kind and start_s <= last.end_s + 1e-9:
                self.spans[self.last_span[actor]] = Span(actor, kind, last.start_s, end_s)
            else:
                self.last_span[actor] = len(self.spans)
                self.spans.append(Span(actor, kind, start_s, end_s))

    def _report(self, steps: int, warm_up: int) -> Simulation:
        start_s = self.step_ends_s[warm_up - 1] if warm_up else 0.0
        end_s = self.step_ends_s[steps - 1]
        seconds = end_s - start_s
        tokens = sum(self.step_tokens[warm_up:steps])
        rate = tokens / seconds
        whole_s = end_s * len(self.replicas)
        slots_s = end_s * sum(r.plan.concurrency for r in self.replicas)
        return Simulation(
            steps=steps,
            seconds=end_s,
            throughput_tokens_per_s=rate,
            step_s=seconds / (steps - warm_up),
            usd_per_million_tokens=self.plan.usd_per_h / 3600 / rate * 1e6,
            staleness=dict(sorted(self.staleness.items())),
            dropped=dict(sorted(self.dropped.items())),
            trainer_wait_share=self.trainer_wait_s / end_s,
            gate_wait_share=sum(r.gate_s for r in self.replicas) / whole_s,
            trainer_busy_share=sum(self._train_s(t) for t in self.step_tokens[:steps]) / end_s,
            slots_used_share=sum(r.slot_s for r in self.replicas) / slots_s,
            spans=tuple(self.spans),
        )


def simulate(
    plan: ClusterPlan,
    *,
    steps: int = 30,
    seed: int = 0,
    warm_up: int | None = None,
    failures_per_h: float = 0.0,
    repair_s: float = 300.0,
    keep_spans: bool = False,
    tell: Callable[[int], object] | None = None,
) -> Simulation:
    """Run a plan.

    Args:
        plan: what to run.
        steps: training steps.
        seed: of lengths and failures; the same seed gives the same outcome.
        warm_up: first steps left out of the rates; empty: η + 1 of them, at most half.
        failures_per_h: failures of each replica per hour (Poisson).
        repair_s: seconds until a failed replica is back.
        keep_spans: keep what every actor did when, for a Gantt chart.
        tell: is called with the number of steps done after each.

    Raises:
        UserError: fewer than one step, a warm-up that leaves none, a negative rate, or more than `MOST_ANSWERS`.
    """
    answers = plan.demand.prompts_per_step * plan.demand.group_size
    if steps * answers > MOST_ANSWERS:
        most = MOST_ANSWERS // answers
        raise UserError(
            f"{steps:,} steps of {answers:,} answers take too long: a simulation stops at {MOST_ANSWERS:,} answers. "
            + (f"Simulate at most {most:,} steps." if most else "A step of this plan cannot be simulated.")
        )
    warm_up = min(plan.demand.max_staleness + 1, steps // 2) if warm_up is None else warm_up
    if not 0 <= warm_up < steps:
        raise UserError(f"{steps} steps leave none after a warm-up of {warm_up}: simulate more of them.")
    if failures_per_h < 0 or repair_s < 0:
        raise UserError("failures_per_h and repair_s must not be negative.")
    simulator = Simulator(
        plan, seed=seed, failures_per_h=failures_per_h, repair_s=repair_s, keep_spans=keep_spans, tell=tell
    )
    return simulator.run(steps, warm_up)


def with_simulated_step(plan: ClusterPlan) -> ClusterPlan:
    """The plan with the step time that it reaches in a simulation, where one of `SHOWN_ANSWERS` says something.

    The planner reckons with means. A step waits for the longest of its answers, whose length varies from step to step,
    and replicas that the gate keeps half empty are faster than full ones: by up to 7 % in benchmarks/README.md the two
    differ, where few prompts a step or little staleness leave no slack.
    """
    shown = shown_steps(plan.demand)
    if shown is None:
        return plan
    steps, warm_up = shown
    return plan.model_copy(update={"simulated_step_s": simulate(plan, steps=steps, warm_up=warm_up).step_s})


def shown_steps(demand: DemandPlan) -> tuple[int, int] | None:
    """Steps of the simulation whose step time is shown, more where chance has few answers, and how many are warm-up.

    None where the answers that it may have are too few steps.
    """
    answers = demand.prompts_per_step * demand.group_size
    least, most = SHOWN_STEPS
    wanted = SHOWN_ANSWERS[0] // answers if len(demand.response_points) > 1 else least
    steps = min(max(least, min(most, wanted)), SHOWN_ANSWERS[1] // answers)
    warm_up = steps // 3
    return None if steps < least and warm_up <= demand.max_staleness else (steps, warm_up)
