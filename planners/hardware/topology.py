"""The hardware a plan is made for, as a person writes it down: machines, links, prices, counts.

`planners.hardware.machine` holds what discovery finds on a machine that is running; this file describes machines that
need not exist yet.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import ConfigDict, Field

from planners.errors import UnknownDevice, UserError
from planners.hardware.catalogue import CATALOGUE, DeviceType, device_type, measured_device
from planners.hardware.machine import Device, Machine
from planners.hardware.profile import DeviceProfile
from planners.sections import NAME_PATTERN, Section

NETWORK_BYTES_PER_S = 1.25e9
"""Assumed between discovered machines: 10 Gbit/s."""
FASTEST = 1e6
"""GB/s; faster is a slip, or means no limit, which this is as well."""


class _Section(Section):
    # Built when first used: imports stay fast.
    model_config = ConfigDict(defer_build=True)


class MachineGroup(_Section):
    """Equal machines."""

    name: str = Field(pattern=NAME_PATTERN, description="Machines are called name-0, name-1 and so on.")
    device_type: str = Field(description="Entry of the device catalogue.")
    count: int = Field(
        default=1, ge=1, le=10_000, description="Machines of this group: what there is, or what can be rented."
    )
    devices: int = Field(ge=1, le=1024, description="Devices per machine.")
    link_gb_per_s: float | None = Field(
        default=None,
        gt=0,
        le=FASTEST,
        description="Bandwidth between devices of a machine, one way per device; empty: catalogue.",
    )
    usd_per_h: float | None = Field(
        default=None, ge=0, le=1e6, description="Price of one device hour; empty: catalogue."
    )


class Link(_Section):
    """Bandwidth between two machines, one way."""

    between: tuple[str, str] = Field(description="Two device types, or two machines (which overrides their types').")
    gb_per_s: float = Field(le=FASTEST, description="GB/s.")


class Storage(_Section):
    """The shared directory that weights travel through in sync mode `storage`."""

    write_gb_per_s: float = Field(default=2.0, gt=0, le=FASTEST, description="Writing one version, GB/s.")
    read_gb_per_s: float = Field(default=2.0, gt=0, le=FASTEST, description="Reading it, per machine, GB/s.")
    load_gb_per_s: float = Field(
        default=10.0, gt=0, le=FASTEST, description="From a machine's memory onto one device, GB/s."
    )


class ClusterFile(_Section):
    """A cluster file."""

    name: str = Field(description="What tables and plans call it.")
    machines: list[MachineGroup] = Field(description="Groups of equal machines.")
    links: list[Link] = Field(default=[], description="Bandwidths between machines.")
    storage: Storage = Field(default=Storage(), description="The shared directory.")


@dataclass(frozen=True)
class Node:
    """One machine, or its devices of one type. `host` and `numbers` are set on machines that were discovered."""

    name: str
    group: str
    device: DeviceType
    devices: int
    host: str = ""
    numbers: tuple[int, ...] = ()

    @property
    def machine(self) -> str:
        """The machine's own name: a machine with devices of several types is a node for each."""
        return self.host or self.name

    def indices(self, positions: Sequence[int]) -> tuple[int, ...]:
        """What the machine calls the devices at these positions."""
        return tuple(self.numbers[p] if self.numbers else p for p in positions)

    @property
    def type_name(self) -> str:
        """Its device type."""
        return self.device.name


