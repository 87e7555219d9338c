"""The plan of the machine that a run gets equals the best of all assignments, enumerated here by other means."""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from planners.errors import UserError
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import ClusterFile, discovered, parse_cluster
from planners.plan.plan import ClusterPlan
from planners.plan.simulator import simulate
from planners.search import joint
from planners.search import this_machine as planning
from planners.search.columns import Problem, rollout_columns
from planners.search.make import Goal, make_plan
from planners.search.program import highest_rate
from planners.search.solver import minimise
from planners.search.this_machine import require_startable
from planners.workload.demand import demand_of
from planners.workload.lengths import Samples
from planners.workload.step import Workload
from tests.support.plan import TINY, gap_of, plan_for, plan_here, profile_of

Kind = Literal["cuda", "cpu"]
JOINT = Goal()
Counts = dict[tuple[str, Kind], int]
Profiles = dict[str, DeviceProfile]
Packing = dict[str, Any]
"""How the trainer cuts a step: `minibatches` and `micro_batch_tokens`."""
rates = st.integers(1, 100).map(float)


def examples(count: int) -> settings:
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def machine_of(counts: Counts, memory_bytes: int = 2**36) -> Machine:
    """Indices start at 1 and leave gaps, as a process's cores may."""
    devices = [
        Device(index=2 * index + 1, device_type=name, kind=kind, memory_bytes=memory_bytes)
        for (name, kind), count in counts.items()
        for index in range(count)
    ]
    return Machine(name="host", devices=tuple(devices))


@st.composite
def problems(draw: st.DrawFn) -> tuple[Counts, Profiles, Workload, Packing]:
    """A small machine with one or two device types, their profiles, a workload, and how a step is cut."""
    names = draw(st.sampled_from([["a"], ["a", "b"]]))
    counts: Counts = {(name, draw(st.sampled_from(["cuda", "cpu"]))): draw(st.integers(1, 3)) for name in names}
    if sum(counts.values()) < 2:
        counts = dict.fromkeys(counts, 2)
    points = st.dictionaries(st.sampled_from([1, 2, 4, 8]), rates, min_size=1)
    seconds = st.integers(0, 20).map(float)
    profiles = {name: profile_of(name, draw(points), draw(rates), draw(seconds), draw(seconds)) for name in names}
    workload = Workload(
        prompts_per_step=draw(st.integers(1, 3)),
        group_size=draw(st.integers(2, 3)),
        max_new_tokens=draw(st.integers(1, 20)),
        max_staleness=draw(st.integers(0, 3)),
        reward_s=draw(st.sampled_from([0.0, 1.5])),
        scorers=draw(st.sampled_from([None, 1, 2])),
    )
    minibatches = draw(st.integers(1, workload.prompts_per_step))
    return counts, profiles, workload, cut(minibatches, draw(st.sampled_from([1, 200, 1000])))


def cut(minibatches: int = 1, micro_batch_tokens: int = 1) -> Packing:
    return {"minibatches": minibatches, "micro_batch_tokens": micro_batch_tokens}


