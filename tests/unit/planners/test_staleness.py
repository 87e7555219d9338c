"""The admission and consumption rules: over any interleaving nothing is stale and nothing deadlocks."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from planners.staleness import choose_groups, leaves_feasible, may_lease


def test_gate_opens_one_batch_per_version() -> None:
    assert [may_lease(out, 0, 4, 1) for out in (0, 7, 8)] == [True, True, False]
    assert may_lease(8, 1, 4, 1)


def test_synchronous_gate_lets_one_batch_out() -> None:
    assert may_lease(3, 0, 4, 0)
    assert not may_lease(4, 0, 4, 0)


def test_a_step_takes_the_oldest_deadlines() -> None:
    assert choose_groups([(1, 9), (2, 3), (3, 5)], [], step=3, prompts_per_step=2) == [2, 3]


def test_a_step_waits_for_an_urgent_group_in_flight() -> None:
    assert choose_groups([(1, 9), (2, 9)], [3], step=3, prompts_per_step=2) is None
    assert choose_groups([(1, 9), (2, 9)], [4], step=3, prompts_per_step=2) == [1, 2]


def test_a_step_waits_when_too_many_urgent_groups_would_be_left() -> None:
    assert choose_groups([(1, 9), (2, 9)], [4, 4, 4], step=3, prompts_per_step=2) is None


@given(st.lists(st.integers(0, 12), max_size=20), st.integers(0, 6), st.integers(1, 4))
def test_feasibility_is_the_rule_as_design_states_it(deadlines: list[int], step: int, prompts_per_step: int) -> None:
    stated = all(
        sum(deadline <= k for deadline in deadlines) <= (k - step) * prompts_per_step for k in range(step, 14)
    ) and all(deadline >= step for deadline in deadlines)
    assert leaves_feasible(sorted(deadlines), step, prompts_per_step) == stated


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    prompts_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4),
    steps=st.integers(1, 8),
    replicas=st.integers(1, 4),
    failures=st.booleans(),
)
def test_no_interleaving_is_stale_or_stuck(
    seed: int, prompts_per_step: int, max_staleness: int, steps: int, replicas: int, failures: bool
) -> None:
    """Replicas lag behind the published version at random and answers take up to 100 times longer than others."""
    rng = random.Random(seed)
    loaded = [0] * replicas
    in_flight: dict[int, tuple[int, int]] = {}  # group → (deadline, ticks left)
    finished: dict[int, int] = {}
    step = consumed = leased = 0
    for _ in range(100_000):
        if step == steps:
            break
        actions = ["load"]
        if any(_can_lease(loaded[r], in_flight, finished, consumed, prompts_per_step, max_staleness, steps)
               for r in range(replicas)):  # fmt: skip
            actions += ["lease"] * 3
        if in_flight:
            actions += ["tick"] * 3 + (["die"] if failures and rng.random() < 0.1 else [])
        unfinished = [deadline for deadline, _ in in_flight.values()]
        chosen = choose_groups(list(finished.items()), unfinished, step, prompts_per_step)
        if chosen is not None:
            actions.append("train")
        behind = [r for r in range(replicas) if loaded[r] < step]
        assert len(actions) > 1 or behind, "nothing can happen any more"
        match rng.choice(actions):
            case "load" if behind:
                replica = rng.choice(behind)
                loaded[replica] = rng.randint(loaded[replica] + 1, step)
            case "lease":
                replica = rng.randrange(replicas)
                if _can_lease(loaded[replica], in_flight, finished, consumed, prompts_per_step, max_staleness, steps):
                    in_flight[leased] = (loaded[replica] + max_staleness, rng.choice([1, 2, 100]))
                    leased += 1
            case "tick":
                group = rng.choice(list(in_flight))
                deadline, ticks = in_flight.pop(group)
                if ticks > 1:
                    in_flight[group] = (deadline, ticks - rng.randint(1, ticks - 1))
                else:
                    finished[group] = deadline
            case "die":
                in_flight.pop(rng.choice(list(in_flight)))
            case "train" if chosen is not None:
                for group in chosen:
                    assert finished.pop(group) >= step, "a stale group was consumed"
                consumed += prompts_per_step
                step += 1
                assert all(deadline >= step for deadline in finished.values()), "a finished group went stale"
    assert step == steps


def _can_lease(
    loaded_version: int,
    in_flight: dict[int, tuple[int, int]],
    finished: dict[int, int],
    consumed: int,
    prompts_per_step: int,
    max_staleness: int,
    steps: int,
) -> bool:
    out = len(in_flight) + len(finished) + consumed
    return out < steps * prompts_per_step and may_lease(out, loaded_version, prompts_per_step, max_staleness)
