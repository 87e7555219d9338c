"""The two rules that keep every trained token within the staleness bound. The ledger and the simulator both use them.

Policy version v is the model after v training steps. Step i trains on version i and publishes i + 1. A group's version
is that of its oldest trained token, its deadline the last step that may consume it: version + η. Then

- *admission* (AReaL, arXiv 2505.24298, Eq 3, with groups as the unit and the version the replica has loaded): the
  n-th group is begun only while ⌊(n − 1)/B⌋ ≤ loaded version + η;
- *consumption*: step i takes finished groups so long as, for every k ≥ i, at most (k − i)·B groups whose deadline is k
  or earlier are left for later steps; otherwise it waits for the ones that must come first.

Together they keep this invariant: without failures a group is never past its deadline when it is consumed, and a step
that waits is waiting for a group that is being generated.
"""

from bisect import insort
from collections.abc import Sequence


def may_lease(groups_out: int, loaded_version: int, prompts_per_step: int, max_staleness: int) -> bool:
    """Whether one more group may be begun by a replica that has `loaded_version`.

    Args:
        groups_out: groups leased, generated, scored or consumed in this lineage, without the one asked for; dropped
            ones do not count, so that their place is given out again.
        loaded_version: policy version that the asking replica generates with.
        prompts_per_step: B.
        max_staleness: η.
    """
    return groups_out // prompts_per_step <= loaded_version + max_staleness


def choose_groups(
    finished: Sequence[tuple[int, int]], unfinished_deadlines: Sequence[int], step: int, prompts_per_step: int
) -> list[int] | None:
    """Groups that `step` consumes, oldest deadline first, or None if it has to wait.

    Taking the earliest deadlines leaves the fewest urgent groups behind, so if this choice breaks the rule every other
    choice does.

    Args:
        finished: (group id, deadline) of the groups that could be consumed now; none is past its deadline.
        unfinished_deadlines: deadlines of the groups still being generated or scored.
        step: i, the step that asks.
        prompts_per_step: B.
    """
    if len(finished) < prompts_per_step:
        return None
    by_deadline = sorted(finished, key=lambda group: (group[1], group[0]))
    chosen, left = by_deadline[:prompts_per_step], by_deadline[prompts_per_step:]
    deadlines = [deadline for _, deadline in left]
    for deadline in unfinished_deadlines:
        insort(deadlines, deadline)
    if not leaves_feasible(deadlines, step, prompts_per_step):
        return None
    return [group_id for group_id, _ in chosen]


def leaves_feasible(sorted_deadlines: Sequence[int], step: int, prompts_per_step: int) -> bool:
    """Whether the groups left after `step` can all be consumed in time by the steps after it."""
    return all(rank <= (deadline - step) * prompts_per_step for rank, deadline in enumerate(sorted_deadlines, start=1))