def busiest_share(workload: Workload, packing: Packing, ranks: int) -> float:
    """Of a step's FLOPs, the share that is on the busiest rank of each minibatch: answers are dealt one by one."""
    length, prompt = workload.max_new_tokens, workload.max_prompt_tokens
    attention = TINY.attention_flops(length * (length + 2 * prompt))
    answer = (TINY.layer_flops_per_token + TINY.head_flops_per_token) * length + attention
    waits = total = 0.0
    for k in range(packing["minibatches"]):
        groups = len(range(workload.prompts_per_step)[k :: packing["minibatches"]])
        loads = [0] * ranks
        for _ in range(groups * workload.group_size):
            loads[loads.index(min(loads))] += 1
        prompts = TINY.layer_flops_per_token * prompt
        waits += max(loads) * answer + -(-groups // ranks) * prompts
        total += sum(loads) * answer + groups * prompts
    return waits / total


def best_step_s(counts: Counts, profiles: Profiles, workload: Workload, packing: Packing) -> float:
    """Shortest step over every trainer and every way to hand out cores and groups, by brute force."""
    groups, answers = workload.prompts_per_step, workload.prompts_per_step * workload.group_size
    steps = []
    for (name, kind), count in counts.items():
        for k in range(1, count + 1):
            share = 1 / k if kind == "cpu" else busiest_share(workload, packing, k)
            train_s = answers * workload.max_new_tokens / profiles[name].training_tokens_per_s * share
            for replicas in hand_outs({**counts, (name, kind): count - k}, max(1, workload.max_staleness) * groups):
                steps.append(step_s(train_s, profiles[name].publish_s, replicas, profiles, workload))
    return min(steps)


Replica = tuple[str, int, int]
"""Device type, devices, groups in flight."""


def hand_outs(rest: Counts, limit: int) -> Iterator[list[Replica]]:
    """Every set of replicas: one process on any cores of a CPU type, one replica on each of any GPUs."""
    choices: list[list[list[Replica]]] = []
    for (name, kind), n in rest.items():
        if kind == "cpu":
            choices.append([[], *([(name, c, g)] for c in range(1, n + 1) for g in range(1, limit + 1))])
        else:
            each = itertools.combinations_with_replacement(range(limit + 1), n)
            choices.append([[(name, 1, g) for g in shares if g] for shares in each])
    for parts in itertools.product(*choices):
        replicas = [replica for part in parts for replica in part]
        if replicas and sum(g for _, _, g in replicas) <= limit:
            yield replicas


def step_s(train_s: float, publish_s: float, replicas: list[Replica], profiles: Profiles, workload: Workload) -> float:
    size, eta = workload.group_size, workload.max_staleness
    rate = [n * profiles[name].generation_rate(g * size) for name, n, g in replicas]
    latency_s = max(workload.max_new_tokens * g * size / r for (_, _, g), r in zip(replicas, rate, strict=True))
    generate_s = workload.prompts_per_step * size * workload.max_new_tokens / sum(rate)
    load_s, reward_s = max(profiles[name].load_s for name, _, _ in replicas), workload.reward_s
    scoring_s = workload.prompts_per_step * reward_s / workload.scorers if workload.scorers else 0.0
    sides_s = max(train_s + publish_s, generate_s + load_s, scoring_s)
    batch_s = reward_s + max(generate_s, latency_s, scoring_s)
    return max(sides_s, load_s + (train_s + publish_s + batch_s) / (eta + 1))


SLOW_LOADS = (
    {("a", "cuda"): 3, ("b", "cuda"): 3},
    {
        "a": profile_of("a", {4: 82.0, 8: 63.0}, 38.0, publish_s=14.0, load_s=11.0),
        "b": profile_of("b", {1: 63.0, 2: 97.0, 4: 20.0, 8: 3.0}, 47.0, publish_s=3.0, load_s=13.0),
    },
    Workload(prompts_per_step=3, group_size=3, max_new_tokens=20, max_staleness=2),
    cut(),
)
"""Loading takes longer than training and decides how long an answer may take."""
BATCHED: dict[int, float] = {4: 20.0, 8: 30.0, 16: 45.0, 32: 55.0}
MANY_CORES = (
    {("a", "cpu"): 9},
    {"a": profile_of("a", BATCHED, 40.0, publish_s=0.5)},
    Workload(prompts_per_step=3, group_size=4, max_new_tokens=20, max_staleness=2),
    cut(),
)
"""Of the fastest batches the latency decides."""
TWO_KINDS_OF_CORES = (
    {("a", "cpu"): 4, ("b", "cpu"): 3},
    {"a": profile_of("a", BATCHED, 40.0), "b": profile_of("b", {4: 9.0, 16: 30.0}, 15.0, publish_s=2.0)},
    Workload(prompts_per_step=2, group_size=4, max_new_tokens=20, max_staleness=2),
    cut(),
)


@examples(60)
@example(SLOW_LOADS)
@example(MANY_CORES)
@example(TWO_KINDS_OF_CORES)
@given(problems())
def test_the_plan_is_the_best_there_is(problem: tuple[Counts, Profiles, Workload, Packing]) -> None:
    counts, profiles, workload, packing = problem
    plan = plan_here(machine_of(counts), profiles, workload, **packing)
    best = best_step_s(counts, profiles, workload, packing)
    assert plan.step_s == pytest.approx(best, rel=1e-6)
    assert gap_of(plan) <= 1e-6
    check_can_start(plan, machine_of(counts), workload)


def check_can_start(plan: ClusterPlan, machine: Machine, workload: Workload) -> None:
    """One trainer on one type; a replica per GPU, one process per CPU type; whole groups, within the gate."""
    require_startable(plan)
    assert not plan.what_if
    there = {(d.device_type, d.index): d.kind for d in machine.devices}
    held = [(p.device_type, index) for p in plan.shares for index in p.devices]
    assert len(held) == len(set(held))
    assert all(there[d] == p.kind for p in plan.shares for d in ((p.device_type, i) for i in p.devices))
    assert {p.machine for p in plan.shares} == {machine.name}
    assert [replica.slot for replica in plan.replicas] == list(range(len(plan.replicas)))
    assert all(replica.tensor_parallel == replica.ranks == 1 for replica in plan.replicas)
    processes = [replica.device_type for replica in plan.replicas if replica.kind == "cpu"]
    assert len(processes) == len(set(processes))
    concurrency = [replica.concurrency for replica in plan.replicas]
    assert all(c > 0 and c % workload.group_size == 0 for c in concurrency)
    assert sum(concurrency) <= max(1, workload.max_staleness) * workload.prompts_per_step * workload.group_size


@examples(20)
@given(problems(), st.data())
def test_one_more_device_of_a_type_is_never_worse(
    problem: tuple[Counts, Profiles, Workload, Packing], data: st.DataObject
) -> None:
    counts, profiles, workload, packing = problem
    grown = data.draw(st.sampled_from(list(counts)))
    more = {key: count + (key == grown) for key, count in counts.items()}
    before = plan_here(machine_of(counts), profiles, workload, **packing)
    after = plan_here(machine_of(more), profiles, workload, **packing)
    assert after.step_s <= before.step_s * (1 + 1e-6)


@examples(10)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_devices_changes_nothing(
    problem: tuple[Counts, Profiles, Workload, Packing], random: Random
) -> None:
    counts, profiles, workload, packing = problem
    machine = machine_of(counts)
    shuffled = list(machine.devices)
    random.shuffle(shuffled)
    machines = (machine, Machine(name="host", devices=shuffled))
    plans = [plan_here(m, profiles, workload, **packing) for m in machines]
    first, second = (plan.model_copy(update={"solve_s": 0.0}) for plan in plans)
    assert first == second


@examples(40)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).filter(lambda sizes: 2 <= sum(sizes) <= 8),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([0.001, 0.1]),
    st.sampled_from([0.0, 0.02]),
)
def test_cores_of_several_machines_form_a_process_each(
    sizes: list[int], prompts: int, staleness: int, write_gb_per_s: float, usd_per_h: float
) -> None:
    """On a described cluster, against exhaustive search; a process never spans machines, nor two stand on one."""
    cores = {"device_type": "cpu", "usd_per_h": usd_per_h}
    groups = [{**cores, "name": f"m{i}", "devices": size} for i, size in enumerate(sizes)]
    tree = {"name": "cores", "machines": groups, "links": [{"between": ["cpu", "cpu"], "gb_per_s": 1}]}
    topology = parse_cluster(ClusterFile.model_validate({**tree, "storage": {"write_gb_per_s": write_gb_per_s}}))
    demand = demand_of(Workload(prompts_per_step=prompts, group_size=2, max_staleness=staleness))
    joint, best = (plan_for(topology, TINY, demand, mode=mode) for mode in ("joint", "exhaustive"))
    assert joint.step_s == pytest.approx(best.step_s, rel=1e-5)
    for plan in (joint, best):
        machines = [replica.machine for replica in plan.replicas]
        assert len(machines) == len(set(machines))
        assert all(m.training + m.rollout <= m.devices for m in plan.machines)


