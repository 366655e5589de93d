"""Seconds of collectives: latency and bandwidth, by algorithm, by level (inside a node, between nodes) and by backend.

With n ranks on N nodes, S bytes, and B the bytes a second of the slowest hop of a ring:

    all_reduce      latency + 2 (n-1)/n S / B      S: what each rank holds
    all_gather      latency +   (n-1)/n S / B      S: the gathered tensor
    reduce_scatter  latency +   (n-1)/n S / B      S: what each rank holds before
    all_to_all      latency + max(inside, between) S: what each rank holds; every pair exchanges S/n
    send            latency + S / B

Latencies follow nccl's tuning model (src/graph/tuning.cc): a ring of k (n-1) hops of which k N cross nodes, or for
all_reduce a tree of depth log2 N between nodes, whichever is quicker. gloo makes a rendezvous for every hop, and its
reduce_scatter is an all_reduce; its factors were measured (4 latencies a hop for all_reduce, 2.3 for all_gather).

Groups of one axis run at the same time: those that share a node share its adapters (`GroupShape.between_bandwidth`).
Bytes may be numpy arrays.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from autoshard.cluster import Backend, Cluster, Link, slower
from autoshard.plan import Mesh

Bytes = TypeVar("Bytes", float, NDArray[np.float64])
Floats: TypeAlias = NDArray[np.float64]

GLOO_LATENCIES: Mapping[str, float] = {"all_reduce": 4.0, "all_gather": 2.3, "reduce_scatter": 4.0, "all_to_all": 1.0}
"""gloo's latencies a hop: fits 2 and 4 ranks at 0.2 and 1 ms one way within 15 %, loopback within a factor of 2."""


@dataclass(frozen=True)
class GroupShape:
    """How one process group lies in the cluster, with the bandwidths it reaches while its sister groups run too.

    per_node: most members in one node. inside_bandwidth: bytes a second of one member. between_bandwidth: bytes a
    second of all its members in one node together, on their share of the node's adapters.
    """

    ranks: int
    nodes: int
    per_node: int
    inside_latency_s: float
    inside_bandwidth: float
    between_latency_s: float
    between_bandwidth: float
    backend: Backend
    overhead_s: float

    @property
    def ring_bandwidth(self) -> float:
        """Bytes a second through the slowest hop of a ring."""
        if self.nodes == 1:
            return self.inside_bandwidth
        return min(self.between_bandwidth, self.inside_bandwidth) if self.per_node > 1 else self.between_bandwidth

    def latency_s(self, collective: str) -> float:
        """Time of the collective on an empty tensor."""
        rounds = 2 if collective == "all_reduce" else 1
        hops = rounds * (self.ranks - 1)
        hop_s = self.between_latency_s if self.nodes > 1 else self.inside_latency_s
        if self.backend == "gloo":
            # Each hop of gloo's ring waits for the slowest pair; reduce_scatter runs the all_reduce.
            return self.overhead_s + GLOO_LATENCIES[collective] * (self.ranks - 1) * hop_s
        if collective == "all_to_all":
            return self.overhead_s + hop_s * math.sqrt(self.ranks - 1)
        crossing = rounds * self.nodes if self.nodes > 1 else 0
        crossing = min(crossing, hops)
        ring = (hops - crossing) * self.inside_latency_s + crossing * self.between_latency_s
        if collective != "all_reduce":
            return self.overhead_s + ring
        tree = 2 * ((self.per_node - 1) * self.inside_latency_s + math.log2(self.nodes) * self.between_latency_s)
        return self.overhead_s + min(ring, tree)


def axis_shapes(cluster: Cluster, mesh: Mesh, axis: int) -> tuple[GroupShape, ...]:
    """The different shapes of the groups of one mesh axis, largest first."""
    grid = np.asarray(mesh.devices).reshape(mesh.sizes)
    groups = np.moveaxis(grid, axis, -1).reshape(-1, mesh.sizes[axis]).tolist()
    return group_shapes(cluster, groups)


def group_shapes(cluster: Cluster, groups: Sequence[Sequence[int]]) -> tuple[GroupShape, ...]:
    """The different shapes of process groups that communicate at the same time."""
    members = [Counter(cluster.node(rank) for rank in group) for group in groups]
    # How many groups leave each node at once: they share its adapters.
    leaving = Counter(node for counts in members if len(counts) > 1 for node in counts)
    shapes = {_shape(cluster, group, counts, leaving) for group, counts in zip(groups, members, strict=True)}
    return tuple(sorted(shapes, key=lambda shape: (-shape.nodes, -shape.ranks, shape.ring_bandwidth, repr(shape))))