@dataclass(frozen=True)
class Topology:
    """Machines and the bandwidths between them, checked: every pair has a positive one."""

    name: str
    nodes: tuple[Node, ...]
    type_links: dict[frozenset[str], float]
    node_links: dict[frozenset[str], float]
    storage: Storage

    def link(self, a: Node, b: Node) -> float:
        """Bytes/s between two machines, or between devices of one."""
        if a.name == b.name:
            return a.device.link_bytes_per_s
        override = self.node_links.get(frozenset((a.name, b.name)))
        return self.type_links[frozenset((a.type_name, b.type_name))] if override is None else override

    @cached_property
    def types(self) -> dict[str, DeviceType]:
        """Device types in order of appearance."""
        return {node.type_name: node.device for node in self.nodes}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Devices by type."""
        return {t: sum(n.devices for n in self.nodes if n.type_name == t) for t in self.types}

    @property
    def devices(self) -> int:
        """All devices."""
        return sum(node.devices for node in self.nodes)

    @property
    def usd_per_h(self) -> float:
        """Price of everything."""
        return sum(node.devices * node.device.usd_per_h for node in self.nodes)

    def best_link(self, a: str, b: str) -> float:
        """Largest bandwidth between two different machines of these types; inside a machine's if there is no pair."""
        return self._best_links[frozenset((a, b))]

    @cached_property
    def _best_links(self) -> dict[frozenset[str], float]:
        best: dict[frozenset[str], float] = {}
        for a in self.types:
            for b in self.types:
                single = a == b and sum(n.type_name == a for n in self.nodes) == 1
                default = self.types[a].link_bytes_per_s if single else self.type_links.get(frozenset((a, b)), 0.0)
                best[frozenset((a, b))] = default
        kinds = {node.name: node.type_name for node in self.nodes}
        for pair, value in self.node_links.items():
            key = frozenset(kinds[name] for name in pair)
            best[key] = max(best[key], value)
        return best

    def restricted(self, machines: dict[str, int]) -> "Topology":
        """The same with only so many devices left on each machine named; others are gone."""
        kept = tuple(replace(n, devices=machines[n.name]) for n in self.nodes if machines.get(n.name, 0) > 0)
        names = {n.name for n in kept}
        links = {pair: value for pair, value in self.node_links.items() if pair <= names}
        return Topology(self.name, kept, self.type_links, links, self.storage)


def discovered(name: str, machines: Sequence[Machine], profiles: Mapping[str, DeviceProfile]) -> Topology:
    """The topology of machines that are running. A machine with several device types becomes one node per type.

    Args:
        name: what plans call it.
        machines: as discovery found them.
        profiles: measured rates by device type; types without one are taken from the catalogue.

    Raises:
        UnknownDevice: a type that is neither measured nor in the catalogue.
    """
    nodes: list[Node] = []
    for machine in machines:
        for kind in machine.count_by_type():
            devices = sorted((d for d in machine.devices if d.device_type == kind), key=lambda d: d.index)
            numbers = tuple(d.index for d in devices)
            name_ = machine.name if len(machine.count_by_type()) == 1 else f"{machine.name}/{kind}"
            device = _discovered_type(machine, devices[0], profiles.get(kind))
            nodes.append(Node(name_, kind, device, len(numbers), machine.name, numbers))
    types = sorted({n.type_name for n in nodes})
    between = {frozenset((a, b)): NETWORK_BYTES_PER_S for a in types for b in types}
    inside = {
        frozenset((a.name, b.name)): min(a.device.link_bytes_per_s, b.device.link_bytes_per_s)
        for a in nodes
        for b in nodes
        if a.name < b.name and a.host == b.host
    }
    return Topology(name, tuple(nodes), between, inside, Storage())


def _discovered_type(machine: Machine, first: Device, profile: DeviceProfile | None) -> DeviceType:
    """The type of a machine's device, measured or from the catalogue; cores share all the memory of the machine."""
    shared = [d.memory_bytes for d in machine.devices if d.kind == "cpu"]
    alike = [d.memory_bytes for d in machine.devices if d.device_type == first.device_type]
    memory = sum(shared) if first.kind == "cpu" else min(alike)
    if profile is None:
        return replace(device_type(first.device_type), memory_bytes=memory)
    return measured_device(first.device_type, profile.gemm_flops_per_s, profile.memory_bytes_per_s, memory, first.kind)


def parse_cluster(file: ClusterFile) -> Topology:
    """Machines and links of a cluster file.

    Raises:
        UserError: no machines, a name or a link twice, an unknown device type or machine, a bandwidth that is missing,
            zero or negative.
    """
    if not file.machines:
        raise UserError(f"Cluster {file.name} is empty: list at least one group under `machines`.")
    devices = _group_devices(file)
    nodes = [
        Node(f"{group.name}-{i}", group.name, devices[group.name], group.devices)
        for group in file.machines
        for i in range(group.count)
    ]
    names = [node.name for node in nodes]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise UserError(f"Cluster {file.name} has two machines called {twice}: name each group differently.")
    type_links, node_links = _links(file, {n.name for n in nodes}, sorted({n.type_name for n in nodes}))
    topology = Topology(file.name, tuple(nodes), type_links, node_links, file.storage)
    _check_links(topology)
    return topology


