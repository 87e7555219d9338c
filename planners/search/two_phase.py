"""Mode `two-phase`: Algorithm 1 of AReaL-Hex (arXiv 2511.00796), equation by equation.

(1)  minimise max{C_T, C_I} over D_T ∪ D_I = D, the training plan σ and the rollout plan τ, with
         C_T = C_TRAIN(σ, D_T, δ)
         C_I = C_ROLLOUT(τ, D_I, P, δ) + C_REWARD(δ) + C_UPDATE(σ, D_T, τ, D_I, δ)
     averaged over a window of δ steps.

Alternate, until max{C_T, C_I} has not changed for K = 20 iterations:

  search        σ: constrained search over D_T: DP × TP × PP, groups of one type, layers in proportion to compute.
                τ: the rollout program (2), a mixed-integer program, over D_I.
  repartition   (3), see `planners.search.partition`; γ is bisected on [0, 1]: the training side loses compute while
                C_T < C_I, and gains some otherwise.

(2)  min Θ   s.t.  Σ_ψ x_ψj = B_j ∀ class j,   Σ_j x_ψj·len_j/h_ψj ≤ Θ·y_ψ ∀ ψ,   Σ_ψ i_t^ψ·y_ψ ≤ i_t ∀ type t
     is bilinear as printed. Divisible x scales with Θ, so with Θ = 1 and the share φ of the batch that is done in it,

(2') max φ   s.t.  Σ_ψ x_ψj = φ·B_j,   Σ_j x_ψj·len_j/h_ψj ≤ y_ψ,   GPU counts,   Θ* = 1/φ*

     is linear. Length classes j are quarters of P; a class's rate h_ψj uses its own mean context.

C_ROLLOUT(δ) is the makespan of δ·B groups with lengths from P streamed to the replicas of τ, start-up included,
divided by δ; δ doubles from η + 1 until that changes by less than 1 %.

Ours, not the paper's: the best plan over all iterations is kept; `corrected` holds D_T to the middle of [γ_L, γ_H]
give or take one GPU, where `printed` only holds it inside; plans with C_T > C_I are allowed unless excluded; and C_I
takes columns whose longest answers of a step are there in time.
"""

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass

from planners.errors import UserError
from planners.hardware.topology import Topology
from planners.search.columns import Problem, RolloutColumn, TrainingColumn, rollout_columns, training_columns
from planners.search.partition import Partition, Repartition, Variant, device_graph
from planners.search.placement import Placed, cost_placement, place
from planners.search.solver import Infeasible, minimise

STABLE_ITERATIONS = 20
MOST_ITERATIONS = 60
LENGTH_CLASSES = 4
WINDOW_CHANGE = 0.01
LONGEST_WINDOW = 64
STEP_RATIO = 1.2
MAKESPAN_ANSWERS = 20_000


@dataclass(frozen=True)
class Searched:
    """σ and τ on one partition, with C_T, C_I and the window δ that C_I was found stable at."""

    placed: Placed
    train_s: float
    rollout_s: float
    window: int

    @property
    def cost_s(self) -> float:
        """max{C_T, C_I}."""
        return max(self.train_s, self.rollout_s)


def plan_two_phase(problem: Problem, variant: Variant, exclude_training_bound: bool, time_limit_s: float) -> Placed:
    """Run Algorithm 1. It proves no bound.

    Raises:
        UserError: no partition has both a training and a rollout plan.
    """
    repartition = Repartition(device_graph(problem.topology), variant)
    search = Search(problem, time_limit_s)
    low, high, stable = 0.0, 1.0, 0
    best: Searched | None = None
    last: float | None = None
    for _ in range(MOST_ITERATIONS):
        partition = repartition.maximise(*_window(problem.topology, repartition, variant, low, high))
        found = search(partition)
        middle = (low + high) / 2
        if found is None:  # one side cannot run at all: give it more
            low, high = (middle, high) if search.training_lacks(partition) else (low, middle)
        else:
            low, high = (low, middle) if found.train_s < found.rollout_s else (middle, high)
            allowed = not exclude_training_bound or found.train_s <= found.rollout_s
            if allowed and (best is None or found.placed.step_s < best.placed.step_s):
                best = found
        cost = found.cost_s if found else None
        stable = stable + 1 if cost == last else 0
        last = cost
        if stable >= STABLE_ITERATIONS:
            break
    if best is None:
        raise UserError(
            f"Algorithm 1 ({variant}) found no partition of cluster {problem.topology.name} that can train and generate"
            f"{' with C_T ≤ C_I' if exclude_training_bound else ''}; mode joint searches all of them."
        )
    return best.placed


