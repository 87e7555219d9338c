"""The plan of a machine as it stands: the joint planner on its measured devices, and what the runtime starts of it.

A run today takes one machine. Its devices are planned at their measured rates (`planners.search.columns` says which
layouts run), every device type that may be used has to have a profile, and what a person has decided is kept to.
"""

import difflib
from collections.abc import Collection, Mapping
from dataclasses import replace

from planners.errors import UserError
from planners.hardware.machine import Machine
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import Topology, discovered
from planners.plan.explain import explain
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import with_simulated_step
from planners.search.columns import TrainingWish
from planners.search.make import FEW_DEVICES, make_plan
from planners.search.next_device import ASK_LIMIT_S, NEGLIGIBLE
from planners.workload.demand import Demand, demand_of
from planners.workload.model import Model
from planners.workload.step import Workload


def plan_machine(
    machine: Machine,
    profiles: Mapping[str, DeviceProfile],
    model: Model,
    workload: Workload,
    *,
    minibatches: int = 1,
    micro_batch_tokens: int = Demand.micro_batch_tokens,
    max_context: int | None = None,
    concurrency: int | None = None,
    zero_stage: int | None = None,
    train_type: str | None = None,
    train_devices: int | None = None,
    train_ranks: int | None = None,
    device_types: Collection[str] | None = None,
) -> ClusterPlan:
    """The fastest plan that can be started on this machine, explained.

    Args:
        machine: the devices; their order does not matter.
        profiles: one per device type, by type name.
        model: what is trained.
        workload: sizes of a step and the staleness bound. Answers are as long as its `response_lengths` say; without
            them, as the longest mean that a profile saw; without that, `max_new_tokens`, the upper bound.
        minibatches: optimiser updates of a step.
        micro_batch_tokens: what the trainer packs groups into.
        max_context: longest prompt plus answer that replicas are started for; None: what the workload allows.
        concurrency: answers in flight per replica; None: the planner chooses.
        zero_stage: DeepSpeed ZeRO stage of the trainer; None: the planner chooses.
        train_type: train on this type only; None: any.
        train_devices: train on exactly this many devices; None: any number.
        train_ranks: train with exactly this many ranks, as the checkpoint that is gone on from; None: any number.
        device_types: use only these types; None: all.

    Raises:
        UserError: fewer than two devices, an unknown type, a missing profile, a wish that leaves no plan, or a model
            that does not fit.
    """
    chosen = check_devices(machine, train_type=train_type, train_devices=train_devices, device_types=device_types)
    for name in chosen.count_by_type():
        if name not in profiles:
            raise UserError(
                f"Device type '{name}' has no profile for this model: run `hexflow prepare EXPERIMENT` first."
            )
    topology = discovered(machine.name, [chosen], profiles)
    seen = [tokens for name in topology.types if (tokens := profiles[name].answer_tokens) is not None]
    demand = demand_of(
        workload,
        minibatches,
        max(seen, default=None),
        micro_batch_tokens=micro_batch_tokens,
        max_context=max_context,
        concurrency=concurrency,
    )
    wish = TrainingWish(train_type, train_devices, zero_stage, train_ranks)
    plan = with_simulated_step(make_plan(topology, model, demand, profiles=profiles, training_wish=wish))
    words = "\n".join([explain(plan), *_next_devices(plan, topology, model, demand, profiles, wish), *_cautions(plan)])
    return plan.model_copy(update={"explanation": words})


def require_startable(plan: ClusterPlan) -> None:
    """Refuse to start a plan that the runtime has no actors for.

    Raises:
        UserError: it uses layouts or a sync mode that do not run yet, or several machines.
    """
    machines = {share.machine for share in plan.shares}
    if plan.what_if or len(plan.trainer.stages) > 1 or len(machines) > 1:
        raise UserError(
            f"The plan for {plan.cluster} cannot be started: a run takes one machine and the layouts that run today, "
            f"but it uses {', '.join(sorted(machines))}{' and is what-if' if plan.what_if else ''}."
        )


