"""The plan of one machine: every split of its devices into training and generation, under a plain rate model.

    n_t    devices of type t                            B, G, η   see `Workload`
    k      devices that train, all of one type t        W = B·G·(tokens of an answer): response tokens of a step
    train_s   = W / (k · training rate of t)
    rollout_s = W / Σ_replicas rate(concurrency)
    step_s    = max(train_s + publish_s, rollout_s + load_s + reward_s)             for η ≥ 1
    step_s    = train_s + publish_s + rollout_s + load_s + reward_s                 for η = 0, where nothing overlaps

Publishing stands on the trainer's path: it writes a version before its next step. Loading stands on a replica's: it
pauses that replica and nothing else; the slowest type that generates is charged. Every device that does not train
generates. CPU devices of one type and role form one process with a thread per core, at k times the rate of one core,
which is optimistic (cores share memory bandwidth); GPUs run one rank or one replica each.

A replica leases whole groups, so its concurrency is a multiple of G, and the replicas together hold at most
max(1, η)·B groups: more could never pass the staleness gate. Within that, concurrencies maximise Σ rate; a replica for
which no group is left is not started.
"""

import difflib
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planners.cluster import Machine
from planners.errors import UserError
from planners.plan import Candidate, Placement, Plan
from planners.profile import DeviceProfile
from planners.workload import Workload


@dataclass(frozen=True)
class _Replica:
    """One generating process and what one of its devices was measured to do."""

    device_type: str
    devices: int
    profile: DeviceProfile

    def rate(self, groups: int, group_size: int) -> float:
        """Response tokens/s with `groups` groups in flight."""
        return self.devices * generation_rate(self.profile, groups * group_size)


@dataclass(frozen=True)
class _Problem:
    """Everything a split's times depend on, besides the split."""

    counts: Mapping[str, int]
    kinds: Mapping[str, Literal["cuda", "cpu"]]
    profiles: Mapping[str, DeviceProfile]
    workload: Workload
    answer_tokens: float
    train_type: str | None
    train_devices: int | None


def plan_split(
    machine: Machine,
    profiles: Mapping[str, DeviceProfile],
    workload: Workload,
    *,
    train_type: str | None = None,
    train_devices: int | None = None,
    device_types: Collection[str] | None = None,
) -> Plan:
    """Choose the fastest split of the machine's devices.

    Args:
        machine: the devices; their order does not matter.
        profiles: one per device type, by type name.
        workload: sizes of a step and the staleness bound. Answers are as long as the mean of its `response_lengths`;
            without them, as the longest mean that a profile saw; without that, `max_new_tokens`, the upper bound.
        train_type: train on this type only; None: any.
        train_devices: train on exactly this many devices; None: any number.
        device_types: use only these types; None: all.

    Raises:
        UserError: fewer than two devices, an unknown type, a missing profile, or a wish that leaves no split.
    """
    chosen = check_devices(machine, train_type=train_type, train_devices=train_devices, device_types=device_types)
    counts = chosen.count_by_type()
    for name in counts:
        if name not in profiles:
            raise UserError(
                f"Device type '{name}' has no profile for this model: run `hexflow prepare EXPERIMENT` first."
            )
    problem = _Problem(
        counts=counts,
        kinds={device.device_type: device.kind for device in chosen.devices},
        profiles=profiles,
        workload=workload,
        answer_tokens=_answer_tokens(counts, profiles, workload),
        train_type=train_type,
        train_devices=train_devices,
    )
    candidates = _enumerate(problem)
    best = candidates[0]
    training, replicas = _place(chosen, best, problem)
    return Plan(
        mode="exhaustive-split",
        training=training,
        replicas=replicas,
        throughput_tokens_per_s=_step_tokens(problem) / best.step_s,
        step_s=best.step_s,
        rollout_s=best.rollout_s,
        train_s=best.train_s,
        sync_s=profiles[best.train_type].publish_s + _load_s(best, problem),
        reward_s=workload.reward_s,
        candidates=tuple(candidates),
        explanation=_explain(candidates, problem),
    )


def check_devices(
    machine: Machine,
    *,
    train_type: str | None = None,
    train_devices: int | None = None,
    device_types: Collection[str] | None = None,
) -> Machine:
    """The machine with only the devices that may be used; its arguments are those of `plan_split`.

    Raises:
        UserError: fewer than two devices, an unknown type, or a wish that leaves no split.
    """
    chosen = _choose_devices(machine, device_types)
    _check_wishes(chosen.count_by_type(), train_type, train_devices)
    return chosen


