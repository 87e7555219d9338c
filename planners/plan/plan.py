"""A plan for a described cluster: what runs where, how fast, at what price, in how much memory, how near the optimum.

It holds all that the simulator needs, so a plan file can be simulated, or compared, on another machine.
"""

from dataclasses import asdict
from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError, model_validator

from planners.costs.memory import Memory, serving_memory
from planners.costs.sync import SYNC_RUNS_TODAY, SyncMode
from planners.errors import PlanError, UserError
from planners.hardware.topology import Node
from planners.plan.run import (
    Amount,
    Count,
    MachineShare,
    Number,
    Part,
    Positive,
    ReplicaPlan,
    RunPlan,
    StagePlan,
    TrainerPlan,
)
from planners.search.columns import Problem
from planners.search.placement import Placed
from planners.workload.demand import Demand


class IterationPlan(Part):
    """Seconds of an engine iteration: base_s[n−1] + per_cached_token_s·S + per_context_s·S/n."""

    base_s: tuple[Positive, ...]
    per_cached_token_s: Amount
    per_context_s: Amount
    prefill_s: Amount


class MachinePlan(Part):
    """One machine and what its devices do."""

    name: str
    device_type: str
    devices: Count
    training: Number = Field(description="Devices that train.")
    rollout: Number = Field(description="Devices that generate.")


class MemoryPlan(Part):
    """Bytes on one device, by part."""

    role: str
    weights: Amount
    gradients: Amount
    optimiser: Amount
    activations: Amount
    kv: Amount
    workspace: Amount
    available: Positive


class DemandPlan(Part):
    """What a step asks, as far as simulation needs it."""

    prompts_per_step: Count
    group_size: Count
    max_staleness: Number
    prompt_tokens: Amount
    response_points: tuple[Positive, ...] = Field(min_length=1, description="Equally likely answer lengths.")
    scorers: Count | None = Field(default=None, description="Groups scored at once; empty: all that there are.")


class ClusterPlan(RunPlan):
    """A chosen plan. Times are seconds per training step; throughput counts response tokens."""

    model_config = ConfigDict(extra="forbid")

    mode: str
    cluster: str
    model: str
    what_if: bool = Field(description="Whether it uses layouts or sync modes that do not run yet.")
    throughput_tokens_per_s: Positive
    step_s: Positive
    rollout_s: Amount
    train_s: Amount
    sync_s: Amount = Field(
        description="From the end of a training step until every replica generates with its weights."
    )
    sync_train_s: Amount = Field(description="Of these the trainer stands still.")
    sync_rollout_s: Amount = Field(description="Of these every replica stands still.")
    transfer_s: Amount = Field(description="From the end of a training step until replicas can begin to take weights.")
    sync_mode: SyncMode
    reward_s: Amount = Field(description="From a group's last answer until the group is scored.")
    scoring_s: Amount = Field(default=0.0, description="Scoring of a step's groups with all scorers at work.")
    usd_per_h: Amount = Field(description="Price of the devices used.")
    price_bound_usd_per_h: Amount | None = Field(description="With a target: nothing cheaper reaches it.")
    usd_per_million_tokens: Amount
    upper_bound_tokens_per_s: Positive | None = Field(
        description="No plan of the listed layouts is faster under these costs; empty in modes that prove none."
    )
    gap: float | None = Field(description="(bound − throughput)/bound.")
    gap_solver: float | None = Field(description="What the solver left unproven.")
    gap_placement: float | None = Field(description="What concrete machines lose against the best links.")
    bound_holds: str
    solve_s: float
    limited_by: str
    machines: tuple[MachinePlan, ...]
    memory: dict[str, MemoryPlan]
    iterations: dict[str, IterationPlan]
    demand: DemandPlan
    simulated_step_s: Positive | None = Field(default=None, description="Step time of the plan in a simulation.")
    explanation: str = Field(default="", description="In words: why this split, how sure, what would help.")

    @model_validator(mode="after")
    def _replicas_have_costs(self) -> "ClusterPlan":
        for replica in self.replicas:
            costs = self.iterations.get(replica.layout)
            if costs is None or len(costs.base_s) < replica.concurrency:
                raise ValueError(f"iterations lacks the costs of layout '{replica.layout}'")
        return self


