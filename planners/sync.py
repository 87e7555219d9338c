"""Seconds that a step stands still while new weights travel from the trainer to the replicas.

W bytes of weights, training machines 𝒯, rollout machines ℛ, β the bandwidth between two machines:

    storage      write + read on every machine at once + load      what runs: files in the shared directory
    blocking     Σ over ℛ of W/β(𝒯, r)                             one machine after another, as AReaL-Hex measured
    tree         max over pools of (W/β(𝒯, pool) + W/β(pool))      one crossing, then a broadcast inside each pool
    overlapped   W/link inside a machine                           the tree runs while generation goes on; T ≥ tree

A pool is the machines of one type. A machine that trains and generates is served inside itself.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from planners.topology import Node, Storage, Topology

SyncMode = Literal["storage", "blocking", "tree", "overlapped"]
SYNC_RUNS_TODAY: tuple[SyncMode, ...] = ("storage",)


@dataclass(frozen=True)
class Sync:
    """`pause_s` is added to every step; `transfer_s` only bounds the step from below."""

    pause_s: float
    transfer_s: float = 0.0


def storage_s(storage: Storage, weight_bytes: float) -> float:
    """Write, shared reads, load."""
    speeds = (storage.write_gb_per_s, storage.read_gb_per_s, storage.load_gb_per_s)
    return sum(weight_bytes / (speed * 1e9) for speed in speeds)


def sync_of(
    mode: SyncMode, topology: Topology, training: Collection[Node], rollout: Collection[Node], weight_bytes: float
) -> Sync:
    """Cost of one weight update on concrete machines."""
    if mode == "storage":
        return Sync(storage_s(topology.storage, weight_bytes))
    trainers = {node.name for node in training}
    remote = [node for node in rollout if node.name not in trainers]
    inside_s = [weight_bytes / n.device.link_bytes_per_s for n in rollout if n.name in trainers]
    reach_s = {n.name: weight_bytes / max(topology.link(t, n) for t in training) for n in remote}
    if mode == "blocking":
        return Sync(sum(reach_s.values()) + sum(inside_s))
    tree_s = max(inside_s, default=0.0)
    for kind in sorted({n.type_name for n in remote}):
        pool = [n for n in remote if n.type_name == kind]
        entry = min(pool, key=lambda n: (reach_s[n.name], n.name))
        spread_s = max((weight_bytes / topology.link(entry, n) for n in pool if n is not entry), default=0.0)
        tree_s = max(tree_s, reach_s[entry.name] + spread_s)
    if mode == "tree":
        return Sync(tree_s)
    return Sync(max(weight_bytes / n.device.link_bytes_per_s for n in rollout), tree_s)
