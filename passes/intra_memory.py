"""Bytes in the integer program: what is kept, what works beside it, and the limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.passes.intra_bill import Saver, Terms, savers
from autoshard.passes.intra_graph import ChoiceGraph, Wire
from autoshard.passes.intra_model import Expression, Skeleton
from autoshard.passes.intra_rows import Rows
from autoshard.passes.intra_tables import Floats, Integers, local_bytes, storage_of
from autoshard.placement import Layout


@dataclass(frozen=True)
class MemoryBuilder:
    """Adds bytes to a skeleton.

    wants[t][u], yields[t]: layouts by strategy, as in `wanted` and `yielded`. remat[g]: whether group g keeps its
    inputs only. unit_bytes: bytes of one unit in the rows.
    """

    graph: ChoiceGraph
    wants: Sequence[Sequence[Sequence[Layout]]]
    yields: Sequence[Sequence[Layout]]
    terms: Terms
    remat: tuple[bool, ...]
    unit_bytes: float

    def build(self, skeleton: Skeleton) -> None:
        """Families "saved", "transient", "again", "memory".

        "transient": w >= bytes of one node or conversion at work; "again": v >= bytes that one segment saves while it
        is run again.
        """
        rows, one = skeleton.rows, np.array([self.unit_bytes])
        total = list(skeleton.sums.held_bytes)
        working, again = rows.columns(np.zeros(1)), rows.columns(np.zeros(1))
        total += [(working, one), (again, one)]
        for columns, bytes_ in skeleton.sums.transients:
            self._at_least(rows, "transient", working, [(columns, bytes_)])
        for group, remat in enumerate(self.remat):
            saved = self._saved(skeleton, group)
            kept = self._boundary(skeleton, group) if remat else saved
            total += [(columns, self.terms.in_flight * bytes_) for columns, bytes_ in kept]
            if remat:
                copies = self.graph.groups[group].count
                self._at_least(rows, "again", again, [(columns, bytes_ / copies) for columns, bytes_ in saved])
        self._limit(skeleton, total)

    def _at_least(self, rows: Rows, family: str, column: Integers, terms: Sequence[Expression]) -> None:
        """column * unit >= sum of terms."""
        line = rows.rows(family, 0.0, np.inf)
        rows.enter(line, column, 1.0)
        for columns, bytes_ in terms:
            rows.enter(line, columns, -bytes_ / self.unit_bytes)

    def _saved(self, skeleton: Skeleton, group: int) -> list[Expression]:
        """Bytes that autograd keeps in a group, over its equal segments."""
        terms: list[Expression] = []
        for node, columns in zip(self.graph.nodes, skeleton.choice, strict=True):
            if node.group == group and any(strategy.kept_bytes for strategy in node.strategies):
                terms.append((columns, node.count * np.array([float(s.kept_bytes) for s in node.strategies])))
        for number, wire in enumerate(self.graph.wires):
            keepers = savers(self.graph, wire).get(group, [])
            if not keepers:
                continue
            copies = max(keeper.count for keeper in keepers)
            parts = [self._layouts(skeleton, number, keeper) for keeper in keepers]
            if len(parts) == 1:
                columns, layouts = parts[0]
                terms.append((columns, copies * self._bytes(wire, layouts)))
            else:
                terms.append(self._kept_once(skeleton.rows, wire, copies, parts))
        return terms

    def _layouts(self, skeleton: Skeleton, number: int, keeper: Saver) -> tuple[Integers, Sequence[Layout]]:
        wire = self.graph.wires[number]
        if keeper.use is None:
            return skeleton.choice[wire.producer], self.yields[number]
        return skeleton.choice[wire.uses[keeper.use].node], self.wants[number][keeper.use]

    def _kept_once(
        self, rows: Rows, wire: Wire, copies: int, parts: Sequence[tuple[Integers, Sequence[Layout]]]
    ) -> Expression:
        """m[t,c]: value t is kept in storage c; "saved": m[t,c] >= sum of a keeper's x whose layout is stored as c."""
        stored = [[storage_of(layout) for layout in layouts] for _, layouts in parts]
        classes = {layout: place for place, layout in enumerate(dict.fromkeys(c for part in stored for c in part))}
        columns = rows.columns(np.zeros(len(classes)))
        for (choice, _), kept in zip(parts, stored, strict=True):
            places = np.array([classes[layout] for layout in kept])
            present = np.unique(places)
            lines = rows.rows("saved", 0.0, np.inf, len(present))
            rows.enter(lines, columns[present], 1.0)
            rows.enter(lines[np.searchsorted(present, places)], choice, -1.0)
        return columns, copies * self._bytes(wire, list(classes))

    def _bytes(self, wire: Wire, layouts: Sequence[Layout]) -> Floats:
        return np.array([local_bytes(wire.type, layout, self.graph.axis_sizes) for layout in layouts], dtype=np.float64)

    def _boundary(self, skeleton: Skeleton, group: int) -> list[Expression]:
        """Bytes that remat keeps of a group: the values that enter it."""
        return [
            (
                skeleton.choice[self.graph.wires[number].producer],
                copies * self._bytes(self.graph.wires[number], self.yields[number]),
            )
            for number, copies in self.graph.groups[group].boundary
        ]

    def _limit(self, skeleton: Skeleton, total: list[Expression]) -> None:
        """ "memory": held + in flight * kept + working <= limit; the price of a byte."""
        rows, limit = skeleton.rows, self.terms.limit_bytes
        if self.terms.price_s_per_byte:
            for columns, bytes_ in total:
                rows.charge(columns, bytes_ * self.terms.price_s_per_byte * skeleton.scale)
        if limit is not None:
            line = rows.rows("memory", -np.inf, limit / self.unit_bytes)
            for columns, bytes_ in total:
                rows.enter(line, columns, bytes_ / self.unit_bytes)
