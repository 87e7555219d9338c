"""Plans made from an experiment: for this machine, as `rl` runs them, and for a described cluster."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planners.hardware.machine import Machine
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import Topology, read_cluster
from planners.plan.explain import budget_curve, explain
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import shown_steps, with_simulated_step
from planners.search.columns import TrainingWish
from planners.search.make import check_wishes, make_plan
from planners.search.next_device import MOST_DEVICES, memory_remedy, next_device_gains, what_if_gain
from planners.search.this_machine import check_type, plan_machine
from planners.workload.demand import Demand, demand_of
from planners.workload.model import ELEMENT_BYTES, Model, read_model
from tasks.config.experiment import Experiment
from tasks.config.settings import Settings
from tasks.models.prepare import prepare_model

_CURVE = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ClusterStudy:
    """A plan and what it was made from; `wishes` are the further arguments of `planners.search.make.make_plan`."""

    plan: ClusterPlan
    topology: Topology
    model: Model
    demand: Demand
    wishes: dict[str, Any]

    def explain(self) -> str:
        """Why this split; for a given cluster also what one more device of each type would bring."""
        budget = self.wishes.get("budget_usd_per_h")
        what = (self.topology, self.model, self.demand)
        large = shown_steps(self.plan.demand) is None  # then each question takes as long as the plan itself
        if self.plan.mode != "joint" or budget or self.wishes.get("target_tokens_per_s") or large:
            return explain(self.plan, budget_usd_per_h=budget)
        how = {key: self.wishes[key] for key in ("what_if", "training_wish") if key in self.wishes}
        idle = any(m.training + m.rollout < m.devices for m in self.plan.machines)
        asks = idle and not how.get("what_if") and self.topology.devices < MOST_DEVICES
        return "\n".join(
            [
                explain(
                    self.plan,
                    next_device_gains(*what, self.plan, **how),
                    opened=what_if_gain(*what, self.plan) if asks else None,
                ),
                *memory_remedy(*what, self.plan, **how),
            ]
        )

    def budget_curve(self) -> list[tuple[float, ClusterPlan]]:
        """The best plan for quarters of what the whole cluster costs, in USD/h; budgets that buy none are left out."""
        whole = sum(node.device.usd_per_h * node.devices for node in self.topology.nodes)
        how = {key: self.wishes[key] for key in ("what_if", "sync_mode", "training_wish") if key in self.wishes}
        budgets = [share * whole for share in _CURVE]
        return list(budget_curve(self.topology, self.model, self.demand, budgets, **how))


def plan_here(
    experiment: Experiment,
    machine: Machine,
    profiles: Mapping[str, DeviceProfile],
    model_path: Path,
    train_ranks: int | None = None,
) -> ClusterPlan:
    """The fastest plan of this machine under the measured rates and the experiment's wishes.

    A run that goes on from a checkpoint needs the `train_ranks` that wrote it.

    Raises:
        UserError: too few devices, a wish that leaves no plan, or a model that does not fit.
    """
    return plan_machine(
        machine,
        profiles,
        read_model(model_path, ELEMENT_BYTES[experiment.model.dtype]),
        experiment.workload,
        minibatches=experiment.algorithm.minibatches,
        micro_batch_tokens=experiment.algorithm.tokens_per_micro_batch,
        max_context=experiment.model.max_context,
        concurrency=experiment.rollout.concurrency,
        zero_stage=experiment.algorithm.zero_stage,
        train_type=experiment.planner.train_type,
        train_devices=experiment.planner.train_devices,
        train_ranks=train_ranks,
        device_types=experiment.cluster.device_types,
    )


def study_cluster(
    experiment: Experiment,
    cluster: Path,
    settings: Settings,
    *,
    tell: Callable[[str], object] = lambda what: None,
    **wishes: Any,
) -> ClusterStudy:
    """Plan an experiment for a cluster file, on the device types that it may use.

    What it says about trainer and replicas is kept to, unless what-if opens layouts that it has no words for.

    Args:
        experiment: names the model and the workload.
        cluster: the cluster file.
        settings: where prepared models lie.
        tell: is called with what is done next.
        wishes: further arguments of `planners.search.make.make_plan`.

    Raises:
        UserError: bad input, nothing fits, or the wish cannot be met.
    """
    topology = _allowed(read_cluster(cluster), experiment.cluster.device_types)
    budget, target = (wishes.get(key) for key in ("budget_usd_per_h", "target_tokens_per_s"))
    check_wishes(topology, wishes.get("mode", "joint"), budget, target)
    demand, planner = demand_for(experiment), experiment.planner
    if wishes.get("what_if"):
        demand = replace(demand, concurrency=None)
    else:
        if planner.train_type is not None:
            check_type(planner.train_type, topology.counts, "planner.train_type", f"cluster {topology.name}")
        wishes["training_wish"] = TrainingWish(
            planner.train_type, planner.train_devices, experiment.algorithm.zero_stage
        )
    # After the checks, since it may take a minute.
    source = Path(experiment.model.source)
    tell("preparing the model")
    # A plan needs the model's sizes only, so a directory without weights will do.
    directory = source if source.is_dir() else prepare_model(experiment.model, settings)
    model = read_model(directory, ELEMENT_BYTES[experiment.model.dtype])
    tell(f"planning {topology.devices:,} devices")
    plan = make_plan(topology, model, demand, **wishes)
    tell("simulating the plan")
    return ClusterStudy(with_simulated_step(plan), topology, model, demand, wishes)


def demand_for(experiment: Experiment) -> Demand:
    """What a step of the experiment asks, where no answers were measured."""
    return demand_of(
        experiment.workload,
        experiment.algorithm.minibatches,
        micro_batch_tokens=experiment.algorithm.tokens_per_micro_batch,
        max_context=experiment.model.max_context,
        concurrency=experiment.rollout.concurrency,
    )


def _allowed(topology: Topology, device_types: list[str] | None) -> Topology:
    """The cluster with only the device types that may be used."""
    for name in device_types or ():
        check_type(name, topology.counts, "cluster.device_types", f"cluster {topology.name}")
    kinds = topology.counts if device_types is None else device_types
    return topology.restricted({node.name: node.devices for node in topology.nodes if node.type_name in kinds})