def check_devices(
    machine: Machine,
    *,
    train_type: str | None = None,
    train_devices: int | None = None,
    device_types: Collection[str] | None = None,
) -> Machine:
    """The machine with only the devices that may be used; its arguments are those of `plan_machine`.

    Raises:
        UserError: fewer than two devices, an unknown type, or a wish that leaves no plan.
    """
    chosen = _choose_devices(machine, device_types)
    _check_training(chosen.count_by_type(), train_type, train_devices)
    return chosen


def _choose_devices(machine: Machine, device_types: Collection[str] | None) -> Machine:
    for name in sorted(device_types or ()):
        check_type(name, machine.count_by_type(), "cluster.device_types", "this machine")
    devices = [d for d in machine.devices if device_types is None or d.device_type in device_types]
    if len(devices) < 2:
        found = ", ".join(f"{d.device_type} {d.index}" for d in devices) or "none"
        raise UserError(
            f"A run needs at least 2 devices, one to generate and one to train, found {len(devices)} on "
            f"{machine.name}: {found}. Allow more types in cluster.device_types, or label cores as devices with "
            "HEXFLOW_DEVICES, as in cpu=0,1."
        )
    return Machine(name=machine.name, devices=tuple(devices))


def check_type(name: str, counts: Mapping[str, int], key: str, where: str) -> None:
    """Refuse a device type that is not there.

    Raises:
        UserError: `key` of the experiment names it, but `where` lacks it; the nearest is named.
    """
    if name in counts:
        return
    near = difflib.get_close_matches(name, counts, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"found: {', '.join(counts) or 'none'}"
    raise UserError(f"{key} names the device type '{name}', which {where} lacks ({hint}).")


def _check_training(counts: Mapping[str, int], train_type: str | None, train_devices: int | None) -> None:
    if train_type is not None:
        check_type(train_type, counts, "planner.train_type", "this machine")
    if train_devices is None:
        return
    types = [train_type] if train_type is not None else list(counts)
    most = min(max(counts[name] for name in types), sum(counts.values()) - 1)
    if not 1 <= train_devices <= most:
        raise UserError(
            f"planner.train_devices is {train_devices}, but between 1 and {most} can train here: training uses one "
            f"device type ({', '.join(f'{counts[name]} {name}' for name in types)}) and at least one device generates."
        )


def _next_devices(
    plan: ClusterPlan,
    topology: Topology,
    model: Model,
    demand: Demand,
    profiles: Mapping[str, DeviceProfile],
    wish: TrainingWish,
) -> list[str]:
    """A sentence per type on what one more device of it in this machine would change.

    None where there are many devices, of which one changes little, nor where the solver finds no answer in time.
    """
    if topology.devices > FEW_DEVICES:
        return []
    sentences = []
    for kind in topology.types:
        nodes = tuple(
            replace(n, devices=n.devices + 1, numbers=(*n.numbers, max(n.numbers) + 1)) if n.type_name == kind else n
            for n in topology.nodes
        )
        grown = replace(topology, nodes=nodes)
        try:
            better = make_plan(grown, model, demand, profiles=profiles, training_wish=wish, time_limit_s=ASK_LIMIT_S)
        except UserError:
            continue
        if better.step_s > (1 - NEGLIGIBLE) * plan.step_s:
            sentences.append(f"One more {kind} would change little.")
        else:
            sentences.append(f"One more {kind} would make it {better.step_s:.2f} s ({_roles(better)}).")
    return sentences


def _roles(plan: ClusterPlan) -> str:
    generating: dict[str, int] = {}
    for replica in plan.replicas:
        generating[replica.device_type] = generating.get(replica.device_type, 0) + len(replica.devices)
    (stage,) = plan.trainer.stages
    trains = f"train on {stage.devices} {stage.device_type}"
    return f"{trains}, generate on {' + '.join(f'{count} {kind}' for kind, count in sorted(generating.items()))}"


def _cautions(plan: ClusterPlan) -> list[str]:
    """Where the prediction is known to be optimistic."""
    (stage,) = plan.trainer.stages
    cores = [len(share.devices) for share in plan.shares if share.kind == "cpu"]
    sentences = []
    if any(count > 1 for count in cores):
        sentences.append("Several cores are counted as that many times one core, which is optimistic.")
    if stage.kind == "cuda" and stage.devices > 1:
        sentences.append("Several training GPUs are counted as that many times one, which is optimistic.")
    return sentences
