"""The plan of one machine equals the best of all splits, enumerated here by other means."""

import itertools
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planners.cluster import Device, Machine
from planners.errors import UserError
from planners.lengths import Samples
from planners.plan import Plan
from planners.profile import DeviceProfile
from planners.split import generation_rate, plan_split
from planners.workload import Workload

Kind = Literal["cuda", "cpu"]
Counts = dict[tuple[str, Kind], int]
rates = st.integers(1, 100).map(float)


def machine_of(counts: Counts) -> Machine:
    devices = [
        Device(index=index, device_type=name, kind=kind, memory_bytes=2**30)
        for (name, kind), count in counts.items()
        for index in range(count)
    ]
    return Machine(name="host", devices=tuple(devices))


def profile_of(
    name: str, generation: dict[int, float], training: float, publish_s: float = 0.0, load_s: float = 0.0
) -> DeviceProfile:
    return DeviceProfile(
        device_type=name,
        model_key="model",
        versions_key="versions",
        gemm_flops_per_s=1e9,
        memory_bytes_per_s=1e9,
        generation_tokens_per_s=generation,
        training_tokens_per_s=training,
        publish_s=publish_s,
        load_s=load_s,
    )


@st.composite
def problems(draw: st.DrawFn, most_stale: int = 2):
    """A small machine with one or two device types, their profiles, and a workload."""
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
        max_staleness=draw(st.integers(0, most_stale)),
    )
    return counts, profiles, workload


def best_step_s(counts: Counts, profiles: dict[str, DeviceProfile], workload: Workload) -> float:
    """Shortest step over every split and every way to hand out groups, by brute force."""
    b, g = workload.prompts_per_step, workload.group_size
    tokens = b * g * workload.max_new_tokens
    steps = []
    for (train_type, kind), count in counts.items():
        for k in range(1, count + 1):
            rest = {**counts, (train_type, kind): count - k}
            replicas = [(name, n) for (name, kd), n in rest.items() if kd == "cpu" and n]
            replicas += [(name, 1) for (name, kd), n in rest.items() if kd == "cuda" for _ in range(n)]
            if not replicas:
                continue
            limit = max(1, workload.max_staleness) * b
            rate = max(
                sum(n * generation_rate(profiles[name], c * g) for (name, n), c in zip(replicas, share, strict=True))
                for share in itertools.product(range(limit + 1), repeat=len(replicas))
                if sum(share) <= limit
            )
            train_side = tokens / (k * profiles[train_type].training_tokens_per_s) + profiles[train_type].publish_s
            rollout_side = tokens / rate + max(profiles[name].load_s for name, _ in replicas)
            steps.append(train_side + rollout_side if workload.max_staleness == 0 else max(train_side, rollout_side))
    return min(steps)


@settings(max_examples=60, deadline=None)
@given(problems(most_stale=1))
def test_the_plan_is_the_best_split(problem) -> None:
    counts, profiles, workload = problem
    plan = plan_split(machine_of(counts), profiles, workload)
    assert plan.step_s == pytest.approx(best_step_s(counts, profiles, workload))
    assert plan.step_s == plan.candidates[0].step_s == min(candidate.step_s for candidate in plan.candidates)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_one_more_device_of_a_type_is_never_worse(problem, data: st.DataObject) -> None:
    counts, profiles, workload = problem
    grown = data.draw(st.sampled_from(list(counts)))
    more = {key: count + (key == grown) for key, count in counts.items()}
    before = plan_split(machine_of(counts), profiles, workload)
    after = plan_split(machine_of(more), profiles, workload)
    assert after.step_s <= before.step_s * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_devices_changes_nothing(problem, random) -> None:
    counts, profiles, workload = problem
    machine = machine_of(counts)
    shuffled = list(machine.devices)
    random.shuffle(shuffled)
    assert plan_split(machine.model_copy(update={"devices": tuple(shuffled)}), profiles, workload) == plan_split(
        machine, profiles, workload
    )


@settings(max_examples=60, deadline=None)
@given(problems())
def test_placements_are_disjoint_and_within_the_gate(problem) -> None:
    counts, profiles, workload = problem
    plan = plan_split(machine_of(counts), profiles, workload)
    placed = [(p.device_type, index) for p in (plan.training, *plan.replicas) for index in p.devices]
    assert len(placed) == len(set(placed)) <= sum(counts.values())
    assert [replica.slot for replica in plan.replicas] == list(range(len(plan.replicas)))
    concurrency = [replica.concurrency for replica in plan.replicas]
    assert all(c > 0 and c % workload.group_size == 0 for c in concurrency)
    assert sum(concurrency) <= max(1, workload.max_staleness) * workload.prompts_per_step * workload.group_size


def laptop(cores: int = 2, workload: Workload | None = None, **wishes) -> Plan:
    profiles = {"cpu": profile_of("cpu", {8: 20.0, 64: 40.0}, 64.0, publish_s=1.5, load_s=0.8)}
    return plan_split(machine_of({("cpu", "cpu"): cores}), profiles, workload or Workload(), **wishes)


