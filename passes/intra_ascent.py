"""Bounds without a linear program: message passing on the choice graph.

Every use is an edge between the node that makes a value and the node that reads it, priced [q,p]; what several uses
share is split between them, bytes have a price. For any messages a[q], b[p] on the edges

    sum over nodes of min_s (cost[s] + messages at the layouts of s)
  + sum over edges of min_qp (price[q,p] - a[q] - b[p])

is no more than any choice costs. Passes over the nodes, as in Kolmogorov's TRW-S (2006), raise it; moving the shared
prices between uses raises it further, mostly to the optimum; and the nodes' sums point at a good choice. A strategy or
a pair whose term exceeds its minimum by more than (a known choice - bound) is in no better choice: leaving it out keeps
the optimum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.passes.intra_bill import Terms, savers, share_group, shares
from autoshard.passes.intra_graph import ChoiceGraph, wanted, yielded
from autoshard.passes.intra_tables import Floats, Integers, Table, column_of, local_bytes


@dataclass
class _Edge:
    """One use. ends: (producer, consumer). layout[k][s]: the row or column of strategy s of end k; order, starts: the
    strategies of an end sorted by layout; message[k]: at end k. columns: targets of the table that the use wants.
    """

    wire: int
    use: int
    share: str
    ends: tuple[int, int]
    price: Floats
    layout: tuple[Integers, Integers]
    order: tuple[Integers, Integers]
    starts: tuple[Integers, Integers]
    message: list[Floats]
    columns: Integers

    def least(self, end: int, cost: Floats) -> Floats:
        """Least cost of the end's strategies of each layout."""
        return np.minimum.reduceat(cost[self.order[end]], self.starts[end])

    def slack(self) -> Floats:
        """price - messages."""
        return self.price - self.message[0][:, None] - self.message[1][None, :]


@dataclass(frozen=True)
class Excess:
    """How much more than the bound a choice costs at least.

    strategies[n]: with each strategy of node n. pairs: (wire, share) -> [source, target], with that conversion.
    """

    strategies: tuple[Floats, ...]
    pairs: dict[tuple[int, str], Floats]


