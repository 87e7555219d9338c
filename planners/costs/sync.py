"""Seconds that each side stands still while new weights travel from the trainer to the replicas.

W bytes of weights, training machines 𝒯, rollout machines ℛ, β the bandwidth between two machines:

    storage      trainer: write; then replicas: read on every machine at once + load     what runs: files in a directory
    blocking     both: Σ over ℛ of W/β(𝒯, r)                     one machine after another, as AReaL-Hex measured
    tree         both: max over pools of (W/β(𝒯, pool) + W/β(pool))     one crossing, then a broadcast inside each pool
    overlapped   both: W/link inside a machine, after the tree's seconds, during which all work on; T ≥ tree

In mode `storage` nobody waits for the other side: the trainer begins its next step once a version is written, and a
version that is there pauses nothing but the replica that loads it. A device type with a measured profile writes and
loads as was measured; the slowest type of a side is charged. A pool is the machines of one type. A machine that trains
and generates is served inside itself.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from planners.hardware.profile import DeviceProfile
from planners.hardware.topology import Node, Topology

SyncMode = Literal["storage", "blocking", "tree", "overlapped"]
SYNC_RUNS_TODAY: tuple[SyncMode, ...] = ("storage",)


@dataclass(frozen=True)
class Sync:
    """One weight update: the trainer stands still for `train_s`, every replica for `rollout_s`.

    Replicas begin `transfer_s` after the end of a training step; no step is shorter than that.
    """

    train_s: float
    rollout_s: float
    transfer_s: float = 0.0

    @property
    def delay_s(self) -> float:
        """From the end of a training step until every replica generates with its weights."""
        return self.transfer_s + self.rollout_s


def publish_s(
    topology: Topology, device_type: str, weight_bytes: float, profiles: Mapping[str, DeviceProfile]
) -> float:
    """Seconds in which a trainer on this type writes one version."""
    if device_type in profiles:
        return profiles[device_type].publish_s
    return weight_bytes / (topology.storage.write_gb_per_s * 1e9)


def load_s(topology: Topology, device_type: str, weight_bytes: float, profiles: Mapping[str, DeviceProfile]) -> float:
    """Seconds in which a replica on this type reads and loads one version."""
    if device_type in profiles:
        return profiles[device_type].load_s
    speeds = (topology.storage.read_gb_per_s, topology.storage.load_gb_per_s)
    return sum(weight_bytes / (speed * 1e9) for speed in speeds)


def sync_of(
    mode: SyncMode,
    topology: Topology,
    training: Collection[Node],
    rollout: Collection[Node],
    weight_bytes: float,
    profiles: Mapping[str, DeviceProfile],
) -> Sync:
    """Cost of one weight update on concrete machines."""
    if mode == "storage":
        written_s = max(publish_s(topology, n.type_name, weight_bytes, profiles) for n in training)
        loaded_s = max(load_s(topology, n.type_name, weight_bytes, profiles) for n in rollout)
        return Sync(written_s, loaded_s, written_s)
    trainers = {node.name for node in training}
    remote = [node for node in rollout if node.name not in trainers]
    inside_s = [weight_bytes / n.device.link_bytes_per_s for n in rollout if n.name in trainers]
    reach_s = {n.name: weight_bytes / max(topology.link(t, n) for t in training) for n in remote}
    if mode == "blocking":
        pause_s = sum(reach_s.values()) + sum(inside_s)
        return Sync(pause_s, pause_s)
    tree_s = max(inside_s, default=0.0)
    for kind in sorted({n.type_name for n in remote}):
        pool = [n for n in remote if n.type_name == kind]
        entry = min(pool, key=lambda n: (reach_s[n.name], n.name))
        spread_s = max((weight_bytes / topology.link(entry, n) for n in pool if n is not entry), default=0.0)
        tree_s = max(tree_s, reach_s[entry.name] + spread_s)
    if mode == "tree":
        return Sync(tree_s, tree_s)
    pause_s = max(weight_bytes / n.device.link_bytes_per_s for n in rollout)
    return Sync(pause_s, pause_s, tree_s)


def ceiling_of(mode: SyncMode, topology: Topology, weight_bytes: float, profiles: Mapping[str, DeviceProfile]) -> Sync:
    """What no weight update exceeds; in mode `storage` only its loading, and nothing is said of the writing."""
    if mode == "storage":
        return Sync(0.0, max(load_s(topology, t, weight_bytes, profiles) for t in topology.types))
    inside_s = max(weight_bytes / d.link_bytes_per_s for d in topology.types.values())
    slowest_s = max(weight_bytes / topology.best_link(a, b) for a in topology.types for b in topology.types)
    if mode == "overlapped":
        return Sync(inside_s, inside_s, inside_s + 2 * slowest_s)
    pause_s = inside_s + (len(topology.nodes) if mode == "blocking" else 2) * slowest_s
    return Sync(pause_s, pause_s)
