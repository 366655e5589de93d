"""Prices of every conversion a wire may need, as arrays over (layout made, layout wanted)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.cost.convert import ConversionTables
from autoshard.passes.intra_graph import ChoiceGraph, Wire, wanted, yielded
from autoshard.placement import I, Layout, R, local_shape
from autoshard.program import TensorType

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Parts = tuple[Floats, Floats, Floats, Floats, Integers]


class ConversionPrices(Protocol):
    """Who prices conversions."""

    def conversion_tables(
        self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> ConversionTables:
        """Seconds and bytes [source, target] of converting a tensor whose whole type is given."""


@dataclass(frozen=True)
class Table:
    """Prices [source, target] of one wire's conversions.

    forward_s, backward_s: each microbatch. once_s: once a step. transient_bytes: while it runs. once_class: equal
    numbers in a row of the table share the once-a-step part (the gradient is summed from the same layout).
    made: number of the source that each of the producer's strategies yields.
    """

    sources: tuple[Layout, ...]
    targets: tuple[Layout, ...]
    forward_s: Floats
    backward_s: Floats
    once_s: Floats
    transient_bytes: Floats
    once_class: Integers
    made: Integers

    def __post_init__(self) -> None:
        for array in (self.forward_s, self.backward_s, self.once_s, self.transient_bytes, self.once_class, self.made):
            array.setflags(write=False)


def accumulated(source: Layout, target: Layout) -> Layout:
    """Layout in which the gradient of a parameter stored as `source` and used as `target` adds up over microbatches.

    Axes on which it is stored whole and used `R` hold partial sums until the end of the step; on all others each
    microbatch brings the gradient home.
    """
    return tuple(R if here == I and there == R else here for here, there in zip(source, target, strict=True))


@dataclass(frozen=True)
class TableMaker:
    """Makes tables and remembers the prices it asked for."""

    prices: ConversionPrices
    cache: dict[tuple[object, ...], Parts] = field(default_factory=dict)

    def table(self, graph: ChoiceGraph, wire: Wire) -> Table:
        """The table of a wire: sources its producer yields, targets its uses want, both in order of first mention."""
        layouts = yielded(graph, wire)
        sources = tuple(dict.fromkeys(layouts))
        targets = tuple(dict.fromkeys(layout for use in wire.uses for layout in wanted(graph, use)))
        key = (wire.type, wire.stored, sources, targets)
        if key not in self.cache:
            price = self._stored if wire.stored else self._passing
            self.cache[key] = price(wire.type, sources, targets)
        number = {layout: place for place, layout in enumerate(sources)}
        made = np.array([number[layout] for layout in layouts], dtype=np.int64)
        return Table(sources, targets, *self.cache[key], made)

    def _passing(self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> Parts:
        price = self.prices.conversion_tables(type, sources, targets)
        shape = (len(sources), len(targets))
        return (
            price.forward_s,
            price.backward_s,
            np.zeros(shape),
            price.transient_bytes,
            np.zeros(shape, dtype=np.int64),
        )

    def _stored(self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> Parts:
        """A gather runs again in backward; sums that wait for the end of the step are priced once."""
        rows = np.zeros((4, len(sources), len(targets)))
        classes = np.zeros((len(sources), len(targets)), dtype=np.int64)
        for q, source in enumerate(sources):
            middles = [accumulated(source, target) for target in targets]
            parts = list(dict.fromkeys(middles))
            classes[q] = [parts.index(middle) for middle in middles]
            each, step = (
                self.prices.conversion_tables(type, parts, targets),
                self.prices.conversion_tables(type, [source], parts),
            )
            take = classes[q], np.arange(len(targets))
            forward, once_s = each.forward_s[take], step.total_s[0]
            rows[:, q] = forward, forward + each.backward_s[take], once_s[classes[q]], each.transient_bytes[take]
        return rows[0], rows[1], rows[2], rows[3], classes


def column_of(graph: ChoiceGraph, wire: Wire, table: Table) -> list[Integers]:
    """For each use, the number of the target that each strategy of its node wants."""
    number = {layout: place for place, layout in enumerate(table.targets)}
    return [np.array([number[layout] for layout in wanted(graph, use)], dtype=np.int64) for use in wire.uses]


def local_bytes(type: TensorType, layout: Layout, axis_sizes: Sequence[int]) -> int:
    """Bytes of the largest shard of a tensor."""
    return TensorType(local_shape(type.shape, layout, axis_sizes), type.dtype).nbytes


def storage_of(layout: Layout) -> Layout:
    """Layouts that one tensor in memory can stand for have the same storage: `I` and `R` differ in gradients only."""
    return tuple(I if placement == R else placement for placement in layout)


@dataclass(frozen=True)
class Narrowing:
    """What is left of a table when nodes have fewer strategies: the numbers of the rows and columns kept."""

    table: Table
    rows: Integers
    columns: Integers


def narrowed(graph: ChoiceGraph, wire: Wire, table: Table) -> Narrowing:
    """The part of a table that a graph whose nodes have fewer strategies needs."""
    layouts = yielded(graph, wire)
    sources = tuple(dict.fromkeys(layouts))
    targets = tuple(dict.fromkeys(layout for use in wire.uses for layout in wanted(graph, use)))
    row_of = {layout: place for place, layout in enumerate(table.sources)}
    column_of_ = {layout: place for place, layout in enumerate(table.targets)}
    rows = np.array([row_of[layout] for layout in sources], dtype=np.int64)
    columns = np.array([column_of_[layout] for layout in targets], dtype=np.int64)
    number = {layout: place for place, layout in enumerate(sources)}
    made = np.array([number[layout] for layout in layouts], dtype=np.int64)
    take = np.ix_(rows, columns)
    left = Table(
        sources,
        targets,
        table.forward_s[take],
        table.backward_s[take],
        table.once_s[take],
        table.transient_bytes[take],
        table.once_class[take],
        made,
    )
    return Narrowing(left, rows, columns)