def test_the_laptop_by_hand() -> None:
    plan = laptop()
    assert plan.training.devices == (0,)
    assert [(r.devices, r.concurrency) for r in plan.replicas] == [((1,), 64)]
    assert (plan.train_s, plan.rollout_s, plan.sync_s) == (8.0, 12.8, 2.3)
    assert plan.step_s == pytest.approx(13.6)
    assert plan.throughput_tokens_per_s == pytest.approx(512 / 13.6)
    assert "Generation limits" in plan.explanation
    assert "One more cpu would make it 9.50 s (train on 1 cpu, generate on 2 cpu)." in plan.explanation


def test_expected_answers_shorten_the_step_and_rewards_lengthen_it() -> None:
    expected = Workload(response_lengths=Samples(tokens=(2, 6)))
    assert laptop(workload=expected).rollout_s == pytest.approx(6.4)
    assert laptop(workload=Workload(reward_s=1.0)).step_s == pytest.approx(14.6)


def test_the_mean_answer_that_was_measured_is_expected() -> None:
    profile = profile_of("cpu", {8: 20.0, 64: 40.0}, 64.0).model_copy(update={"answer_tokens": 2.0})
    plan = plan_split(machine_of({("cpu", "cpu"): 2}), {"cpu": profile}, Workload())
    assert (plan.train_s, plan.rollout_s) == (2.0, 3.2)


def test_cores_of_a_role_form_one_process() -> None:
    plan = laptop(cores=4)
    assert plan.training.devices == (0, 1)
    assert [replica.devices for replica in plan.replicas] == [(2, 3)]
    assert plan.training.ranks == 1
    assert "optimistic" in plan.explanation


def test_gpus_form_one_replica_each_and_both_types_are_used() -> None:
    profiles = {
        "fast": profile_of("fast", {8: 10.0, 64: 30.0}, 1000.0),
        "slow": profile_of("slow", {8: 10.0, 64: 30.0}, 10.0),
    }
    plan = plan_split(machine_of({("fast", "cuda"): 2, ("slow", "cuda"): 2}), profiles, Workload())
    assert (plan.training.device_type, plan.training.devices) == ("fast", (0,))
    assert [(r.device_type, r.devices) for r in plan.replicas] == [("fast", (1,)), ("slow", (0,)), ("slow", (1,))]


def test_a_group_goes_to_the_replica_that_gains_most() -> None:
    profiles = {"good": profile_of("good", {2: 30.0, 4: 50.0}, 1.0), "poor": profile_of("poor", {2: 10.0}, 1000.0)}
    workload = Workload(prompts_per_step=2, group_size=2, max_staleness=1)
    plan = plan_split(machine_of({("good", "cuda"): 1, ("poor", "cuda"): 2}), profiles, workload)
    assert [(r.device_type, r.concurrency) for r in plan.replicas] == [("good", 4)]
    assert "Left idle" in plan.explanation


def test_wishes_are_kept() -> None:
    assert laptop(cores=4, train_devices=3).training.devices == (0, 1, 2)
    profiles = {name: profile_of(name, {8: 10.0}, 10.0) for name in ("a", "b")}
    machine = machine_of({("a", "cpu"): 2, ("b", "cpu"): 2})
    assert plan_split(machine, profiles, Workload(), train_type="b").training.device_type == "b"
    used = plan_split(machine, profiles, Workload(), device_types=["b"])
    assert {p.device_type for p in (used.training, *used.replicas)} == {"b"}


def test_generation_rate_interpolates() -> None:
    profile = profile_of("a", {2: 10.0, 4: 30.0}, 1.0)
    assert [generation_rate(profile, c) for c in (0, 1, 2, 3, 4, 9)] == [0.0, 5.0, 10.0, 20.0, 30.0, 30.0]


@pytest.mark.parametrize(
    ("counts", "wishes", "message"),
    [
        ({("cpu", "cpu"): 1}, {}, "needs at least 2 devices.*found 1.*cpu 0.*HEXFLOW_DEVICES"),
        ({("cpu", "cpu"): 2}, {"device_types": ["cpus"]}, "cluster.device_types.*'cpus'.*did you mean 'cpu'"),
        ({("cpu", "cpu"): 2}, {"train_type": "h100"}, "planner.train_type.*'h100'.*found: cpu"),
        ({("cpu", "cpu"): 2}, {"train_devices": 2}, "planner.train_devices is 2.*between 1 and 1"),
        ({("cpu", "cpu"): 2, ("gpu", "cuda"): 1}, {}, "'gpu' has no profile.* run `hexflow prepare"),
        ({("cpu", "cpu"): 1, ("gpu", "cuda"): 1}, {"device_types": ["cpu"]}, "found 1"),
    ],
)
def test_what_a_person_gets_wrong_is_said(counts: Counts, wishes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan_split(machine_of(counts), {"cpu": profile_of("cpu", {8: 1.0}, 1.0)}, Workload(), **wishes)
