"""The plan of a machine as it stands: the joint planner on its measured devices, and what the runtime starts of it.

A run today takes one machine. Its devices are planned at their measured rates (`planners.search.columns` says which
layouts run), every device type that may be used has to have a profile, and what a person has decided is kept to.
"""

from dataclasses import replace

from planners.errors import UserError
from planners.plan.explain import explain
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import with_simulated_step
from planners.search.columns import Problem
from planners.search.make import FEW_DEVICES, Goal, make_plan
from planners.search.next_device import ASK_LIMIT_S, NEGLIGIBLE


def plan_machine(problem: Problem) -> ClusterPlan:
    """The fastest plan for measured devices of a machine, simulated and explained.

    Raises:
        UserError: a wish that leaves no plan, or a model that does not fit.
    """
    plan = with_simulated_step(make_plan(problem))
    words = "\n".join([explain(plan), *_next_devices(plan, problem), *_cautions(plan)])
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


def _next_devices(plan: ClusterPlan, problem: Problem) -> list[str]:
    """A sentence per type on what one more device of it in this machine would change.

    None where there are many devices, of which one changes little, nor where the solver finds no answer in time.
    """
    topology = problem.topology
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
            better = make_plan(problem.on(grown), Goal(time_limit_s=ASK_LIMIT_S))
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
