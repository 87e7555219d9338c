"""The mixed-integer program of mode `joint`; its equations are in `planners.search.joint`."""

from dataclasses import dataclass
from typing import Any

from planners.costs.generation import TENSOR_RANKS
from planners.costs.sync import load_s, publish_s
from planners.search.columns import Problem, RolloutColumn, TrainingColumn
from planners.workload.demand import Demand

TANGENT_RATIO = 1.04
TIDY_USD_PER_H = 1e-6  # a replica's price beside its devices': of equally cheap plans the one with fewer
DEVIATIONS, IN_TIME = 2.0, 0.9  # how far headroom covers the spread of a step's work, and of its longest answer


@dataclass(frozen=True)
class Wish:
    """What is minimised under which limit: step time on everything, under a budget, or price under a target.

    Where `all_is_free`, generation time stands in for the price, and then the number of devices that train. With
    `headroom_usd_per_h` each second by which a step would take longer at the upper end of what its answers are counts
    as so much. Steps that are not below `below_s` are of no interest.
    """

    budget_usd_per_h: float | None = None
    target_step_s: float | None = None
    all_is_free: bool = False
    headroom_usd_per_h: float = 0.0
    below_s: float | None = None


class Program:
    """The variables and constraints of one solve."""

    def __init__(
        self,
        problem: Problem,
        training: list[TrainingColumn],
        rollout: list[RolloutColumn],
        wish: Wish,
        allowed_s: float | None,
    ) -> None:
        import pulp

        self.pulp = pulp
        self.problem, self.training, self.rollout, self.wish = problem, training, rollout, wish
        self.program = pulp.LpProblem("joint", pulp.LpMinimize)
        self.alone = {  # CPU types with one machine, where one process at most generates: its cores
            t: max(size for kind, size in problem.machine_counts if kind == t)
            for t, device in problem.topology.types.items()
            if device.kind == "cpu" and problem.machine_counts_of(t) == 1
        }
        self.z = [self.program.add_variable(f"z{i}", cat=pulp.LpBinary) for i in range(len(training))]
        self.y = [
            self.program.add_variable(f"y{i}", 0, problem.capacity[c.device_type, c.tensor], cat=pulp.LpInteger)
            for i, c in enumerate(rollout)
        ]
        self.step, self.generation = (
            self.program.add_variable("T", 0, wish.below_s),
            self.program.add_variable("tau", 0),
        )
        self.rate = self.program.add_variable("H", min(c.tokens_per_s for c in rollout))
        self.pause, self.transfer = self.program.add_variable("S", 0), self.program.add_variable("X", 0)
        self.train_pause = self.program.add_variable("P", 0) if problem.sync_mode == "storage" else self.pause
        self.late = self.program.add_variable("late", 0) if wish.headroom_usd_per_h else None
        self.more_work, self.longer = spread(problem.demand)
        self._objective()
        self._assignment()
        self._times()
        self._latency(allowed_s)
        self._sync()

    def _objective(self) -> None:
        sum_ = self.pulp.lpSum
        self.price = sum_(self.problem.topology.types[t].usd_per_h * self._used(t) for t in self.problem.topology.types)
        if self.wish.target_step_s is None:
            self.program += self.step
        else:
            cost = self.price
            if self.wish.all_is_free:
                devices = sum_(c.layout.devices * z for c, z in zip(self.training, self.z, strict=True))
                cost = self.generation + TIDY_USD_PER_H * devices
            if self.late is not None:
                cost += self.wish.headroom_usd_per_h * self.late
            self.program += cost + TIDY_USD_PER_H * sum_(self.y)
            self.program += self.step <= self.wish.target_step_s
        if self.wish.budget_usd_per_h is not None:
            self.program += self.price <= self.wish.budget_usd_per_h

    def _used(self, device_type: str) -> Any:
        """n_t."""
        return self.pulp.lpSum(
            [c.uses.get((device_type, 1), 0) * z for c, z in zip(self.training, self.z, strict=True)]
            + [c.devices * y for c, y in zip(self.rollout, self.y, strict=True) if c.device_type == device_type]
        )

    def _assignment(self) -> None:
        """(1), (2), (6)."""
        sum_, problem = self.pulp.lpSum, self.problem
        self.program += sum_(self.z) == 1
        for t in problem.topology.types:
            for k in TENSOR_RANKS:
                places = [c.uses.get((t, k), 0) * z for c, z in zip(self.training, self.z, strict=True)]
                places += [
                    c.places(k) * y
                    for c, y in zip(self.rollout, self.y, strict=True)
                    if c.device_type == t and c.tensor >= k
                ]
                self.program += sum_(places) <= problem.capacity[t, k]
        free = [t for t in self.alone if problem.topology.types[t].usd_per_h == 0]
        for t in free:
            self._all_cores(t)
        for t, k, machines in problem.core_machines():
            if t in free:
                continue
            processes = [y for c, y in zip(self.rollout, self.y, strict=True) if c.device_type == t and c.cores >= k]
            taken = sum_(c.leaves_less(t, k) * z for c, z in zip(self.training, self.z, strict=True))
            self.program += sum_(processes) + taken <= machines
        in_flight = sum_(c.leased * y for c, y in zip(self.rollout, self.y, strict=True))
        self.program += in_flight <= problem.demand.gate_answers

    def _all_cores(self, device_type: str) -> None:
        """(2) for free cores of one machine: a process with fewer than the trainer leaves has no advantage."""
        left: dict[int, list[Any]] = {}
        for c, z in zip(self.training, self.z, strict=True):
            cores = c.spare(device_type) if device_type in c.types else self.alone[device_type]
            left.setdefault(cores, []).append(z)
        processes: dict[int, list[Any]] = {}
        for column, y in zip(self.rollout, self.y, strict=True):
            if column.device_type == device_type:
                processes.setdefault(column.cores, []).append(y)
        for cores, mine in processes.items():
            self.program += self.pulp.lpSum(mine) <= self.pulp.lpSum(left.get(cores, []))

    def _times(self) -> None:
        """(3) with its first tangents, (4), (5)."""
        sum_, demand = self.pulp.lpSum, self.problem.demand
        self.program += self.rate == sum_(c.tokens_per_s * y for c, y in zip(self.rollout, self.y, strict=True))
        train = sum_(c.step_s * z for c, z in zip(self.training, self.z, strict=True))
        self.program += self.step >= train + self.train_pause
        self.program += self.step >= self.generation + self.pause
        self.program += self.step >= demand.scoring_s
        if self.late is not None:
            more = (1 + self.more_work) * self.generation
            self.program += self.step + self.late >= more + self.pause
        if len(self.alone) == len(self.problem.topology.types) == 1:  # one process generates all
            self.program += self.generation >= sum_(
                demand.tokens_per_step / c.tokens_per_s * y for c, y in zip(self.rollout, self.y, strict=True)
            )
            return
        lowest = min(c.tokens_per_s for c in self.rollout)
        highest = highest_rate(self.problem, self.rollout)
        point = lowest
        while point < highest * TANGENT_RATIO:
            self.add_tangent(point)
            point *= TANGENT_RATIO

    def add_tangent(self, rate: float) -> None:
        """τ ≥ (W/H₀)(2 − H/H₀)."""
        at = self.problem.demand.tokens_per_step / rate
        self.program += self.generation + at / rate * self.rate >= 2 * at

    def _latency(self, allowed_s: float | None) -> None:
        """(7). Λ rises level by level of latency, from the lowest there is; columns up to `allowed_s` are free.

        Where one process at most generates, its own latency stands for the levels.
        """
        sum_, demand = self.pulp.lpSum, self.problem.demand
        lowest_s = min(c.latency_s for c in self.rollout)
        longest, levels = self.program.add_variable("L", lowest_s), sum_([lowest_s])
        several = [(c, y) for c, y in zip(self.rollout, self.y, strict=True) if c.device_type not in self.alone]
        late = [] if allowed_s is None else [c.latency_s for c, _ in several if c.latency_s > max(allowed_s, lowest_s)]
        below_s, higher = lowest_s, None
        for level, latency_s in enumerate(sorted(set(late))):
            used = self.program.add_variable(f"w{level}", cat=self.pulp.LpBinary)
            for c, y in several:
                if c.latency_s == latency_s:
                    self.program += y <= self.problem.capacity[c.device_type, c.tensor] * used
            if higher is not None:
                self.program += used <= higher
            levels += (latency_s - below_s) * used
            below_s, higher = latency_s, used
        self.program += longest >= levels
        for t in self.alone:
            mine = [(c, y) for c, y in zip(self.rollout, self.y, strict=True) if c.device_type == t]
            self.program += longest >= sum_(c.latency_s * y for c, y in mine)
        train = sum_(c.step_s * z for c, z in zip(self.training, self.z, strict=True))
        before = train + self.transfer + demand.reward_s
        versions, drain = demand.max_staleness + 1, demand.drain_share
        self.program += versions * (self.step - self.pause) >= before + demand.scoring_s
        self.program += versions * (self.step - self.pause) >= before + longest
        self.program += versions * (self.step - self.pause) >= before + self.generation + drain * longest
        if self.late is not None:
            body, longest = versions * (self.step + self.late - self.pause), (1 + self.longer) * longest
            self.program += body >= before + longest + self.generation / 2  # begun when half of the others are
            self.program += body >= before + (1 + self.more_work) * self.generation + drain * longest

    def _sync(self) -> None:
        """(8), (9), (10)."""
        problem, weight_bytes = self.problem, self.problem.model.weight_bytes
        if problem.sync_mode == "storage":
            self._storage()
            return
        places = {t: self._generating_machines(t) for t in problem.topology.types}
        inside_s = {t: weight_bytes / d.link_bytes_per_s for t, d in problem.topology.types.items()}
        for types in sorted({c.types for c in self.training}):
            chosen = self.pulp.lpSum(z for c, z in zip(self.training, self.z, strict=True) if c.types == types)
            reach_s = {
                t: weight_bytes / max(problem.topology.best_link(g, t) for g in types) for t in problem.topology.types
            }
            if problem.sync_mode == "blocking":
                most = sum(s * problem.machine_counts_of(t) + inside_s[t] for t, s in reach_s.items())
                total = self.pulp.lpSum(
                    reach_s[t] * places[t].machines + inside_s[t] * places[t].local for t in problem.topology.types
                )
                self.program += self.pause >= total - most * (1 - chosen)
                continue
            target = self.pause if problem.sync_mode == "tree" else self.transfer
            for t, s in reach_s.items():
                spread_s = weight_bytes / problem.topology.best_link(t, t)
                tree = s * places[t].remote + spread_s * places[t].several
                self.program += target >= tree - (s + spread_s) * (1 - chosen)
                self.program += target >= inside_s[t] * places[t].local
        self.program += self.step >= self.transfer
        if problem.sync_mode == "overlapped":
            for t in problem.topology.types:
                self.program += self.pause >= inside_s[t] * places[t].local
                self.program += self.pause >= inside_s[t] * places[t].remote

    def _storage(self) -> None:
        """(9) where the trainer writes and replicas load, each side at its slowest type's pace."""
        problem, sum_ = self.problem, self.pulp.lpSum
        written = sum_(training_publish_s(problem, c) * z for c, z in zip(self.training, self.z, strict=True))
        self.program += self.train_pause >= written
        self.program += self.transfer >= written
        loads = {t: replica_load_s(problem, t) for t in sorted({c.device_type for c in self.rollout})}
        shortest_s = min(loads.values())
        self.program += self.pause >= shortest_s
        for t, seconds in loads.items():
            if seconds > shortest_s:
                used = self.program.add_variable(f"u_{t}", cat=self.pulp.LpBinary)
                mine = sum_(y for c, y in zip(self.rollout, self.y, strict=True) if c.device_type == t)
                self.program += mine <= problem.capacity[t, 1] * used
                self.program += self.pause >= shortest_s + (seconds - shortest_s) * used

    def _generating_machines(self, device_type: str) -> "_Places":
        """(8)."""
        problem, add, sum_, t = self.problem, self.program.add_variable, self.pulp.lpSum, device_type
        count = problem.machine_counts_of(t)
        sizes = [d for (kind, d) in problem.machine_counts if kind == t]
        of_size = {d: add(f"m_{t}_{d}", 0, problem.machine_counts[t, d], cat=self.pulp.LpInteger) for d in sizes}
        for d in sizes:
            training = sum_(c.machines(t, d) * z for c, z in zip(self.training, self.z, strict=True))
            self.program += of_size[d] + training <= problem.machine_counts[t, d]
        places = _Places(
            machines=sum_(of_size.values()),
            local=add(f"l_{t}", cat=self.pulp.LpBinary),
            remote=add(f"v_{t}", cat=self.pulp.LpBinary),
            several=add(f"s_{t}", cat=self.pulp.LpBinary),
        )
        room = sum_(d * m for d, m in of_size.items())
        devices = sum_(c.devices * y for c, y in zip(self.rollout, self.y, strict=True) if c.device_type == t)
        spare = sum_(c.spare(t) * z for c, z in zip(self.training, self.z, strict=True))
        self.program += room >= devices - spare
        self.program += room >= devices - max(sizes) * places.local
        self.program += places.machines <= count * places.remote
        self.program += places.machines - 1 <= count * places.several
        return places