class Ascent:
    """Messages on a graph, kept from run to run so that another price of bytes starts from the last."""

    def __init__(self, graph: ChoiceGraph, tables: Sequence[Table], terms: Terms, remat: Sequence[bool]) -> None:
        self.graph, self.tables, self.terms, self.remat = graph, tables, terms, remat
        self.seconds = [self._seconds(number) for number in range(len(graph.nodes))]
        self.bytes = self._bytes()
        self.edges = [edge for number in range(len(graph.wires)) for edge in self._edges(number)]
        for edge in [edge for edge in self.edges if edge.ends[0] == edge.ends[1]]:
            self.seconds[edge.ends[0]] = self.seconds[edge.ends[0]] + edge.price[edge.layout[0], edge.layout[1]]
        self.edges = [edge for edge in self.edges if edge.ends[0] != edge.ends[1]]
        lanes: dict[tuple[int, str], list[_Edge]] = {}
        for edge in self.edges:
            lanes.setdefault((edge.wire, edge.share), []).append(edge)
        self.lanes = [edges for edges in lanes.values() if len(edges) > 1]
        self.touching: list[list[tuple[_Edge, int]]] = [[] for _ in graph.nodes]
        for edge in self.edges:
            for end in (0, 1):
                self.touching[edge.ends[end]].append((edge, end))

    def _seconds(self, number: int) -> Floats:
        node, microbatches = self.graph.nodes[number], self.terms.microbatches
        weight = 2.0 if self.remat[node.group] else 1.0
        each = [microbatches * (weight * s.forward_s + s.backward_s) + s.optimizer_s for s in node.strategies]
        return node.count * np.array(each, dtype=np.float64)

    def _bytes(self) -> list[Floats]:
        """Bytes at the peak that each strategy is sure to add: parameters, and its part of what is saved."""
        found = []
        for node in self.graph.nodes:
            held = [s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes for s in node.strategies]
            kept = [0 if self.remat[node.group] else s.kept_bytes for s in node.strategies]
            found.append(
                node.count
                * (np.array(held, dtype=np.float64) + self.terms.in_flight * np.array(kept, dtype=np.float64))
            )
        for wire in self.graph.wires:
            for group, keepers in savers(self.graph, wire).items():
                if self.remat[group]:
                    continue
                copies = max(keeper.count for keeper in keepers) * self.terms.in_flight / len(keepers)
                for keeper in keepers:
                    holder = wire.producer if keeper.use is None else wire.uses[keeper.use].node
                    layouts = (
                        yielded(self.graph, wire) if keeper.use is None else wanted(self.graph, wire.uses[keeper.use])
                    )
                    sizes = [local_bytes(wire.type, layout, self.graph.axis_sizes) for layout in layouts]
                    found[holder] += copies * np.array(sizes, dtype=np.float64)
        for number, remat in enumerate(self.remat):
            for wire_number, copies in self.graph.groups[number].boundary if remat else ():
                wire = self.graph.wires[wire_number]
                sizes = [local_bytes(wire.type, layout, self.graph.axis_sizes) for layout in yielded(self.graph, wire)]
                found[wire.producer] += self.terms.in_flight * copies * np.array(sizes, dtype=np.float64)
        return found

    def _edges(self, number: int) -> list[_Edge]:
        wire, table = self.graph.wires[number], self.tables[number]
        wants = column_of(self.graph, wire, table)
        found = []
        for share, uses in shares(wire).items():
            first = wire.uses[uses[0]]
            weight = 2.0 if self.remat[share_group(self.graph, wire, first)] and not wire.stored else 1.0
            # Uses of several layouts may share one sum at the end of the step: of it, a pair is charged one use's part.
            each = self.terms.microbatches * (weight * table.forward_s + table.backward_s) + table.once_s / len(uses)
            sharing = np.bincount(np.concatenate([np.unique(wants[use]) for use in uses]), minlength=len(table.targets))
            for use in uses:
                columns, consumer = np.unique(wants[use], return_inverse=True)
                price = first.count * each[:, columns] / sharing[columns]
                orders = (np.argsort(table.made, kind="stable"), np.argsort(consumer, kind="stable"))
                sorted_ = (table.made[orders[0]], consumer[orders[1]])
                starts = tuple(np.flatnonzero(np.r_[True, np.diff(layouts) > 0]) for layouts in sorted_)
                messages = [np.zeros(len(table.sources)), np.zeros(len(columns))]
                ends = (wire.producer, wire.uses[use].node)
                found.append(
                    _Edge(
                        number,
                        use,
                        share,
                        ends,
                        price,
                        (table.made, consumer),
                        orders,
                        (starts[0], starts[1]),
                        messages,
                        columns,
                    )
                )
        return found

    @cached_property
    def least_bytes(self) -> float:
        """No choice needs fewer bytes at the peak."""
        return sum(float(bytes_.min()) for bytes_ in self.bytes) + self.least_working_bytes

    @cached_property
    def least_working_bytes(self) -> float:
        """No choice needs fewer bytes beside all that is kept."""
        return max((float(min(s.transient_bytes for s in node.strategies)) for node in self.graph.nodes), default=0.0)

    def smallest(self) -> tuple[int, ...]:
        """The choice whose nodes, each by itself, need the fewest bytes."""
        return tuple(int(bytes_.argmin()) for bytes_ in self.bytes)

    def run(self, byte_price: float, passes: int) -> tuple[float, tuple[int, ...]]:
        """Some passes forth and back: a bound of seconds + byte_price * bytes at the peak, and a good choice."""
        self.costs = [s + byte_price * b for s, b in zip(self.seconds, self.bytes, strict=True)]
        last = -np.inf
        for count in range(passes):
            self._pass(range(len(self.costs)))
            self._pass(range(len(self.costs) - 1, -1, -1))
            for edges in self.lanes:
                self._split_again(edges)
            if count % 5 == 4:
                lower = self._lower()
                if lower <= last + 1e-7 * abs(last):
                    break
                last = lower
        return self._lower() + byte_price * self.least_working_bytes, self._decoded()

    def excess(self) -> Excess:
        """Of everything, under the messages of the last run."""
        sums = [self._sum(number) for number in range(len(self.costs))]
        pairs: dict[tuple[int, str], Floats] = {}
        for edge in self.edges:
            slack, key = edge.slack(), (edge.wire, edge.share)
            if key not in pairs:
                pairs[key] = np.full((slack.shape[0], len(self.tables[edge.wire].targets)), np.inf)
            pairs[key][:, edge.columns] = np.minimum(pairs[key][:, edge.columns], slack - slack.min())
        return Excess(tuple(total - total.min() for total in sums), pairs)

    def _sum(self, number: int) -> Floats:
        total = self.costs[number].copy()
        for edge, end in self.touching[number]:
            total += edge.message[end][edge.layout[end]]
        return total

    def _pass(self, order: range) -> None:
        """Each node in turn takes what its edges have over and hands a share to those ahead; the bound never falls."""
        for number in order:
            touching = self.touching[number]
            if not touching:
                continue
            for edge, end in touching:
                edge.message[end] = edge.message[end] + edge.slack().min(axis=1 - end)
            ahead = [(edge, end) for edge, end in touching if (edge.ends[1 - end] > number) == (order.step > 0)]
            if not ahead:
                continue
            share = 1.0 / max(len(ahead), len(touching) - len(ahead))
            total = share * self._sum(number)
            for edge, end in ahead:
                edge.message[end] = edge.message[end] - edge.least(end, total)

    def _split_again(self, edges: Sequence[_Edge]) -> None:
        """Move a shared conversion's price from uses that have more than they need to those that lack it.

        Each part stays 0 or more and the parts of a pair add up to its price, so that no set of uses pays more than it.
        """
        shape = (len(edges), edges[0].price.shape[0], len(self.tables[edges[0].wire].targets))
        price, slack, wants = np.zeros(shape), np.zeros(shape), np.zeros((shape[0], 1, shape[2]))
        for number, edge in enumerate(edges):
            price[number][:, edge.columns], slack[number][:, edge.columns] = edge.price, edge.slack()
            wants[number, 0, edge.columns] = 1.0
        over = slack - wants * (slack.sum(axis=0) / np.maximum(wants.sum(axis=0), 1.0))
        give = np.minimum(np.maximum(over, 0.0), price)
        need = np.maximum(-over, 0.0)
        with np.errstate(invalid="ignore", divide="ignore"):
            take = np.nan_to_num(need * (give.sum(axis=0) / need.sum(axis=0)))
        price += np.where(need.sum(axis=0) > 0, take - give, 0.0)
        for number, edge in enumerate(edges):
            edge.price = price[number][:, edge.columns]

    def _lower(self) -> float:
        nodes = sum(float(self._sum(number).min()) for number in range(len(self.costs)))
        return nodes + sum(float(edge.slack().min()) for edge in self.edges)

    def _decoded(self) -> tuple[int, ...]:
        """One node after the other, beside those before it, by messages from those after it."""
        choice: list[int] = []
        for number, cost in enumerate(self.costs):
            total = cost.copy()
            for edge, end in self.touching[number]:
                other = edge.ends[1 - end]
                if other > number:
                    total += edge.message[end][edge.layout[end]]
                    continue
                layout = edge.layout[1 - end][choice[other]]
                total += (edge.price[:, layout] if end == 0 else edge.price[layout])[edge.layout[end]]
            choice.append(int(total.argmin()))
        return tuple(choice)
