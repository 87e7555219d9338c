"""Plans for tests that need one and care little which."""

from collections.abc import Mapping
from typing import Any

from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import ClusterFile, Topology, discovered, parse_cluster
from planners.plan.plan import ClusterPlan
from planners.plan.run import RunPlan
from planners.search.columns import Problem, TrainingWish
from planners.search.make import Goal, make_plan
from planners.search.this_machine import plan_machine
from planners.workload.demand import Demand, demand_of
from planners.workload.model import Model
from planners.workload.step import Workload

TINY = Model("tiny", 2, 64, 128, 4, 2, 16, 128, tied=True)
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
"""Keys of the configuration of SmolLM2-135M that decide its sizes."""


def profile_of(
    name: str, generation: dict[int, float], training: float, publish_s: float = 0.0, load_s: float = 0.0
) -> DeviceProfile:
    """A profile of a device type by its rates in response tokens/s."""
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


def gpu_plan(machine: str, device_type: str, gpus: int) -> ClusterPlan:
    """One GPU trains, the others generate; 8 s of training, 1 s to publish a version and 0.5 s to load it."""
    devices = [Device(index=i, device_type=device_type, kind="cuda", memory_bytes=2**36) for i in range(gpus)]
    profile = profile_of(device_type, {64: 40.0}, 64.0, publish_s=1.0, load_s=0.5)
    here = Machine(name=machine, devices=tuple(devices))
    return plan_here(here, {device_type: profile}, Workload(), train_devices=1)


def plan_here(
    machine: Machine, profiles: Mapping[str, DeviceProfile], workload: Workload, model: Model = TINY, **wishes: Any
) -> ClusterPlan:
    """The plan of a machine; `wishes` are those of the trainer, and what `demand_of` takes besides the workload."""
    names = {"train_type": "device_type", "train_devices": "devices", "zero_stage": "zero"}
    wish = TrainingWish(**{names[key]: wishes.pop(key) for key in names if key in wishes})
    seen = [tokens for profile in profiles.values() if (tokens := profile.answer_tokens) is not None]
    demand = demand_of(workload, answer_tokens=max(seen, default=None), **wishes)
    topology = discovered(machine.name, [machine], profiles)
    return plan_machine(Problem(topology, model, demand, profiles=profiles, training_wish=wish))


def plan_for(topology: Topology, model: Model, demand: Demand, **how: Any) -> ClusterPlan:
    """The plan of a described cluster; `how` has what `Problem` takes besides, and parts of the goal."""
    kept = ("what_if", "sync_mode", "profiles", "training_wish")
    problem = Problem(topology, model, demand, **{key: how.pop(key) for key in kept if key in how})
    return make_plan(problem, Goal(**how))


def cluster_of(**counts: int) -> Topology:
    """A cluster with a machine of each of one or two device types, with so many devices."""
    groups = [{"name": f"m-{kind}", "device_type": kind, "devices": n} for kind, n in counts.items()]
    links = [{"between": list(counts), "gb_per_s": 1.5}] if len(counts) == 2 else []
    return parse_cluster(ClusterFile.model_validate({"name": "mixed", "machines": groups, "links": links}))


def run_plan(machine: str = "here", *, ranks: int = 1, zero_stage: int = 0, micro_batch_tokens: int = 1024) -> RunPlan:
    """One trainer and one replica: on a core each, or with more ranks on GPUs of the same machine."""
    kind = "cpu" if ranks == 1 else "cuda"
    place = {"machine": machine, "device_type": kind, "kind": kind}
    stage = {"machines": [{**place, "devices": range(ranks)}], "data": ranks, "tensor": 1, "layer_share": 1.0}
    replica = {"slot": 0, **place, "devices": [ranks], "tensor_parallel": 1, "concurrency": 4, "layout": "one"}
    trainer = {"layout": "one", "stages": [stage], "zero_stage": zero_stage, "micro_batch_tokens": micro_batch_tokens}
    return RunPlan.model_validate(
        {"trainer": trainer, "replicas": [{**replica, "tokens_per_s": 1.0, "latency_s": 1.0}]}
    )


def gap_of(plan: ClusterPlan) -> float:
    """The gap of a plan in a mode that proves one."""
    assert plan.gap is not None
    return plan.gap


def bound_of(plan: ClusterPlan) -> float:
    """The proven bound of a plan, in response tokens per second."""
    assert plan.upper_bound_tokens_per_s is not None
    return plan.upper_bound_tokens_per_s
