"""The integer program of `intra_op`: columns x, e, y and the families that tie them; bytes are in `intra_memory`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.passes.intra_bill import Terms, share_group, shares
from autoshard.passes.intra_graph import ChoiceGraph
from autoshard.passes.intra_rows import Rows
from autoshard.passes.intra_tables import Floats, Integers, Table, column_of

SCALE = 100.0
"""About what the objective is brought to: HiGHS takes 1e-7 for nothing."""

_TIE = 1e-8 * SCALE
"""What a later strategy or a needless conversion costs at most, so that ties fall one way."""

Expression = tuple[Integers, Floats]
"""(columns, coefficients) of a linear expression."""


@dataclass
class Sums:
    """Linear expressions met while columns are made.

    held_bytes: parameters, gradients, optimizer states. transients: one expression for each thing that needs working
    memory while it runs.
    """

    held_bytes: list[Expression] = field(default_factory=list)
    transients: list[Expression] = field(default_factory=list)


@dataclass(frozen=True)
class Skeleton:
    """The program without bytes. choice[n]: columns of x[n, .]. scale: objective units a second."""

    rows: Rows
    choice: tuple[Integers, ...]
    scale: float
    sums: Sums


@dataclass(frozen=True)
class SkeletonBuilder:
    """Builds x, e, y, z. remat[g]: whether group g's forward runs twice. offered: the pairs [q,p] that get columns, by
    (wire, share); all pairs of wires that it lacks.
    """

    graph: ChoiceGraph
    tables: Sequence[Table]
    terms: Terms
    remat: tuple[bool, ...]
    offered: Mapping[tuple[int, str], NDArray[np.bool_]]

    def build(self) -> Skeleton:
        """Families "choice", "producer", "consumer", "shared", "summed"."""
        skeleton = Skeleton(Rows(), (), self._scale(), Sums())
        choice = tuple(self._choose(skeleton, number) for number in range(len(self.graph.nodes)))
        skeleton = Skeleton(skeleton.rows, choice, skeleton.scale, skeleton.sums)
        for number in range(len(self.graph.wires)):
            self._transport(skeleton, number)
        return skeleton

    def _scale(self) -> float:
        cheapest = (
            node.count * min((strategy.forward_s + strategy.backward_s for strategy in node.strategies), default=0.0)
            for node in self.graph.nodes
        )
        return SCALE / max(self.terms.microbatches * sum(cheapest), 1e-9)

    def _forward_weight(self, group: int) -> float:
        return 2.0 if self.remat[group] else 1.0

    def _choose(self, skeleton: Skeleton, number: int) -> Integers:
        """x[n,s]; "choice": sum_s x[n,s] = 1."""
        node, rows, sums = self.graph.nodes[number], skeleton.rows, skeleton.sums
        priced = np.array(
            [
                (
                    s.forward_s,
                    s.backward_s,
                    s.optimizer_s,
                    s.parameter_bytes + s.gradient_bytes + s.optimizer_bytes,
                    s.transient_bytes,
                )
                for s in node.strategies
            ],
            dtype=np.float64,
        ).T
        forward, backward, optimizer, held, transient = priced
        each = self._forward_weight(node.group) * forward + backward
        cost = node.count * (self.terms.microbatches * each + optimizer) * skeleton.scale
        columns = rows.columns(cost + _TIE * np.arange(len(cost)) / len(cost), ceiling=1.0, whole=True)
        rows.enter(rows.rows("choice", 1.0, 1.0), columns, 1.0)
        if held.any():
            sums.held_bytes.append((columns, node.count * held))
        if transient.any():
            sums.transients.append((columns, transient))
        return columns

    def _transport(self, skeleton: Skeleton, number: int) -> None:
        """The transports of one wire; those whose conversions are shared are priced through y."""
        wire, table, rows = self.graph.wires[number], self.tables[number], skeleton.rows
        wants = column_of(self.graph, wire, table)
        for share, uses in shares(wire).items():
            first = wire.uses[uses[0]]
            group = share_group(self.graph, wire, first)
            weight = 1.0 if wire.stored else self._forward_weight(group)
            each = (
                self.terms.microbatches * first.count * (weight * table.forward_s + table.backward_s) * skeleton.scale
            )
            once = first.count * table.once_s * skeleton.scale
            offered = self.offered.get((number, share), np.ones(each.shape, dtype=bool))
            flows = [self._flow(skeleton, number, use, wants[use], offered) for use in uses]
            if len(flows) == 1:
                used = flows[0] >= 0
                rows.charge(flows[0][used], (each + once)[used])
            else:
                _shared(rows, flows, each)
                _summed(rows, flows, table, once)
            if table.transient_bytes.any():
                skeleton.sums.transients.extend((flow[flow >= 0], table.transient_bytes[flow >= 0]) for flow in flows)

    def _flow(self, skeleton: Skeleton, number: int, use: int, wants: Integers, offered: NDArray[np.bool_]) -> Integers:
        """e[t,u,q,p] as a matrix of column numbers, -1 where there is none.

        "producer": sum_p e[t,u,q,p] = sum of x[producer,s] that yield q; "consumer": sum_q e[t,u,q,p] = sum of x[u,s]
        that want p.
        """
        wire, table, rows = self.graph.wires[number], self.tables[number], skeleton.rows
        targets = np.unique(wants)
        exists = np.zeros(offered.shape, dtype=bool)
        exists[:, targets] = offered[:, targets]
        flow = np.full(offered.shape, -1, dtype=np.int64)
        flow[exists] = rows.columns(np.where(table.forward_s + table.backward_s > 0, _TIE, 0.0)[exists])
        q, p = exists.nonzero()
        made = rows.rows("producer", 0.0, 0.0, len(table.sources))
        rows.enter(made[q], flow[exists], 1.0)
        rows.enter(made[table.made], skeleton.choice[wire.producer], -1.0)
        got = np.full(len(table.targets), -1, dtype=np.int64)
        got[targets] = rows.rows("consumer", 0.0, 0.0, len(targets))
        rows.enter(got[p], flow[exists], 1.0)
        rows.enter(got[wants], skeleton.choice[wire.uses[use].node], -1.0)
        return flow


def _shared(rows: Rows, flows: Sequence[Integers], price: Floats) -> None:
    """y[t,q,p] at price[q,p], where that is not 0; "shared": y[t,q,p] >= e[t,u,q,p]."""
    wanted = np.logical_or.reduce([flow >= 0 for flow in flows]) & (price > 0)
    carriers = np.full(price.shape, -1, dtype=np.int64)
    carriers[wanted] = rows.columns(price[wanted])
    for flow in flows:
        both = wanted & (flow >= 0)
        lines = rows.rows("shared", 0.0, np.inf, int(both.sum()))
        rows.enter(lines, carriers[both], 1.0)
        rows.enter(lines, flow[both], -1.0)


def _summed(rows: Rows, flows: Sequence[Integers], table: Table, price: Floats) -> None:
    """z[t,q,c] for the once-a-step part c of a shared parameter; "summed": z[t,q,c] >= sum of e[t,u,q,p], p in c."""
    for q in range(len(table.sources)):
        for part in np.unique(table.once_class[q][price[q] > 0]):
            members = table.once_class[q] == part
            column = rows.columns(np.array([price[q][members].max()]))
            for flow in flows:
                taken = flow[q][members & (flow[q] >= 0)]
                line = rows.rows("summed", 0.0, np.inf)
                rows.enter(line, column, 1.0)
                rows.enter(line, taken, -1.0)


def ties(graph: ChoiceGraph) -> float:
    """Most that `_TIE` can add to an objective."""
    return _TIE * (len(graph.nodes) + sum(len(wire.uses) for wire in graph.wires))