def laptop(cores: int = 2, workload: Workload | None = None, **wishes: Any) -> ClusterPlan:
    profiles = {"cpu": profile_of("cpu", {8: 20.0, 64: 40.0}, 64.0, publish_s=1.5, load_s=0.8)}
    machine = machine_of({("cpu", "cpu"): cores})
    return plan_here(machine, profiles, workload or Workload(), **wishes)


def test_the_laptop_by_hand() -> None:
    """Publishing stands on the trainer's path, loading on the replica's; neither side pays for the other's."""
    plan = laptop()
    assert plan.trainer.machines[0].devices == (1,)
    assert [(r.devices, r.concurrency) for r in plan.replicas] == [((3,), 64)]
    assert (plan.train_s, plan.rollout_s) == pytest.approx((8.0, 12.8))
    assert (plan.sync_s, plan.sync_train_s, plan.sync_rollout_s) == pytest.approx((2.3, 1.5, 0.8))
    assert plan.step_s == pytest.approx(13.6)
    assert plan.throughput_tokens_per_s == pytest.approx(512 / 13.6)
    assert "Generation limits: 13.60 s a step against 9.50 s of training" in plan.explanation
    assert "One more cpu would make it 9.50 s (train on 1 cpu, generate on 2 cpu)." in plan.explanation
    assert "below the best there is" in plan.explanation
    assert "optimistic" not in plan.explanation