def _group_devices(file: ClusterFile) -> dict[str, DeviceType]:
    """The device type of each group. Groups of one type that differ in price or link are types of their own, called
    type@group, so that a budget counts what each really costs."""
    devices: dict[str, DeviceType] = {}
    for group in file.machines:
        if group.device_type not in CATALOGUE:
            wanted = group.device_type.lower()
            near = [name for name in CATALOGUE if name.startswith(wanted)]
            near = near or difflib.get_close_matches(wanted, CATALOGUE, n=1, cutoff=0.4)
            raise UnknownDevice(
                f"Group {group.name} of cluster {file.name} has the unknown device type '{group.device_type}'"
                + (f" (did you mean {' or '.join(near)}?)" if near else "")
                + f": known types are {', '.join(sorted(CATALOGUE))}."
            )
        device = device_type(group.device_type)
        if group.link_gb_per_s is not None:
            device = replace(device, link_bytes_per_s=group.link_gb_per_s * 1e9)
        if group.usd_per_h is not None:
            device = replace(device, usd_per_h=group.usd_per_h)
        devices[group.name] = device
    differing = {a.name for a in devices.values() for b in devices.values() if a.name == b.name and a != b}
    return {
        group: replace(device, name=f"{device.name}@{group}") if device.name in differing else device
        for group, device in devices.items()
    }


def _links(
    file: ClusterFile, names: set[str], types: list[str]
) -> tuple[dict[frozenset[str], float], dict[frozenset[str], float]]:
    type_links: dict[frozenset[str], float] = {}
    node_links: dict[frozenset[str], float] = {}
    variants = {t.split("@")[0]: [u for u in types if u.split("@")[0] == t.split("@")[0]] for t in types}
    variants.update({t: [t] for t in types})
    _check_link_entries(file, set(variants), names)
    # A pair of type@group says more than a pair of types, wherever it stands.
    for link in sorted(file.links, key=lambda link: "".join(link.between).count("@")):
        pair = frozenset(link.between)
        if pair <= set(variants):
            a, b = (variants[kind] for kind in link.between)
            type_links.update({frozenset((x, y)): link.gb_per_s * 1e9 for x in a for y in b})
        else:
            node_links[pair] = link.gb_per_s * 1e9
    return type_links, node_links


def _check_link_entries(file: ClusterFile, types: set[str], names: set[str]) -> None:
    seen = set()
    for link in file.links:
        pair, words = frozenset(link.between), " - ".join(link.between)
        if link.gb_per_s <= 0:
            raise UserError(
                f"The link {words} of cluster {file.name} has {link.gb_per_s:g} GB/s: a bandwidth must be positive; "
                "leave out machines that cannot reach each other."
            )
        if pair in seen:
            raise UserError(f"Cluster {file.name} has the link {words} twice: remove one.")
        seen.add(pair)
        if unknown := sorted(pair - types - names):
            near = difflib.get_close_matches(unknown[0], types | names, n=1, cutoff=0.5)
            raise UserError(
                f"A link of cluster {file.name} names {', '.join(unknown)}, which is no device type or machine of it"
                + (f": did you mean '{near[0]}'?" if near else f": it has {', '.join(sorted(types))}.")
            )
        if not pair <= types and (not pair <= names or len(pair) < 2):
            raise UserError(
                f"The link {words} of cluster {file.name} must be between two device types or two different machines; "
                "the bandwidth inside a machine is link_gb_per_s of its group."
            )


def _check_links(topology: Topology) -> None:
    """Every two machines need a bandwidth; the message tells a missing pair from machines that nothing reaches."""
    missing = [pair for pair in _machine_type_pairs(topology) if pair not in topology.type_links]
    for pair in missing:
        a, *rest = sorted(pair)
        b = rest[0] if rest else a
        uncovered = [
            (m, n)
            for i, m in enumerate(topology.nodes)
            for n in topology.nodes[i + 1 :]
            if {m.type_name, n.type_name} == {a, b} and frozenset((m.name, n.name)) not in topology.node_links
        ]
        if not uncovered:
            continue
        m, n = uncovered[0]
        linked = any(n.name in p or m.name in p for p in topology.node_links) or len(missing) < len(topology.types)
        what = "has no bandwidth between" if linked else "is disconnected: nothing links"
        raise UserError(
            f"Cluster {topology.name} {what} {m.name} ({a if m.type_name == a else b}) and {n.name} "
            f"({b if m.type_name == a else a}): add `- {{between: [{a}, {b}], gb_per_s: …}}` under `links`, or remove "
            "one of them."
        )


def _machine_type_pairs(topology: Topology) -> list[frozenset[str]]:
    count = {t: sum(n.type_name == t for n in topology.nodes) for t in topology.types}
    pairs = [frozenset((t,)) for t in topology.types if count[t] > 1]
    types = list(topology.types)
    return pairs + [frozenset((a, b)) for i, a in enumerate(types) for b in types[i + 1 :]]
