"""The cheapest legal way from one layout of a tensor to another: a sequence of changes on single axes.

A step changes one axis by a row of `placement.CONVERSIONS`. The earlier axis cuts a dim first, so a step whose old or
new placement is S(d) is legal only while no later axis shards d: inner cuts are undone before outer ones, and made
after them. Intermediate layouts may hold any placement (a sum over two axes may become reduce-scatter, all-reduce,
all-gather). All layouts of a tensor are the nodes of a graph, legal steps are its edges, seconds forward and backward
their lengths; a shortest path is the sequence. Equal prices are decided by fewer steps, then by a fixed order, so that
planner and emitter see the same sequence.

`LayoutGraph` holds the graph of one tensor type; everything in it is arrays, since a plan asks for 10^5 pairs.
Axes of one rank take no part: they have the target's placement from the start.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from autoshard.cost.collectives import Floats, GroupShape, collective
from autoshard.placement import Layout, Placement, conversion
from autoshard.program import TensorType

Ints = NDArray[np.int64]

_STEP_S = 1e-12  # what one more step must save: prefers the shorter of two sequences of equal price
_UNEVEN = 1.02  # an uneven step is dearer than its bytes: padding, lists of sizes


@dataclass(frozen=True)
class Step:
    """One change: on mesh axis `axis`, from `source` to `target`; the tensor's layout before and after."""

    axis: int
    source: Placement
    target: Placement
    before: Layout
    after: Layout


@dataclass(frozen=True)
class ConversionPrice:
    """Steps, and the seconds they take: forward_s now, backward_s when the gradient comes back.

    transient_bytes: most bytes alive on a rank during a step beyond the tensor that enters the sequence.
    """

    steps: tuple[Step, ...]
    forward_s: float
    backward_s: float
    transient_bytes: int

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class LocalCosts:
    """What local steps (slice, pad, mask) cost: seconds a kernel and bytes a second of device memory."""

    launch_s: float
    memory_bandwidth: float


def is_legal(layout: Layout, axis: int, target: Placement) -> bool:
    """Whether one step may change `layout[axis]` into `target`."""
    source = layout[axis]
    if source == target:
        return False
    inner = {placement.dim for placement in layout[axis + 1 :]}
    return not any(changed.dim is not None and changed.dim in inner for changed in (source, target))


@dataclass(frozen=True)
class Structure:
    """All layouts over some axes, and the legal steps between them, as arrays.

    placements: what an axis may be, in a fixed order. layouts: one row of placement numbers a layout. tails, heads,
    axes: the steps. kinds: (axis, source number, target number) -> the steps of that kind.
    """

    placements: tuple[Placement, ...]
    layouts: Ints
    tails: Ints
    heads: Ints
    axes: Ints
    kinds: tuple[tuple[int, int, int, Ints], ...]

    def number(self, layout: Layout) -> int:
        """Number of a layout."""
        value = 0
        for placement in layout:
            value = value * len(self.placements) + self.placements.index(placement)
        return value

    def layout(self, number: int) -> Layout:
        """Layout of a number."""
        return tuple(self.placements[index] for index in self.layouts[number])


@lru_cache(maxsize=256)
def structure(dims: tuple[int, ...], axes: int) -> Structure:
    """The layouts and steps of tensors whose `dims` may be cut, over `axes` axes."""
    placements = (Placement("I"), Placement("R"), Placement("P"), *(Placement("S", dim) for dim in dims))
    count = len(placements)
    layouts = np.array(list(itertools.product(range(count), repeat=axes)), dtype=np.int64).reshape(-1, axes)
    inner = np.zeros((len(layouts), axes, count), dtype=bool)  # whether a later axis shards the dim of a placement
    for axis in range(axes):
        for index in range(3, count):
            inner[:, axis, index] = (layouts[:, axis + 1 :] == index).any(axis=1)
    weights = count ** np.arange(axes - 1, -1, -1)
    numbers = np.arange(len(layouts))
    found: list[tuple[int, int, int, Ints]] = []
    for axis in range(axes):
        for source, target in itertools.permutations(range(count), 2):
            legal = (layouts[:, axis] == source) & ~inner[:, axis, source] & ~inner[:, axis, target]
            found.append((axis, source, target, numbers[legal]))
    tails = np.concatenate([tail for *_, tail in found])
    heads = np.concatenate([tail + (target - source) * weights[axis] for axis, source, target, tail in found])
    starts = np.cumsum([0, *(len(tail) for *_, tail in found)])
    kinds = tuple(
        (axis, source, target, np.arange(starts[index], starts[index + 1]))
        for index, (axis, source, target, _) in enumerate(found)
    )
    of_axis = np.concatenate([np.full(len(tail), axis) for axis, _, _, tail in found])
    return Structure(placements, layouts, tails, heads, of_axis, kinds)


@lru_cache(maxsize=256)
def _outgoing(sharded: tuple[Placement, ...], axes: int) -> list[Ints]:
    """Steps that leave each layout, in their fixed order."""
    graph = structure(tuple(placement.dim or 0 for placement in sharded), axes)
    order = np.argsort(graph.tails, kind="stable")
    starts = np.searchsorted(graph.tails[order], np.arange(1, len(graph.layouts)))
    return np.split(order, starts)


