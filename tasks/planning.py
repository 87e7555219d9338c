"""Plans made from an experiment: for this machine, as `rl` runs them, and for a described cluster."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import Field

from planners.costs.sync import SyncMode
from planners.errors import PlanError, UserError
from planners.hardware.machine import Machine
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import Topology, discovered
from planners.plan.explain import budget_curve, explain
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import shown_steps, with_simulated_step
from planners.search.columns import Problem, TrainingWish
from planners.search.make import Goal, Mode, check_goal, make_plan
from planners.search.next_device import MOST_DEVICES, memory_remedy, next_device_gains, what_if_gain
from planners.search.this_machine import plan_machine
from planners.sections import Section
from planners.workload.model import ELEMENT_BYTES, read_model
from tasks.config.experiment import Experiment
from tasks.config.trees import read_cluster
from tasks.models.prepare import read_sizes
from tasks.wishes import (
    check_type,
    demand_for,
    gpu_memory_bytes,
    micro_batch_tokens_for,
    usable_devices,
    wish_for,
)

_CURVE = (0.25, 0.5, 0.75, 1.0)
NAMES = {
    "train_type": "planner.train_type",
    "train_devices": "planner.train_devices",
    "zero_stage": "planner.zero_stage",
    "micro_batch_tokens": "planner.micro_batch_tokens",
    "minibatches": "optimizer.minibatches",
    "max_context": "model.max_context",
    "what_if": "--what-if",
    "write_plan": "`hexflow plan … --json FILE`",
}
"""What a person calls the planner's choices: keys of the experiment, and of what is beside it the flags."""


@contextmanager
def in_keys() -> Iterator[None]:
    """Faults of the planner leave it with the names that a person knows."""
    try:
        yield
    except PlanError as error:
        raise error.called(NAMES) from None


def plan_run(
    experiment: Experiment, machine: Machine, profiles: Mapping[str, DeviceProfile], model_path: Path
) -> ClusterPlan:
    """The plan of a run: here it starts, and nobody else makes one.

    The devices that the experiment may use are planned at their measured rates, under its wishes. Answers are as long
    as its `workload.response_lengths` say; without them, as the longest mean that a profile saw; without that,
    `workload.max_new_tokens`.

    Args:
        experiment: the run's.
        machine: the devices; their order does not matter.
        profiles: one per device type that may be used, by name.
        model_path: the prepared model.

    Raises:
        UserError: too few devices, a device type without a profile, a wish that leaves no plan, or a model that does
            not fit.
    """
    usable = usable_devices(experiment, machine)
    for name in usable.count_by_type():
        if name not in profiles:
            raise UserError(
                f"Device type '{name}' has no profile for this model: run `hexflow prepare EXPERIMENT` first."
            )
    seen = [tokens for name in usable.count_by_type() if (tokens := profiles[name].answer_tokens) is not None]
    model = read_model(model_path, ELEMENT_BYTES[experiment.model.dtype])
    tokens = micro_batch_tokens_for(experiment, model, gpu_memory_bytes(experiment, usable))
    problem = Problem(
        discovered(machine.name, [usable], profiles),
        model,
        demand_for(experiment, tokens, max(seen, default=None)),
        profiles=profiles,
        training_wish=wish_for(experiment),
    )
    with in_keys():
        return plan_machine(problem)


class ClusterWish(Section):
    """A described cluster and what is wanted of it."""

    file: str = Field(description="Cluster file, YAML; an absolute path.")
    mode: Mode = Field(default="joint", description="How to plan.")
    sync_mode: SyncMode = Field(default="storage", description="How weights reach the replicas.")
    what_if: bool = Field(default=False, description="Allow layouts and sync modes that do not run yet.")
    budget_usd_per_h: float | None = Field(default=None, description="Rent at most this much.")
    target_tokens_per_s: float | None = Field(default=None, description="Rent for this throughput, cheaply.")


@dataclass(frozen=True)
class ClusterStudy:
    """A plan and what it was made from."""

    plan: ClusterPlan
    problem: Problem
    goal: Goal

    def explain(self) -> str:
        """Why this split; for a given cluster also what one more device of each type would bring."""
        plan, problem, budget = self.plan, self.problem, self.goal.budget_usd_per_h
        large = shown_steps(plan.demand) is None  # then each question takes as long as the plan itself
        if plan.mode != "joint" or budget or self.goal.target_tokens_per_s or large:
            return explain(plan, budget_usd_per_h=budget)
        idle = any(m.training + m.rollout < m.devices for m in plan.machines)
        asks = idle and not problem.what_if and problem.topology.devices < MOST_DEVICES
        opened = what_if_gain(problem, plan) if asks else None
        words = explain(plan, next_device_gains(problem, plan), opened=opened, names=NAMES)
        return "\n".join([words, *memory_remedy(problem, plan, NAMES)])

    def budget_curve(self) -> list[tuple[float, ClusterPlan]]:
        """The best plan for quarters of what the whole cluster costs, in USD/h; budgets that buy none are left out."""
        whole = sum(node.device.usd_per_h * node.devices for node in self.problem.topology.nodes)
        return list(budget_curve(self.problem, [share * whole for share in _CURVE]))


def study_cluster(
    experiment: Experiment,
    wish: ClusterWish,
    tell: Callable[[str], object] = lambda what: None,
) -> ClusterStudy:
    """Plan an experiment for a cluster file, on the device types that it may use.

    What it says about trainer and replicas is kept to, unless what-if opens layouts that it has no words for.

    Args:
        experiment: names the model and the workload.
        wish: the cluster, and what is wanted of it.
        tell: is called with what is done next.

    Raises:
        UserError: bad input, nothing fits, or the wish cannot be met.
    """
    topology = _allowed(read_cluster(Path(wish.file)), experiment.cluster.device_types)
    goal = Goal(wish.mode, wish.budget_usd_per_h, wish.target_tokens_per_s)
    check_goal(topology, goal)
    asked = TrainingWish() if wish.what_if else wish_for(experiment)
    if asked.device_type is not None:
        check_type(asked.device_type, topology.counts, "planner.train_type", f"cluster {topology.name}")
    model = read_sizes(experiment.model)
    gpus = [t for t in topology.types.values() if t.kind == "cuda" and asked.device_type in (None, t.name)]
    tokens = micro_batch_tokens_for(experiment, model, [round(device.memory_bytes) for device in gpus])
    demand = demand_for(experiment, tokens)
    if wish.what_if:
        demand = replace(demand, concurrency=None)
    tell(f"planning {topology.devices:,} devices")
    with in_keys():
        problem = Problem(topology, model, demand, what_if=wish.what_if, sync_mode=wish.sync_mode, training_wish=asked)
        plan = make_plan(problem, goal)
    tell("simulating the plan")
    return ClusterStudy(with_simulated_step(plan), problem, goal)


def _allowed(topology: Topology, device_types: list[str] | None) -> Topology:
    """The cluster with only the device types that may be used."""
    for name in device_types or ():
        check_type(name, topology.counts, "cluster.device_types", f"cluster {topology.name}")
    kinds = topology.counts if device_types is None else device_types
    return topology.restricted({node.name: node.devices for node in topology.nodes if node.type_name in kinds})