def _window(
    topology: Topology, repartition: Repartition, variant: Variant, low: float, high: float
) -> tuple[float, float]:
    """The compute share that D_T must have."""
    if variant == "printed":
        return low, high
    one = max(n.device.flops_per_s for n in topology.nodes) / repartition.total_c
    middle = (low + high) / 2
    return middle - one, middle + one


class Search:
    """The search phase on a partition; partitions seen before are not searched again."""

    def __init__(self, problem: Problem, time_limit_s: float) -> None:
        self.problem = problem
        self.time_limit_s = time_limit_s
        self._known: dict[Partition, Searched | None] = {}
        self._sides: dict[Partition, bool] = {}

    def __call__(self, partition: Partition) -> Searched | None:
        """The best σ and τ, or None if one side has no plan."""
        if partition not in self._known:
            self._known[partition] = self._search(partition)
        return self._known[partition]

    def training_lacks(self, partition: Partition) -> bool:
        """Whether it was the training side that had no plan."""
        return self._sides.get(partition, False)

    def _search(self, partition: Partition) -> Searched | None:
        nodes = self.problem.topology.nodes
        training_side = self._side({n.name: k for n, k in zip(nodes, partition, strict=True)})
        rollout_side = self._side({n.name: n.devices - k for n, k in zip(nodes, partition, strict=True)})
        sigma = _fastest_training(training_side) if training_side else None
        self._sides[partition] = sigma is None
        if sigma is None or rollout_side is None:
            return None
        try:
            columns = rollout_columns(rollout_side)
            tau = self._rollout(rollout_side, columns, sigma.train_s)
        except (UserError, Infeasible):
            return None
        placed = self._together(sigma, place_replicas(rollout_side, tau))
        rollout_s, window = windowed_rollout_s(self.problem, tau)
        return Searched(placed, sigma.train_s, rollout_s + self.problem.demand.reward_s + placed.sync.rollout_s, window)

    def _side(self, devices: dict[str, int]) -> Problem | None:
        """The problem restricted to one side's devices."""
        if not any(devices.values()):
            return None
        return self.problem.on(self.problem.topology.restricted(devices))

    def _rollout(self, side: Problem, columns: list[RolloutColumn], train_s: float) -> dict[RolloutColumn, int]:
        """(2') among columns whose longest answers are in time, for the shortest step that its own outcome keeps."""
        versions = self.problem.demand.max_staleness + 1
        step_s = train_s
        while True:
            fresh = [c for c in columns if c.latency_s <= versions * step_s - train_s]
            if fresh:
                replicas, theta_s = solve_rollout(side, fresh, self.time_limit_s)
                if theta_s <= step_s or len(fresh) == len(columns):
                    return replicas
            step_s *= STEP_RATIO

    def _together(self, sigma: Placed, replicas: tuple[tuple[RolloutColumn, str, int], ...]) -> Placed:
        """Both sides on the whole cluster: replicas stand behind the trainer's devices on a shared machine."""
        nodes = {n.name: n for n in self.problem.topology.nodes}
        used: dict[str, int] = {}
        stages = []
        for stage in sigma.stages:
            whole = tuple((nodes[n.name], devices) for n, devices in stage)
            used.update({n.name: len(devices) for n, devices in whole})
            stages.append(whole)
        placed = []
        for column, name, count in replicas:
            start = used.get(name, 0)
            placed.append((column, nodes[name], tuple(range(start, start + count))))
            used[name] = start + count
        return cost_placement(self.problem, sigma.training, tuple(stages), tuple(placed))


def _fastest_training(side: Problem) -> Placed | None:
    """C_TRAIN: the fastest layout on the real links of D_T."""
    try:
        columns = training_columns(side)
    except UserError:
        return None
    return min((_place_training(side, column) for column in columns), key=lambda placed: placed.train_s)


def _place_training(side: Problem, column: TrainingColumn) -> Placed:
    nothing: Mapping[RolloutColumn, int] = {}
    return place(side, column, nothing)


def place_replicas(side: Problem, replicas: Mapping[RolloutColumn, int]) -> tuple[tuple[RolloutColumn, str, int], ...]:
    """Replicas onto the machines of D_I, largest degrees first."""
    free = {n.name: n.devices for n in side.topology.nodes}
    kinds = {n.name: n.type_name for n in side.topology.nodes}
    placed = []
    for column in sorted(replicas, key=lambda c: (-c.devices, c.name)):
        for _ in range(replicas[column]):
            name = next(n for n in sorted(free) if kinds[n] == column.device_type and free[n] >= column.devices)
            free[name] -= column.devices if side.topology.types[column.device_type].kind == "cuda" else free[name]
            placed.append((column, name, column.devices))
    return tuple(placed)