def generation_rate(profile: DeviceProfile, concurrency: float) -> float:
    """Response tokens/s of one device with this many answers in flight.

    Linear between measured points, proportional below the lowest, constant above the highest.
    """
    measured = profile.generation_tokens_per_s
    points = sorted(measured)
    right = bisect_left(points, concurrency)
    if right == len(points):
        return measured[points[-1]]
    if right == 0:
        return measured[points[0]] * concurrency / points[0]
    low, high = points[right - 1], points[right]
    share = (concurrency - low) / (high - low)
    return measured[low] + share * (measured[high] - measured[low])


def _answer_tokens(counts: Mapping[str, int], profiles: Mapping[str, DeviceProfile], workload: Workload) -> float:
    if workload.response_lengths is not None:
        return workload.response_lengths.lengths().mean
    seen = [tokens for name in counts if (tokens := profiles[name].answer_tokens) is not None]
    return max(seen, default=float(workload.max_new_tokens))


def _choose_devices(machine: Machine, device_types: Collection[str] | None) -> Machine:
    for name in sorted(device_types or ()):
        _check_type(name, machine.count_by_type(), "cluster.device_types")
    devices = [d for d in machine.devices if device_types is None or d.device_type in device_types]
    if len(devices) < 2:
        found = ", ".join(f"{d.device_type} {d.index}" for d in devices) or "none"
        raise UserError(
            f"A run needs at least 2 devices, one to generate and one to train, found {len(devices)} on "
            f"{machine.name}: {found}. Allow more types in cluster.device_types, or label cores as devices with "
            "HEXFLOW_DEVICES, as in cpu=0,1."
        )
    devices.sort(key=lambda d: (d.device_type, d.index))
    return Machine(name=machine.name, devices=tuple(devices))


