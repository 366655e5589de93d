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
class ConversionTables:
    """Prices as arrays [source, target]; fields as in `ConversionPrice`."""

    forward_s: Floats
    backward_s: Floats
    transient_bytes: Floats

    @property
    def total_s(self) -> Floats:
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

    @cached_property
    def leaving(self) -> tuple[Ints, Ints]:
        """Steps in the order of the layouts that they leave, and where in it each layout's steps start."""
        order = np.argsort(self.tails, kind="stable")
        return order, np.searchsorted(self.tails[order], np.arange(len(self.layouts)))

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


@dataclass(frozen=True)
class LayoutGraph:
    """The priced steps between all layouts of one tensor type.

    sizes: ranks of each mesh axis. shapes: the process groups of each axis.
    """

    type: TensorType
    sizes: tuple[int, ...]
    shapes: tuple[tuple[GroupShape, ...], ...]
    local: LocalCosts
    _next: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False, compare=False)

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

    def _route(self, targets: Sequence[int]) -> None:
        """Fill `_next`: target -> the step to take next from every layout (any step, where one has arrived)."""
        wanted = sorted(set(targets) - self._next.keys())
        if not wanted:
            return
        graph, count = self.structure, len(self.structure.layouts)
        lengths = sum(self.seconds) + _STEP_S
        backwards = csr_array((lengths, (graph.heads, graph.tails)), shape=(count, count))
        order, starts = graph.leaving
        for target, left in zip(wanted, dijkstra(backwards, directed=True, indices=wanted), strict=True):
            through = (lengths + left[graph.heads])[order]
            best = np.minimum.reduceat(through, starts)
            # The first of the best, a tenth of a step's length apart at most: float noise decides nothing.
            good = through <= best[graph.tails[order]] + _STEP_S / 10
            first = np.minimum.reduceat(np.where(good, np.arange(len(order)), len(order)), starts)
            self._next[target] = order[first].astype(np.int32)

    def _number(self, layout: Layout) -> int:
        return self.structure.number(tuple(layout[axis] for axis in self.active))

    def tables(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> ConversionTables:
        """Prices from every source (rows) to every target (columns), the same as `convert` gives one by one."""
        forward_s, backward_s, peak = (np.zeros((len(sources), len(targets))) for _ in range(3))
        if not self.active:
            return ConversionTables(forward_s, backward_s, peak)
        rows = np.array([self._number(layout) for layout in sources], dtype=np.int64)
        columns = [self._number(layout) for layout in targets]
        self._route(columns)
        forward, backward = self.seconds
        for column, goal in enumerate(columns):
            here, entering = rows, np.zeros(len(rows))
            going = here != goal
            while going.any():
                step = self._next[goal][here]
                there = self.structure.heads[step]
                alive = entering + self.local_bytes[there]
                forward_s[:, column] += np.where(going, forward[step], 0.0)
                backward_s[:, column] += np.where(going, backward[step], 0.0)
                peak[:, column] = np.where(going, np.maximum(peak[:, column], alive), peak[:, column])
                here, entering = np.where(going, there, here), self.local_bytes[there]
                going = here != goal
        return ConversionTables(forward_s, backward_s, peak)

    def convert(self, source: Layout, target: Layout) -> ConversionPrice:
        """The cheapest sequence from `source` to `target`."""
        if not self.active:
            return ConversionPrice((), 0.0, 0.0, 0)
        graph, here, goal = self.structure, self._number(source), self._number(target)
        self._route([goal])
        forward, backward = self.seconds
        steps: list[Step] = []
        forward_s = backward_s = entering = peak = 0.0
        while here != goal:
            edge = int(self._next[goal][here])
            there = int(graph.heads[edge])
            before, after = self._whole(graph.layout(here), target), self._whole(graph.layout(there), target)
            axis = self.active[int(graph.axes[edge])]
            steps.append(Step(axis, before[axis], after[axis], before, after))
            forward_s, backward_s = forward_s + float(forward[edge]), backward_s + float(backward[edge])
            peak = max(peak, entering + float(self.local_bytes[there]))
            here, entering = there, float(self.local_bytes[there])
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