def _shape(cluster: Cluster, group: Sequence[int], counts: Counter[int], leaving: Counter[int]) -> GroupShape:
    one_of_node = {cluster.node(rank): cluster.group(rank) for rank in group}
    crowded = [(one_of_node[node].inside, count) for node, count in counts.items() if count > 1]
    between = one_of_node[cluster.node(group[0])].between
    for home in one_of_node.values():
        between = slower(between, home.between)
    share = min(
        between.bandwidth_bytes_per_s * between.efficiency * min(count, home.between.lanes / max(1, leaving[node]))
        for node, count in counts.items()
        for home in (one_of_node[node],)
    )
    devices = [cluster.group(rank).device for rank in group]
    return GroupShape(
        ranks=len(group),
        nodes=len(counts),
        per_node=max(counts.values()),
        inside_latency_s=max((link.latency_s for link, _ in crowded), default=0.0),
        inside_bandwidth=min((link.reached(count) for link, count in crowded), default=math.inf),
        between_latency_s=between.latency_s if len(counts) > 1 else 0.0,
        between_bandwidth=share if len(counts) > 1 else math.inf,
        backend="gloo" if any(device.backend == "gloo" for device in devices) else "nccl",
        overhead_s=max(device.collective_overhead_s for device in devices),
    )


def all_reduce(shape: GroupShape, size_bytes: Bytes) -> Bytes:
    """Seconds to sum `size_bytes`, held whole by each rank."""
    if shape.ranks == 1:
        return 0.0 * size_bytes
    volume = 2 * (shape.ranks - 1) / shape.ranks / shape.ring_bandwidth
    return shape.latency_s("all_reduce") + volume * size_bytes


def all_gather(shape: GroupShape, size_bytes: Bytes) -> Bytes:
    """Seconds to gather shards into `size_bytes` on each rank."""
    if shape.ranks == 1:
        return 0.0 * size_bytes
    volume = (shape.ranks - 1) / shape.ranks / shape.ring_bandwidth
    return shape.latency_s("all_gather") + volume * size_bytes


def reduce_scatter(shape: GroupShape, size_bytes: Bytes) -> Bytes:
    """Seconds to sum `size_bytes`, held whole by each rank, and leave a shard on each."""
    if shape.backend == "gloo":
        return all_reduce(shape, size_bytes)
    if shape.ranks == 1:
        return 0.0 * size_bytes
    volume = (shape.ranks - 1) / shape.ranks / shape.ring_bandwidth
    return shape.latency_s("reduce_scatter") + volume * size_bytes


def all_to_all(shape: GroupShape, size_bytes: Bytes) -> Bytes:
    """Seconds to exchange `size_bytes`, held by each rank, of which every rank wants an equal part."""
    if shape.ranks == 1:
        return 0.0 * size_bytes
    inside = (shape.per_node - 1) / shape.ranks / shape.inside_bandwidth
    leaving = (shape.ranks - shape.per_node) / shape.ranks * shape.per_node / shape.between_bandwidth
    return shape.latency_s("all_to_all") + max(inside, leaving) * size_bytes


def collective(name: str, shapes: Sequence[GroupShape], size_bytes: Bytes) -> Bytes:
    """Seconds of a collective by its name in `placement.CONVERSIONS`, on the slowest of the groups."""
    functions = {
        "all_reduce": all_reduce,
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
    }
    slowest = functions[name](shapes[0], size_bytes)
    for shape in shapes[1:]:
        slowest = np.maximum(slowest, functions[name](shape, size_bytes))
    return slowest


def send(link: Link, overhead_s: float, size_bytes: float, sharing: float = 1.0) -> float:
    """Seconds to send `size_bytes` from one device to another while `sharing` transfers use the link."""
    return overhead_s + link.latency_s + size_bytes * max(1.0, sharing) / link.reached()


def transfer(cluster: Cluster, pairs: Sequence[tuple[int, int]], size_bytes: float) -> float:
    """Seconds until every (sender, receiver) pair has moved `size_bytes`, all at once; pairs of one device are free."""
    moving = [(first, second) for first, second in pairs if first != second]
    crossing = [(cluster.node(a), cluster.node(b)) for a, b in moving if cluster.node(a) != cluster.node(b)]
    out, into = Counter(a for a, _ in crossing), Counter(b for _, b in crossing)
    slowest = 0.0
    for first, second in moving:
        link = cluster.link(first, second)
        here, there = cluster.node(first), cluster.node(second)
        sharing = 1.0 if here == there else max(out[here], into[there]) / link.lanes
        overhead_s = cluster.group(first).device.collective_overhead_s
        slowest = max(slowest, send(link, overhead_s, size_bytes, sharing))
    return slowest
