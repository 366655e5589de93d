"""Where a stage can stand in a cluster, and the mesh shapes it can have there.

Devices are numbered node by node. A stage takes consecutive devices: a divisor of a node's count inside one node, or
whole nodes (of several device types the slowest counts). Costs depend on where a stage stands only through its *site*:
the node and device type of each of its devices, counted from its first. Stages of equal sites are priced once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.cluster import Cluster
from autoshard.passes.inter_options import MeshShape
from autoshard.placement import product

Site = tuple[tuple[int, int], ...]
"""For each device of a stage: its node, counted from the stage's first, and the number of its device type."""


@dataclass(frozen=True)
class Sites:
    """The submeshes of a cluster. mesh: the shape that every stage must have, or None."""

    cluster: Cluster
    mesh: MeshShape | None = None

    @cached_property
    def nodes(self) -> tuple[range, ...]:
        """The devices of each node."""
        first_devices = [0]
        for rank in range(1, self.cluster.size):
            if self.cluster.node(rank) != self.cluster.node(rank - 1):
                first_devices.append(rank)
        ends = [*first_devices[1:], self.cluster.size]
        return tuple(range(first, end) for first, end in zip(first_devices, ends, strict=True))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices that a stage can have, smallest first."""
        if self.mesh is not None:
            return (product([size for _, size in self.mesh]),)
        counts = {len(node) for node in self.nodes}
        inside = {size for count in counts for size in range(1, count + 1) if count % size == 0}
        whole = {
            sum(len(node) for node in self.nodes[first:end])
            for first in range(len(self.nodes))
            for end in range(first + 1, len(self.nodes) + 1)
        }
        return tuple(sorted(inside | whole))

    def shapes(self, size: int) -> tuple[MeshShape, ...]:
        """Mesh shapes of a stage of `size` devices: dp outside, tp inside, tp no larger than a node.

        An inner axis that spans nodes is searched only where the user's mesh asks for it, or nodes have one device.
        """
        if self.mesh is not None:
            return (self.mesh,) if product([count for _, count in self.mesh]) == size else ()
        largest, common = max(len(node) for node in self.nodes), math.gcd(*(len(node) for node in self.nodes))
        anywhere = size <= largest or largest == 1
        inner = [tp for tp in range(1, size + 1) if size % tp == 0 and (anywhere or common % tp == 0)]
        splits = [(size // tp, tp) for tp in inner]
        return tuple(tuple((axis, count) for axis, count in (("dp", dp), ("tp", tp)) if count > 1) for dp, tp in splits)

    def places(self, end: int, size: int) -> tuple[int, ...]:
        """First devices of a stage of `size` devices that ends at or before `end`: the last of each kind of site."""
        found: dict[Site, int] = {}
        for first in self._firsts(size):
            if first + size <= end:
                found[self.site(first, size)] = first
        return tuple(sorted(found.values(), reverse=True))

    def site(self, first: int, size: int) -> Site:
        """What the price of a stage there depends on."""
        return self._sites[first, size]

    @cached_property
    def _sites(self) -> dict[tuple[int, int], Site]:
        return {
            (first, size): self.relative(range(first, first + size))
            for size in self.sizes
            for first in self._firsts(size)
        }

    def relative(self, devices: Sequence[int]) -> Site:
        """The site of any devices."""
        home = self.cluster.node(devices[0])
        return tuple((self.cluster.node(rank) - home, self._types[rank]) for rank in devices)

    @cached_property
    def _types(self) -> tuple[int, ...]:
        numbers = {device: number for number, device in enumerate(dict.fromkeys(self.cluster.devices))}
        return tuple(numbers[device] for device in self.cluster.devices)

    def _firsts(self, size: int) -> Sequence[int]:
        """First devices at which `size` devices may start, anywhere in the cluster."""
        return self._first_devices[size]

    @cached_property
    def _first_devices(self) -> dict[int, tuple[int, ...]]:
        starts, stops = {node.start for node in self.nodes}, {node.stop for node in self.nodes}
        found: dict[int, tuple[int, ...]] = {}
        for size in self.sizes:
            inside = {
                first
                for node in self.nodes
                for first in range(node.start, node.stop - size + 1)
                if len(node) % size == 0 or self.mesh is not None
            }
            whole = {first for first in starts if first + size in stops}
            # A mesh of the user's own that fits in no node and on no whole nodes lies across them.
            across = set(range(0, self.cluster.size - size + 1, size))
            found[size] = tuple(sorted(inside | whole or across))
        return found


def settled(stages: Sequence[tuple[int, int]], sites: Sites) -> tuple[int, ...]:
    """First devices for stages given as (first device, size) and placed at the end of the cluster, moved to its start.

    On a cluster of one device type the stages move down by whole nodes, then together inside each node, so that devices
    left idle are the last ones; every stage keeps its site. Other clusters keep their places.
    """
    cluster = sites.cluster
    if len({len(node) for node in sites.nodes}) > 1 or len(set(cluster.devices)) > 1:
        return tuple(first for first, _ in stages)
    node_size, moved, free = len(sites.nodes[0]), [], 0
    skipped = cluster.node(stages[0][0]) if stages else 0
    for first, size in stages:
        start = first - skipped * node_size
        inside = start // node_size == (start + size - 1) // node_size
        low = start - start % node_size
        place = max(free, low) if inside else start
        moved.append(place)
        free = place + size
    same = all(sites.site(new, size) == sites.site(old, size) for new, (old, size) in zip(moved, stages, strict=True))
    return tuple(moved) if same else tuple(first for first, _ in stages)