PROVEN = ("joint", "exhaustive")
"""Modes that know how far from the best a plan can be."""
NO_BOUND = "none is proven in this mode"
BOUND_HOLDS = "within the listed layouts, the chosen sync mode and this cost model"


def build_plan(
    problem: Problem,
    placed: Placed,
    *,
    mode: str,
    bound_step_s: float,
    solver_step_s: float,
    solve_s: float,
    price_bound_usd_per_h: float | None = None,
) -> ClusterPlan:
    """Assemble the plan of a placement."""
    demand, topology = problem.demand, problem.topology
    throughput = demand.tokens_per_step / placed.step_s
    upper, is_proven = demand.tokens_per_step / bound_step_s, mode in PROVEN
    machines = _machines(problem, placed)
    price = sum((m.training + m.rollout) * n.device.usd_per_h for m, n in zip(machines, topology.nodes, strict=True))
    columns = sorted({column for column, _, _ in placed.replicas}, key=lambda c: c.name)
    rollout_s = _rollout_s(problem, placed)
    return ClusterPlan(
        mode=mode,
        cluster=topology.name,
        model=problem.model.name,
        what_if=not _runs_today(problem, placed),
        throughput_tokens_per_s=throughput,
        step_s=placed.step_s,
        rollout_s=rollout_s,
        train_s=placed.train_s,
        sync_s=placed.sync.delay_s,
        sync_train_s=placed.sync.train_s,
        sync_rollout_s=placed.sync.rollout_s,
        transfer_s=placed.sync.transfer_s,
        sync_mode=problem.sync_mode,
        reward_s=demand.reward_s,
        scoring_s=demand.scoring_s,
        usd_per_h=price,
        price_bound_usd_per_h=price_bound_usd_per_h,
        usd_per_million_tokens=price / 3600 / throughput * 1e6,
        upper_bound_tokens_per_s=upper if is_proven else None,
        gap=max(0.0, 1 - throughput / upper) if is_proven else None,
        gap_solver=max(0.0, 1 - bound_step_s / solver_step_s) if is_proven else None,
        gap_placement=max(0.0, (1 / solver_step_s - 1 / placed.step_s) * bound_step_s) if is_proven else None,
        bound_holds=BOUND_HOLDS if is_proven else NO_BOUND,
        solve_s=solve_s,
        limited_by=limiting_side(
            placed.train_s + placed.sync.train_s, rollout_s + placed.sync.rollout_s, demand.scoring_s
        ),
        trainer=_trainer(problem, placed),
        replicas=_replicas(problem, placed),
        machines=machines,
        memory=_memory(problem, placed),
        iterations={
            c.name: IterationPlan(
                **asdict(problem.serving.iteration(topology.types[c.device_type], c.tensor, c.concurrency).on(c.cores))
            )
            for c in columns
        },
        demand=_demand(demand),
    )


def _demand(demand: Demand) -> DemandPlan:
    return DemandPlan(
        prompts_per_step=demand.prompts_per_step,
        group_size=demand.group_size,
        max_staleness=demand.max_staleness,
        prompt_tokens=demand.prompt.mean,
        response_points=demand.response.points,
        scorers=demand.scorers,
    )


def _rollout_s(problem: Problem, placed: Placed) -> float:
    """Generation of one step: its work, or the wait for its longest answer where that decides the step."""
    demand = problem.demand
    work_s = demand.tokens_per_step / placed.rate
    rest_s = placed.step_s - placed.sync.rollout_s
    if demand.max_staleness == 0:
        return max(work_s, rest_s - placed.train_s - placed.sync.transfer_s - demand.reward_s)
    others_s = max(placed.train_s + placed.sync.train_s, placed.sync.transfer_s, demand.scoring_s)
    return work_s if placed.step_s <= others_s * (1 + 1e-9) else max(work_s, rest_s)


