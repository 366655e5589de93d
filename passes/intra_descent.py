"""A choice of strategies without a solver: one node at a time, to the strategy that is best beside its neighbours.

Used where the integer program has no answer in time. The result is judged by `bill`; nothing is promised of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.passes.intra_bill import Bill, Terms, bill, savers
from autoshard.passes.intra_graph import ChoiceGraph, wanted, yielded
from autoshard.passes.intra_tables import Floats, Integers, Table, column_of, local_bytes


@dataclass(frozen=True)
class Descent:
    """Sweeps over the nodes of a graph. Sharing of conversions is seen by the bill only, not by the single steps."""

    graph: ChoiceGraph
    tables: Sequence[Table]
    terms: Terms
    remat: tuple[bool, ...]

    def best(self, start: Sequence[int] | None = None) -> tuple[tuple[int, ...], Bill] | None:
        """The cheapest choice met that fits, as bytes are made dearer step by step; None where nothing met fits."""
        first = tuple(start) if start is not None else self._cheapest_alone()
        found: tuple[float, tuple[int, ...], Bill] | None = None
        for price in (self.terms.price_s_per_byte, *(1e-18 * 8.0**power for power in range(20))):
            choice = self._settle(first, price)
            cost = bill(self.graph, self.tables, choice)
            objective = cost.objective(self.remat, self.terms)
            fits = self.terms.limit_bytes is None or cost.memory_bytes(self.remat, self.terms.in_flight) <= self.terms.limit_bytes
            if fits and (found is None or objective < found[0]):
                found = (objective, choice, cost)
            if fits and self.terms.limit_bytes is None:
                break
        return None if found is None else found[1:]

    def _cheapest_alone(self) -> tuple[int, ...]:
        return tuple(int(self._own[number][0].argmin()) for number in range(len(self.graph.nodes)))

    def _settle(self, start: Sequence[int], byte_price: float, sweeps: int = 6) -> tuple[int, ...]:
        choice = list(start)
        for _ in range(sweeps):
            before = list(choice)
            for number in range(len(self.graph.nodes)):
                seconds, bytes_ = self._own[number]
                cost = seconds + byte_price * bytes_ + self._neighbours(number, choice)
                choice[number] = int(cost.argmin())
            if choice == before:
                break
        return tuple(choice)

    @cached_property
    def _wants(self) -> list[list[Integers]]:
        return [column_of(self.graph, wire, table) for wire, table in zip(self.graph.wires, self.tables, strict=True)]

    @cached_property
    def _touching(self) -> list[list[tuple[int, int | None]]]:
        """For each node its wires, as (wire, use) and (wire, None) for what it produces."""
        found: list[list[tuple[int, int | None]]] = [[] for _ in self.graph.nodes]
        for number, wire in enumerate(self.graph.wires):
            found[wire.producer].append((number, None))
            for use, reader in enumerate(wire.uses):
                found[reader.node].append((number, use))
        return found

    @cached_property
    def _prices(self) -> list[Floats]:
        return [self.terms.microbatches * (t.forward_s + t.backward_s) + t.once_s for t in self.tables]

    @cached_property
    def _own(self) -> list[tuple[Floats, Floats]]:
        """Seconds a step and bytes at the peak of each node's strategies alone."""
        found = []
        for node in self.graph.nodes:
            each = np.array([s.forward_s + s.backward_s for s in node.strategies])
            step = np.array([s.optimizer_s for s in node.strategies])
            held = np.array([s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes for s in node.strategies], dtype=np.float64)
            found.append((node.count * (self.terms.microbatches * each + step), node.count * held))
        for wire in self.graph.wires:
            for keepers in savers(self.graph, wire).values():
                keeper = keepers[0]
                holder = wire.producer if keeper.use is None else wire.uses[keeper.use].node
                layouts = yielded(self.graph, wire) if keeper.use is None else wanted(self.graph, wire.uses[keeper.use])
                kept = [local_bytes(wire.type, layout, self.graph.axis_sizes) for layout in layouts]
                found[holder][1][:] += self.terms.in_flight * keeper.count * np.array(kept, dtype=np.float64)
        return found

    def _neighbours(self, number: int, choice: Sequence[int]) -> Floats:
        cost = np.zeros(len(self.graph.nodes[number].strategies))
        for wire_number, use in self._touching[number]:
            wire, table, wants = self.graph.wires[wire_number], self.tables[wire_number], self._wants[wire_number]
            price = self._prices[wire_number]
            if use is None:
                for reader, want in zip(wire.uses, wants, strict=True):
                    cost += reader.count * price[table.made, want[choice[reader.node]]]
            else:
                cost += wire.uses[use].count * price[table.made[choice[wire.producer]], wants[use]]
        return cost