def test_latencies_of_cores_cost_no_binaries_and_no_further_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process generates, so times and latencies are exact from the start: one solve, and one to be tidy."""
    integers = []

    def counted(program: Any, *how: Any) -> Any:
        integers.append({v.name[0] for v in program.variables() if v.cat == "Integer"})
        return minimise(program, *how)

    monkeypatch.setattr(joint, "minimise", counted)
    _, profiles, workload, _ = MANY_CORES
    topology = discovered("host", [machine_of({("a", "cpu"): 20})], profiles)
    plan = plan_for(topology, TINY, demand_of(workload), profiles=profiles)
    assert integers == [{"y", "z"}] * 2
    assert gap_of(plan) < 1e-3
    assert sum(m.training + m.rollout for m in plan.machines) == 20


def test_the_highest_rate_counts_every_core_once() -> None:
    _, profiles, workload, _ = MANY_CORES
    problem = Problem(
        discovered("host", [machine_of({("a", "cpu"): 9})], profiles), TINY, demand_of(workload), profiles=profiles
    )
    columns = rollout_columns(problem)
    assert highest_rate(problem, columns) == pytest.approx(max(c.tokens_per_s for c in columns))


def test_no_answer_for_one_more_device_leaves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(problem: Problem, goal: Goal = JOINT) -> ClusterPlan:
        if problem.topology.devices > 2:
            assert goal.time_limit_s <= 10
            raise UserError("The solver found no plan.")
        return make_plan(problem, goal)

    monkeypatch.setattr(planning, "make_plan", slow)
    assert laptop().step_s == pytest.approx(13.6)
    assert "One more" not in laptop().explanation


@pytest.mark.parametrize(("cores", "asked"), [(16, 2), (17, 1)])
def test_one_more_of_many_devices_is_not_asked_for(cores: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = []

    def counted(problem: Problem, goal: Goal = JOINT) -> ClusterPlan:
        problems.append(problem)
        return make_plan(problem, goal)

    monkeypatch.setattr(planning, "make_plan", counted)
    laptop(cores)
    assert len(problems) == asked


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_laptop_is_simulated_as_it_is_planned(staleness: int) -> None:
    plan = laptop(workload=Workload(max_staleness=staleness))
    expected_s = {0: 8.0 + 1.5 + 12.8 + 0.8, 1: 13.6, 2: 13.6}[staleness]
    assert plan.step_s == pytest.approx(expected_s)
    assert simulate(plan, steps=40).step_s == pytest.approx(expected_s, rel=0.02)
    assert plan.simulated_step_s == pytest.approx(expected_s, rel=0.02)
    assert f"A simulation, with lengths drawn at random, takes {plan.simulated_step_s:.2f} s" in plan.explanation


def test_expected_answers_shorten_the_step() -> None:
    expected = Workload(response_lengths=Samples(tokens=(2, 6)))
    assert laptop(workload=expected).rollout_s == pytest.approx(6.4)


def test_scoring_goes_on_beside_and_limits_only_where_scorers_are_few() -> None:
    alone_s = laptop(workload=Workload()).step_s
    assert laptop(workload=Workload(reward_s=5.0)).step_s == pytest.approx(alone_s)
    few = laptop(workload=Workload(reward_s=5.0, scorers=2))
    assert (few.step_s, few.limited_by) == (pytest.approx(8 * 5.0 / 2), "scoring")
    assert simulate(few, steps=40).step_s == pytest.approx(few.step_s, rel=0.02)
    assert "Scoring limits: 20.00 s a step with 2 groups at once" in few.explanation


def test_the_mean_answer_that_was_measured_is_expected() -> None:
    profile = profile_of("cpu", {8: 20.0, 64: 40.0}, 64.0).model_copy(update={"answer_tokens": 2.0})
    plan = plan_here(machine_of({("cpu", "cpu"): 2}), {"cpu": profile}, Workload())
    assert (plan.train_s, plan.rollout_s) == pytest.approx((2.0, 3.2))


def test_cores_of_a_role_form_one_process() -> None:
    plan = laptop(cores=4)
    assert plan.trainer.machines[0].devices == (1, 3)
    assert [replica.devices for replica in plan.replicas] == [(5, 7)]
    assert plan.trainer.ranks == 1
    assert "optimistic" in plan.explanation
    assert {part.role for part in plan.memory.values()} == {"train", "rollout"}


def test_gpus_form_one_replica_each_and_both_types_are_used() -> None:
    """Whatever does not train helps to generate, although training limits."""
    profiles = {
        "fast": profile_of("fast", {8: 10.0, 64: 30.0}, 1000.0),
        "slow": profile_of("slow", {8: 10.0, 64: 30.0}, 10.0),
    }
    plan = plan_here(machine_of({("fast", "cuda"): 2, ("slow", "cuda"): 2}), profiles, Workload())
    assert (plan.trainer.machines[0].device_type, plan.trainer.machines[0].devices) == ("fast", (1,))
    assert sorted((r.device_type, r.devices) for r in plan.replicas) == [
        ("fast", (3,)),
        ("slow", (1,)),
        ("slow", (3,)),
    ]


def test_what_limits_not_is_used_all_the_same() -> None:
    profiles = {"gpu": profile_of("gpu", {2: 1000.0}, 1.0)}
    plan = plan_here(machine_of({("gpu", "cuda"): 4}), profiles, Workload(), train_devices=1)
    assert plan.limited_by == "training"
    assert len(plan.replicas) == 3


def test_a_group_goes_to_the_replica_that_gains_most() -> None:
    profiles = {"good": profile_of("good", {2: 30.0, 4: 50.0}, 1.0), "poor": profile_of("poor", {2: 10.0}, 1000.0)}
    workload = Workload(prompts_per_step=2, group_size=2, max_staleness=1)
    plan = plan_here(machine_of({("good", "cuda"): 1, ("poor", "cuda"): 2}), profiles, workload)
    assert [(r.device_type, r.concurrency) for r in plan.replicas] == [("good", 4)]
    assert "1 device is not needed" in plan.explanation


def test_wishes_are_kept() -> None:
    assert laptop(cores=4, train_devices=3).trainer.machines[0].devices == (1, 3, 5)
    profiles = {name: profile_of(name, {8: 10.0}, 10.0) for name in ("a", "b")}
    machine = machine_of({("a", "cpu"): 2, ("b", "cpu"): 2})
    plan = plan_here(machine, profiles, Workload(), train_type="b")
    assert plan.trainer.machines[0].device_type == "b"
    three = machine_of({("a", "cuda"): 3})
    gpus = plan_here(three, profiles, Workload(), zero_stage=2, train_devices=2, micro_batch_tokens=1)
    assert (gpus.trainer.zero_stage, gpus.trainer.ranks) == (2, 2)


@pytest.mark.parametrize(("prompts", "group_size", "devices"), [(8, 8, 7), (1, 4, 4), (1, 6, 6)])
def test_no_gpu_trains_that_gets_no_answer(prompts: int, group_size: int, devices: int) -> None:
    profiles = {"gpu": profile_of("gpu", {64: 1e6}, 100.0)}
    workload = Workload(prompts_per_step=prompts, group_size=group_size, max_new_tokens=64)
    plan = plan_here(machine_of({("gpu", "cuda"): 8}), profiles, workload)
    assert len(plan.trainer.machines[0].devices) == devices
    step_s = prompts * group_size * 64 / 100
    assert plan.train_s == pytest.approx(step_s * busiest_share(workload, cut(), devices))


def test_a_concurrency_that_is_set_is_planned_with() -> None:
    """The engine runs whole groups of 8, so 20 are 16; fewer than a group are run as they are."""
    profiles = {"gpu": profile_of("gpu", {8: 10.0, 64: 80.0}, 1000.0)}
    machine = machine_of({("gpu", "cuda"): 3})
    for wished, planned in ((20, 16), (4, 4)):
        plan = plan_here(machine, profiles, Workload(), concurrency=wished)
        assert [replica.concurrency for replica in plan.replicas] == [planned] * 2
        assert plan.rollout_s == pytest.approx(512 / (2 * planned * 10 / 8))


def test_generation_rate_interpolates() -> None:
    profile = profile_of("a", {2: 10.0, 4: 30.0}, 1.0)
    assert [profile.generation_rate(c) for c in (0, 1, 2, 3, 4, 9)] == [0.0, 5.0, 10.0, 20.0, 30.0, 30.0]


def test_more_training_gpus_than_answers_are_refused() -> None:
    profiles = {"gpu": profile_of("gpu", {2: 10.0}, 1.0)}
    machine = machine_of({("gpu", "cuda"): 4})
    workload = Workload(prompts_per_step=1, group_size=2)
    with pytest.raises(UserError, match=r"as training devices 3 asks: a minibatch has work for 2 GPUs"):
        plan_here(machine, profiles, workload, train_devices=3)


def test_a_model_that_does_not_fit_is_refused() -> None:
    profiles = {"gpu": profile_of("gpu", {2: 10.0}, 1.0)}
    with pytest.raises(UserError, match=r"fits nowhere.*ZeRO 0.*lacks \d+\.\d GiB"):
        plan_here(machine_of({("gpu", "cuda"): 2}, 2**20), profiles, Workload(), zero_stage=0)


def test_the_zero_stage_that_would_fit_is_named() -> None:
    """ZeRO 3 shares the states among 4 GPUs, which is enough for `big`; nothing is for `small`, the type asked for."""
    profiles = {name: profile_of(name, {2: 10.0}, 1.0) for name in ("big", "small")}
    sizes = {"big": 2**21, "small": 2**20}
    devices = [Device(index=i, device_type=k, kind="cuda", memory_bytes=m) for k, m in sizes.items() for i in range(4)]
    machine = Machine(name="host", devices=tuple(devices))
    closest = r"training on \d × {0} \(ZeRO 0\) as device type {0} asks comes closest.*; with ZeRO stage 3 "
    for kind, remedy in (("big", "it fits"), ("small", "the smallest that would do is one machine with 1 ×")):
        with pytest.raises(UserError, match=closest.format(kind) + remedy):
            plan_here(machine, profiles, Workload(), zero_stage=0, train_type=kind, **cut())


def test_a_cache_that_cannot_hold_the_longest_context_is_refused() -> None:
    """vLLM would not start, however short the answers were."""
    profiles = {"gpu": profile_of("gpu", {2: 10.0}, 1.0).model_copy(update={"answer_tokens": 2.0})}
    machine = machine_of({("gpu", "cuda"): 2}, 2**26)
    assert plan_here(machine, profiles, Workload(), max_context=1024)
    with pytest.raises(UserError, match=r"a replica on one gpu.*cache of 1000000 tokens. Lower longest context"):
        plan_here(machine, profiles, Workload(), max_context=10**6)


def test_what_cannot_run_is_not_started() -> None:
    elsewhere = laptop().replicas[0].model_copy(update={"machine": "other"})
    with pytest.raises(UserError, match="cannot be started: a run takes one machine"):
        require_startable(laptop().model_copy(update={"replicas": (elsewhere,)}))
    with pytest.raises(UserError, match="what-if"):
        require_startable(laptop().model_copy(update={"what_if": True}))