def limiting_side(train_side_s: float, rollout_side_s: float, scoring_s: float) -> str:
    """What decides the step."""
    if scoring_s > max(train_side_s, rollout_side_s):
        return "scoring"
    return "training" if train_side_s >= rollout_side_s else "generation"


def _runs_today(problem: Problem, placed: Placed) -> bool:
    replicas = all(column.runs_today(problem.demand.group_size) for column, _, _ in placed.replicas)
    return placed.training.layout.runs_today and replicas and problem.sync_mode in SYNC_RUNS_TODAY


def _trainer(problem: Problem, placed: Placed) -> TrainerPlan:
    layout = placed.training.layout
    shares = problem.training.layer_shares(layout.stages)
    return TrainerPlan(
        layout=layout.name,
        zero_stage=layout.zero,
        micro_batch_tokens=problem.demand.micro_batch_tokens,
        stages=tuple(
            StagePlan(
                machines=tuple(_share(problem, stage.device_type, node, devices) for node, devices in taken),
                data=stage.data,
                tensor=stage.tensor,
                layer_share=share,
            )
            for stage, share, taken in zip(layout.stages, shares, placed.stages, strict=True)
        ),
    )


def _share(problem: Problem, device_type: str, node: Node, devices: tuple[int, ...]) -> MachineShare:
    kind = problem.topology.types[device_type].kind
    return MachineShare(machine=node.machine, device_type=device_type, kind=kind, devices=node.indices(devices))


def _replicas(problem: Problem, placed: Placed) -> tuple[ReplicaPlan, ...]:
    return tuple(
        ReplicaPlan(
            slot=slot,
            **dict(_share(problem, c.device_type, node, devices)),
            tensor_parallel=c.tensor,
            concurrency=c.concurrency,
            layout=c.name,
            tokens_per_s=c.tokens_per_s,
            latency_s=c.latency_s,
        )
        for slot, (c, node, devices) in enumerate(placed.replicas)
    )


def _machines(problem: Problem, placed: Placed) -> tuple[MachinePlan, ...]:
    training = {node.name: len(devices) for stage in placed.stages for node, devices in stage}
    rollout: dict[str, int] = {}
    for column, node, _ in placed.replicas:
        rollout[node.name] = rollout.get(node.name, 0) + column.devices
    return tuple(
        MachinePlan(
            name=n.name,
            device_type=n.type_name,
            devices=n.devices,
            training=training.get(n.name, 0),
            rollout=rollout.get(n.name, 0),
        )
        for n in problem.topology.nodes
    )


def _memory(problem: Problem, placed: Placed) -> dict[str, MemoryPlan]:
    parts: dict[str, MemoryPlan] = {}
    for i, memory in enumerate(problem.training.memory(placed.training.layout)):
        parts[f"training stage {i}"] = _memory_plan("train", memory)
    for column, _, _ in placed.replicas:
        memory = serving_memory(problem.model, problem.topology.types[column.device_type], column.tensor)
        parts[column.name] = _memory_plan("rollout", memory)
    return parts


def _memory_plan(role: str, memory: Memory) -> MemoryPlan:
    return MemoryPlan(role=role, **asdict(memory))


def read_plan(path: Path) -> ClusterPlan:
    """Read a plan file.

    Raises:
        UserError: missing, unreadable, or not a plan.
    """
    try:
        return ClusterPlan.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise PlanError(f"There is no plan file {path}: write one with $write_plan.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The plan file {path} cannot be read: {error}.") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "the file"
        raise UserError(f"{path} is no plan: {where}: {fault['msg'].lower()}.") from None