@dataclass(frozen=True)
class _Places:
    """Where the replicas of one type stand: m_t remote machines, some on the trainer's, any remote, several remote."""

    machines: Any
    local: Any
    remote: Any
    several: Any


def spread(demand: Demand) -> tuple[float, float]:
    """Shares by which a step's work, and its longest answer, may exceed what is reckoned with."""
    lengths, answers = demand.response, demand.answers_per_step
    deviation = max(0.0, lengths.moment(2) - lengths.mean**2) ** 0.5 / lengths.mean
    longest = lengths.quantile(IN_TIME ** (1 / answers))
    return DEVIATIONS * deviation / answers**0.5, max(0.0, longest / demand.latency_tokens - 1)


def highest_rate(problem: Problem, rollout: list[RolloutColumn]) -> float:
    """H if every device generated in its type's best column."""
    return sum(
        max((c.tokens_per_s / c.devices for c in rollout if c.device_type == t), default=0.0) * count
        for t, count in problem.topology.counts.items()
    )


def training_publish_s(problem: Problem, column: TrainingColumn) -> float:
    """Seconds in which the column's trainer writes a version to storage."""
    weights = problem.model.weight_bytes
    return max(publish_s(problem.topology, t, weights, problem.profiles) for t in column.types)


def replica_load_s(problem: Problem, device_type: str) -> float:
    """Seconds in which a replica of this type loads a version from storage."""
    return load_s(problem.topology, device_type, problem.model.weight_bytes, problem.profiles)