@dataclass(frozen=True)
class LayoutGraph:
    """The priced steps between all layouts of one tensor type.

    sizes: ranks of each mesh axis. shapes: the process groups of each axis.
    """

    type: TensorType
    sizes: tuple[int, ...]
    shapes: tuple[tuple[GroupShape, ...], ...]
    local: LocalCosts
    _paths: dict[int, Floats] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def active(self) -> tuple[int, ...]:
        """Axes of more than one rank."""
        return tuple(axis for axis, ranks in enumerate(self.sizes) if ranks > 1)

    @cached_property
    def structure(self) -> Structure:
        """The layouts over the active axes."""
        return structure(tuple(range(len(self.type.shape))), len(self.active))

    @cached_property
    def local_bytes(self) -> Floats:
        """Bytes of the largest shard in each layout."""
        layouts, result = self.structure.layouts, np.full(len(self.structure.layouts), float(self.type.dtype.itemsize))
        for dim, size in enumerate(self.type.shape):
            piece = np.full(len(layouts), size, dtype=np.int64)
            for position, axis in enumerate(self.active):
                cut = layouts[:, position] == dim + 3
                piece[cut] = -(-piece[cut] // self.sizes[axis])
            result *= piece
        return result

    @cached_property
    def _even(self) -> NDArray[np.bool_]:
        layouts = self.structure.layouts
        even = np.ones(len(layouts), dtype=bool)
        for dim, size in enumerate(self.type.shape):
            ranks = np.ones(len(layouts), dtype=np.int64)
            for position, axis in enumerate(self.active):
                ranks[layouts[:, position] == dim + 3] *= self.sizes[axis]
            even &= size % ranks == 0
        return even

    @cached_property
    def seconds(self) -> tuple[Floats, Floats]:
        """Forward and backward seconds of every step."""
        graph, size = self.structure, self.local_bytes
        forward, backward = np.zeros(len(graph.tails)), np.zeros(len(graph.tails))
        for position, source, target, steps in graph.kinds:
            if not len(steps):
                continue
            shapes = self.shapes[self.active[position]]
            does = conversion(graph.placements[source], graph.placements[target])
            before, after = size[graph.tails[steps]], size[graph.heads[steps]]
            forward[steps] = self._action(does.forward, shapes, before, after)
            if self.type.needs_grad:
                backward[steps] = self._action(does.backward, shapes, after, before)
        uneven = ~(self._even[graph.tails] & self._even[graph.heads])
        forward[uneven] *= _UNEVEN
        backward[uneven] *= _UNEVEN
        return forward, backward

    def _action(self, name: str, shapes: Sequence[GroupShape], before: Floats, after: Floats) -> Floats:
        """Seconds of one action that turns `before` bytes on each rank into `after`."""
        if name == "none":
            return np.zeros_like(before)
        if name in ("slice", "pad", "mask"):
            return self.local.launch_s + 2 * after / self.local.memory_bandwidth
        return collective(name, shapes, np.maximum(before, after))

    def _distances(self, targets: Sequence[int]) -> None:
        """Fill `_paths`: target -> seconds from every layout."""
        wanted = sorted(set(targets) - self._paths.keys())
        if not wanted:
            return
        graph = self.structure
        lengths = sum(self.seconds) + _STEP_S
        count = len(graph.layouts)
        backwards = csr_array((lengths, (graph.heads, graph.tails)), shape=(count, count))
        rows = dijkstra(backwards, directed=True, indices=wanted)
        self._paths.update(zip(wanted, rows, strict=True))

    def _number(self, layout: Layout) -> int:
        return self.structure.number(tuple(layout[axis] for axis in self.active))

    def table(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> Floats:
        """Seconds, forward and backward, from every source (rows) to every target (columns), exact to 10 picoseconds."""
        if not self.active:
            return np.zeros((len(sources), len(targets)))
        rows, columns = [self._number(layout) for layout in sources], [self._number(layout) for layout in targets]
        self._distances(columns)
        return np.stack([self._paths[column][rows] for column in columns], axis=1)

    @property
    def _outgoing(self) -> list[Ints]:
        return _outgoing(self.structure.placements[3:], len(self.active))

    def convert(self, source: Layout, target: Layout) -> ConversionPrice:
        """The cheapest sequence from `source` to `target`."""
        if not self.active:
            return ConversionPrice((), 0.0, 0.0, 0)
        graph, here, goal = self.structure, self._number(source), self._number(target)
        self._distances([goal])
        left, (forward, backward) = self._paths[goal], self.seconds
        steps: list[Step] = []
        forward_s = backward_s = 0.0
        peak = 0.0
        while here != goal:
            edges = self._outgoing[here]
            through = forward[edges] + backward[edges] + _STEP_S + left[graph.heads[edges]]
            # The first of the best, a tenth of a step's length apart at most: float noise decides nothing.
            edge = int(edges[np.argmax(through <= through.min() + _STEP_S / 10)])
            there = int(graph.heads[edge])
            before, after = self._whole(graph.layout(here), target), self._whole(graph.layout(there), target)
            axis = self.active[int(graph.axes[edge])]
            steps.append(Step(axis, before[axis], after[axis], before, after))
            forward_s, backward_s = forward_s + float(forward[edge]), backward_s + float(backward[edge])
            entering = self.local_bytes[here] if len(steps) > 1 else 0.0
            peak = max(peak, entering + self.local_bytes[there])
            here = there
        return ConversionPrice(tuple(steps), forward_s, backward_s, int(peak))

    def _whole(self, layout: Layout, target: Layout) -> Layout:
        """A layout of the active axes with the target's placements on the others."""
        whole = list(target)
        for position, axis in enumerate(self.active):
            whole[axis] = layout[position]
        return tuple(whole)


def steps(graph: LayoutGraph, source: Layout, target: Layout) -> tuple[Step, ...]:
    """The sequence of single-axis changes that planner and emitter use, cheapest first to last step."""
    return graph.convert(source, target).steps