def solve_rollout(
    side: Problem, columns: list[RolloutColumn], time_limit_s: float
) -> tuple[dict[RolloutColumn, int], float]:
    """(2').

    Returns:
        y_ψ and Θ*, the seconds that one step's answers take.

    Raises:
        Infeasible: no replicas.
    """
    import pulp

    # Data
    demand = side.demand
    classes = demand.response.classes(LENGTH_CLASSES)
    seconds = {
        (i, j): length / class_rate(side, column, length)
        for i, column in enumerate(columns)
        for j, (_, length) in enumerate(classes)
    }
    # Variables: y_ψ, x_ψj, φ
    program = pulp.LpProblem("rollout", pulp.LpMinimize)
    most = [side.capacity[c.device_type, c.tensor] for c in columns]
    y = [program.add_variable(f"y{i}", 0, most[i], cat=pulp.LpInteger) for i in range(len(columns))]
    x = {key: program.add_variable(f"x{key[0]}_{key[1]}", 0) for key in seconds}
    share = program.add_variable("phi", 0)
    # Objective
    program += -share
    # Constraints: Σ_ψ x_ψj = φ·B_j
    for j, (probability, _) in enumerate(classes):
        answers = probability * demand.answers_per_step
        program += pulp.lpSum(x[i, j] for i in range(len(columns))) == answers * share
    # Σ_j x_ψj·len_j/h_ψj ≤ y_ψ
    for i in range(len(columns)):
        program += pulp.lpSum(seconds[i, j] * x[i, j] for j in range(len(classes))) <= y[i]
    # Σ_ψ i_t^ψ·y_ψ ≤ i_t, with TP inside a machine; and no more in flight than the gate lets through
    for (kind, k), places in side.capacity.items():
        program += (
            pulp.lpSum(c.places(k) * y[i] for i, c in enumerate(columns) if c.device_type == kind and c.tensor >= k)
            <= places
        )
    for kind, k, machines in side.core_machines():
        mine = [y[i] for i, c in enumerate(columns) if c.device_type == kind and c.cores >= k]
        program += pulp.lpSum(mine) <= machines
    program += pulp.lpSum(c.leased * y[i] for i, c in enumerate(columns)) <= demand.gate_answers
    minimise(program, time_limit_s, 1e-3)
    replicas = {c: round(v.varValue) for c, v in zip(columns, y, strict=True) if round(v.varValue) > 0}
    if not replicas or share.varValue <= 0:
        raise Infeasible
    return replicas, 1 / share.varValue


def class_rate(side: Problem, column: RolloutColumn, length: float) -> float:
    """h_ψj: the column's tokens/s if all its answers had this length, scaled from the mixture's."""
    device = side.topology.types[column.device_type]
    iteration = side.serving.iteration(device, column.tensor, column.concurrency)
    c, demand = column.concurrency, side.demand
    of_class = iteration.seconds(c, c * (demand.prompt.mean + length / 2)) + c / length * iteration.prefill_s
    return column.cores * c / of_class


def windowed_rollout_s(problem: Problem, replicas: Mapping[RolloutColumn, int]) -> tuple[float, int]:
    """C_ROLLOUT(δ)/δ, δ doubling from η + 1 until it changes by less than 1 %, and that δ."""
    window = problem.demand.max_staleness + 1
    seconds = makespan_s(problem, replicas, window) / window
    while window < LONGEST_WINDOW:
        longer = makespan_s(problem, replicas, 2 * window) / (2 * window)
        window *= 2
        changed = abs(longer - seconds) / seconds
        seconds = longer
        if changed < WINDOW_CHANGE:
            break
    return seconds, window


def makespan_s(problem: Problem, replicas: Mapping[RolloutColumn, int], steps: int) -> float:
    """Seconds until the last answer of `steps` steps ends, each given to the slot that is free first.

    Large batches are thinned, slots and answers alike, to `MAKESPAN_ANSWERS`.
    """
    points = problem.demand.response.points
    draw = random.Random(0)
    answers = steps * problem.demand.answers_per_step
    thin = max(1.0, answers / MAKESPAN_ANSWERS)
    slots: list[tuple[float, float]] = []
    for column, count in sorted(replicas.items(), key=lambda item: item[0].name):
        per_token_s = column.concurrency / column.tokens_per_s
        slots += [(0.0, per_token_s)] * max(1, round(column.concurrency * count / thin))
    kept = answers * len(slots) / sum(c.concurrency * n for c, n in replicas.items())
    heapq.heapify(slots)
    for _ in range(max(1, round(kept))):
        ready_s, per_token_s = slots[0]
        heapq.heapreplace(slots, (ready_s + per_token_s * points[int(draw.random() * len(points))], per_token_s))
    return max(ready_s for ready_s, _ in slots)