def _check_type(name: str, counts: Mapping[str, int], key: str) -> None:
    if name in counts:
        return
    near = difflib.get_close_matches(name, counts, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"found: {', '.join(counts) or 'none'}"
    raise UserError(f"{key} names the device type '{name}', which this machine lacks ({hint}).")


def _check_wishes(counts: Mapping[str, int], train_type: str | None, train_devices: int | None) -> None:
    if train_type is not None:
        _check_type(train_type, counts, "planner.train_type")
    if train_devices is None:
        return
    types = [train_type] if train_type is not None else list(counts)
    most = min(max(counts[name] for name in types), sum(counts.values()) - 1)
    if not 1 <= train_devices <= most:
        raise UserError(
            f"planner.train_devices is {train_devices}, but between 1 and {most} can train here: training uses one "
            f"device type ({', '.join(f'{counts[name]} {name}' for name in types)}) and at least one device generates."
        )


def _enumerate(problem: _Problem) -> list[Candidate]:
    """Every allowed split, fastest first; ties go to the fewer training devices, then to the type's name."""
    candidates = []
    for name in [problem.train_type] if problem.train_type is not None else sorted(problem.counts):
        for k in range(1, problem.counts[name] + 1):
            rest = {t: n - k if t == name else n for t, n in sorted(problem.counts.items())}
            rest = {t: n for t, n in rest.items() if n > 0}
            if rest and problem.train_devices in (None, k):
                candidates.append(_predict(name, k, rest, problem))
    return sorted(candidates, key=lambda c: (c.step_s, c.rollout_s, c.train_devices, c.train_type))


def _predict(train_type: str, k: int, rest: dict[str, int], problem: _Problem) -> Candidate:
    tokens = _step_tokens(problem)
    train_s = tokens / (k * problem.profiles[train_type].training_tokens_per_s)
    replicas = _replicas(rest, problem)
    groups = _share_groups(replicas, problem.workload)
    group_size = problem.workload.group_size
    rollout_s = tokens / sum(r.rate(g, group_size) for r, g in zip(replicas, groups, strict=True))
    split = Candidate(
        train_type=train_type, train_devices=k, rollout_devices=rest, rollout_s=rollout_s, train_s=train_s, step_s=0.0
    )
    train_side_s, rollout_side_s = _sides_s(split, problem)
    overlaps = problem.workload.max_staleness > 0
    step_s = max(train_side_s, rollout_side_s) if overlaps else train_side_s + rollout_side_s
    return split.model_copy(update={"step_s": step_s})


def _step_tokens(problem: _Problem) -> float:
    return problem.workload.prompts_per_step * problem.workload.group_size * problem.answer_tokens


def _load_s(split: Candidate, problem: _Problem) -> float:
    return max(problem.profiles[name].load_s for name in split.rollout_devices)


def _sides_s(split: Candidate, problem: _Problem) -> tuple[float, float]:
    """Seconds per step of the training side and of the rollout side, synchronisation and rewards included."""
    train_side_s = split.train_s + problem.profiles[split.train_type].publish_s
    return train_side_s, split.rollout_s + _load_s(split, problem) + problem.workload.reward_s


def _replicas(rest: Mapping[str, int], problem: _Problem) -> list[_Replica]:
    """The generating processes of these devices, by type: one in all on CPUs, one per GPU."""
    replicas = []
    for name, count in sorted(rest.items()):
        sizes = [count] if problem.kinds[name] == "cpu" else [1] * count
        replicas += [_Replica(name, size, problem.profiles[name]) for size in sizes]
    return replicas


def _share_groups(replicas: Sequence[_Replica], workload: Workload) -> list[int]:
    """Groups in flight per replica that maximise Σ rate under the gate; the fewest groups where rates tie.

    Exact, by dynamic programming over the replicas: best[m] is the largest Σ rate with at most m groups in flight.
    A replica is given none where it would only take groups from faster ones.
    """
    useful = [math.ceil(max(r.profile.generation_tokens_per_s) / workload.group_size) for r in replicas]
    gate = min(max(1, workload.max_staleness) * workload.prompts_per_step, sum(useful))
    best = [0.0] * (gate + 1)
    choices: list[list[int]] = []
    for replica, most in zip(replicas, useful, strict=True):
        rates = [0.0] + [replica.rate(g, workload.group_size) for g in range(1, most + 1)]
        sums = [[best[m - g] + rates[g] for g in range(min(m, most) + 1)] for m in range(gate + 1)]
        choice = [row.index(max(row)) for row in sums]
        best = [max(row) for row in sums]
        choices.append(choice)
    groups, left = [], gate
    for choice in reversed(choices):
        groups.append(choice[left])
        left -= choice[left]
    return groups[::-1]


def _place(machine: Machine, split: Candidate, problem: _Problem) -> tuple[Placement, tuple[Placement, ...]]:
    """Concrete devices: training takes the lowest indices of its type, replicas the rest in order."""
    free = {name: [d.index for d in machine.devices if d.device_type == name] for name in problem.counts}
    taken = free[split.train_type][: split.train_devices]
    del free[split.train_type][: split.train_devices]
    training = Placement(
        role="train",
        slot=0,
        machine=machine.name,
        device_type=split.train_type,
        kind=problem.kinds[split.train_type],
        devices=tuple(taken),
    )
    replicas = _replicas(split.rollout_devices, problem)
    placed: list[Placement] = []
    for replica, groups in zip(replicas, _share_groups(replicas, problem.workload), strict=True):
        devices = free[replica.device_type][: replica.devices]
        del free[replica.device_type][: replica.devices]
        if groups > 0:
            placed.append(
                Placement(
                    role="rollout",
                    slot=len(placed),
                    machine=machine.name,
                    device_type=replica.device_type,
                    kind=problem.kinds[replica.device_type],
                    devices=tuple(devices),
                    concurrency=groups * problem.workload.group_size,
                )
            )
    return training, tuple(placed)


def _explain(candidates: Sequence[Candidate], problem: _Problem) -> str:
    best = candidates[0]
    train_side_s, rollout_side_s = _sides_s(best, problem)
    sentences = [f"A step is predicted to take {best.step_s:.2f} s: {_describe(best)}."]
    if problem.workload.max_staleness == 0:
        sentences.append(
            f"With staleness 0 the sides take turns: training {train_side_s:.2f} s, then generation "
            f"{rollout_side_s:.2f} s."
        )
    else:
        slower, slow_s, faster, fast_s = (
            ("Training", train_side_s, "generation", rollout_side_s)
            if train_side_s >= rollout_side_s
            else ("Generation", rollout_side_s, "training", train_side_s)
        )
        sentences.append(f"{slower} limits ({slow_s:.2f} s a step); {faster} needs {fast_s:.2f} s.")
    for name, count in problem.counts.items():
        more = replace(problem, counts={**problem.counts, name: count + 1})
        sentences.append(_describe_gain(name, best, _enumerate(more)[0]))
    idle = _share_groups(_replicas(best.rollout_devices, problem), problem.workload).count(0)
    if idle:
        sentences.append(f"Left idle, as the staleness gate admits too few groups to feed more: {idle}.")
    if _shares_cores(best, problem):
        sentences.append("Several cores are counted as that many times one core, which is optimistic.")
    sentences.append(f"Splits compared: {len(candidates)}.")
    return " ".join(sentences)


def _describe(split: Candidate) -> str:
    generating = " + ".join(f"{n} {name}" for name, n in split.rollout_devices.items())
    return f"train on {split.train_devices} {split.train_type}, generate on {generating}"


def _describe_gain(name: str, best: Candidate, better: Candidate) -> str:
    if better.step_s > 0.995 * best.step_s:
        return f"One more {name} would change little."
    return f"One more {name} would make it {better.step_s:.2f} s ({_describe(better)})."


def _shares_cores(split: Candidate, problem: _Problem) -> bool:
    roles = [(split.train_type, split.train_devices), *split.rollout_devices.items()]
    return any(problem.kinds[name] == "cpu" and count > 1 for name, count in roles)
