"""Algorithm 1, repartition phase: split the devices into training set D_T and rollout set D_I (Eq 3 of AReaL-Hex).

    G = (D, E)      vertices: compute c_d, memory bandwidth m_d; edges: bandwidth β_de

    maximise        Σβ inside D_T / Σβ total  +  Σm over D_I / Σm total                          (3)
    subject to      γ_L ≤ Σc over D_T / Σc ≤ γ_H

`printed` is (3) as it stands. An H20's links are more than twice an H800's, so it pulls H20s into training; that is
what the printed formula says, and it is reported. `corrected` divides each bandwidth by the largest of the two types'
own in-machine ones, so that Σβ measures how whole a training set is and not which type it is made of, and scales each
device's memory bandwidth by compute in the same way: m_d/c_d, what a device is better at.

The graph has a vertex per machine, with its devices interchangeable: a partition is the number of training devices on
each. (3) is maximised by local search: single devices and whole machines move between the sets, or swap, from starts
that fill the training set type by type.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import Any, Literal

from planners.hardware.topology import Topology

Variant = Literal["printed", "corrected"]
Partition = tuple[int, ...]
"""Training devices on each machine, in the order of the topology."""


def device_graph(topology: Topology) -> Any:
    """G as an igraph graph: a vertex per machine (devices, c, m, in-machine β), an edge per pair with its β."""
    import igraph

    nodes = topology.nodes
    graph = igraph.Graph(n=len(nodes))
    graph.vs["devices"] = [n.devices for n in nodes]
    graph.vs["type"] = [n.type_name for n in nodes]
    graph.vs["c"] = [n.device.flops_per_s for n in nodes]
    graph.vs["m"] = [n.device.memory_bytes_per_s for n in nodes]
    graph.vs["beta"] = [n.device.link_bytes_per_s for n in nodes]
    pairs = [(i, j) for i in range(len(nodes)) for j in range(i + 1, len(nodes))]
    graph.add_edges(pairs)
    graph.es["beta"] = [topology.link(nodes[i], nodes[j]) for i, j in pairs]
    return graph


class Repartition:
    """(3) on one graph, and its maximisation under a compute share."""

    def __init__(self, graph: Any, variant: Variant) -> None:
        self.devices: list[int] = graph.vs["devices"]
        self.types: list[str] = graph.vs["type"]
        self.compute: list[float] = graph.vs["c"]
        own = {t: max(b for b, u in zip(graph.vs["beta"], self.types, strict=True) if u == t) for t in set(self.types)}
        count = len(self.devices)
        self.inside: list[float] = list(graph.vs["beta"])
        self.between = [[0.0] * count for _ in range(count)]
        self.bandwidth: list[float] = list(graph.vs["m"])
        for edge in graph.es:
            i, j = edge.tuple
            scale = max(own[self.types[i]], own[self.types[j]]) if variant == "corrected" else 1.0
            self.between[i][j] = self.between[j][i] = edge["beta"] / scale
        if variant == "corrected":
            self.inside = [b / own[t] for b, t in zip(self.inside, self.types, strict=True)]
            self.bandwidth = [m / c for m, c in zip(self.bandwidth, self.compute, strict=True)]
        self.total_beta = self._beta(self.devices)
        self.total_m = sum(m * d for m, d in zip(self.bandwidth, self.devices, strict=True))
        self.total_c = sum(c * d for c, d in zip(self.compute, self.devices, strict=True))

    def objective(self, taken: Sequence[int]) -> float:
        """(3)."""
        left = sum(m * (d - n) for m, d, n in zip(self.bandwidth, self.devices, taken, strict=True))
        return self._beta(taken) / max(self.total_beta, 1e-30) + left / self.total_m

    def share(self, taken: Sequence[int]) -> float:
        """Σc over D_T / Σc."""
        return sum(c * n for c, n in zip(self.compute, taken, strict=True)) / self.total_c

    def maximise(self, low: float, high: float) -> Partition:
        """The best partition found with a compute share in [low, high], or nearest to it where there is none."""
        return min(
            (self._climb(list(start), low, high) for start in self._starts(low, high)), key=self._rank(low, high)
        )

    def _beta(self, taken: Sequence[int]) -> float:
        within = sum(b * n * (n - 1) / 2 for b, n in zip(self.inside, taken, strict=True))
        held = [i for i, n in enumerate(taken) if n]
        return within + sum(self.between[i][j] * taken[i] * taken[j] for k, i in enumerate(held) for j in held[k + 1 :])

    def _rank(self, low: float, high: float) -> Any:
        def rank(taken: Sequence[int]) -> tuple[float, float, tuple[int, ...]]:
            share = self.share(taken)
            outside = max(low - share, share - high, 0.0)
            both = 0 < sum(taken) < sum(self.devices)
            return (outside if both else 1e9, -self.objective(taken), tuple(taken))

        return rank

    def _starts(self, low: float, high: float) -> list[Partition]:
        """Training sets filled machine by machine in each order of the types, up to the middle of the window."""
        starts = []
        for order in permutations(sorted(set(self.types))[:4]):
            taken = [0] * len(self.devices)
            for i in sorted(
                range(len(taken)), key=lambda i: (order.index(self.types[i]) if self.types[i] in order else 9, i)
            ):
                while taken[i] < self.devices[i] and self.share(taken) < (low + high) / 2:
                    taken[i] += 1
            starts.append(tuple(taken))
        return sorted(set(starts))

    def _climb(self, taken: list[int], low: float, high: float) -> Partition:
        """First improvement over moves and swaps until none improves."""
        rank = self._rank(low, high)
        best = rank(taken)
        improved = True
        while improved:
            improved = False
            for changed in self._neighbours(taken):
                value = rank(changed)
                if value < best:
                    taken, best, improved = changed, value, True
                    break
        return tuple(taken)

    def _neighbours(self, taken: list[int]) -> list[list[int]]:
        found = []
        moves = [
            (i, delta)
            for i, d in enumerate(self.devices)
            for delta in {1, -1, d - taken[i], -taken[i]}
            if delta and 0 <= taken[i] + delta <= d
        ]
        for i, delta in moves:
            found.append([n + delta if k == i else n for k, n in enumerate(taken)])
        for i, a in moves:
            for j, b in moves:
                if i < j and a * b < 0 and (abs(a) == abs(b) or self.types[i] != self.types[j]):
                    found.append([n + (a if k == i else b if k == j else 0) for k, n in enumerate(taken)])
        return found
