"""Solving the integer program.

For each way to decide remat, one linear relaxation (HiGHS, dual simplex). Where its x are whole it is the optimum. Else
any choice that uses a strategy of reduced cost d costs at least the relaxation plus d: strategies with d above a trial
gap are left out, which leaves a program hundreds of times smaller; its integer optimum, when it lies within the trial
gap of the relaxation, is the optimum of the whole program, and otherwise gives the next trial gap. Ways whose relaxation
is no better than a choice in hand are skipped.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from autoshard.passes.intra_bill import Bill, Terms, bill
from autoshard.passes.intra_descent import Descent
from autoshard.passes.intra_graph import ChoiceGraph, wanted, yielded
from autoshard.passes.intra_memory import MemoryBuilder
from autoshard.passes.intra_model import SCALE, Skeleton, SkeletonBuilder, ties
from autoshard.passes.intra_rows import Rows
from autoshard.passes.intra_tables import Floats, Table, narrowed

_TRIAL = 0.01
"""First trial gap, relative."""

_REMAT_WAYS = 8
"""Most ways to decide remat that are tried each by itself; of more, a nested family is tried."""


@dataclass(frozen=True)
class Solved:
    """A choice of strategy for every node and of remat for every group, its bill and how good it is.

    bound: no choice has a smaller objective. gap: (objective - bound) / objective. columns, lines: size of the program.
    in_flight: microbatches that the bill's memory counts.
    """

    choice: tuple[int, ...]
    remat: tuple[bool, ...]
    bill: Bill
    objective: float
    bound: float
    gap: float
    time_s: float
    columns: int
    lines: int
    status: str
    in_flight: int


class OutOfMemory(Exception):
    """No choice fits: needed_bytes are the least of any found, by `choice` with remat `remat`.

    proved: whether none can exist (else none was found in time).
    """

    def __init__(self, choice: tuple[int, ...], bill: Bill, remat: tuple[bool, ...], in_flight: int, proved: bool) -> None:
        self.choice, self.bill, self.remat, self.proved = choice, bill, remat, proved
        self.needed_bytes = bill.memory_bytes(remat, in_flight)
        super().__init__(f"{self.needed_bytes:.0f} bytes")


@dataclass(frozen=True)
class Relaxation:
    """Answer of the linear relaxation. values None: none in time, or (infeasible) none at all. reduced: of the columns."""

    values: Floats | None
    objective: float
    reduced: Floats
    infeasible: bool


def relax(rows: Rows, time_limit_s: float) -> Relaxation:
    """Solve the rows without integrality."""
    lower, upper, ceiling, _ = rows.bounds()
    matrix = rows.matrix().tocsr()
    equal, above, below = lower == upper, (lower > -np.inf) & (lower < upper), (upper < np.inf) & (lower < upper)
    result = linprog(
        rows.cost(),
        A_ub=sparse.vstack([matrix[below], -matrix[above]]) if (below | above).any() else None,
        b_ub=np.concatenate([upper[below], -lower[above]]) if (below | above).any() else None,
        A_eq=matrix[equal],
        b_eq=lower[equal],
        bounds=np.stack([np.zeros(rows.width), ceiling], axis=1),
        method="highs-ds",
        options={"time_limit": max(time_limit_s, 0.1)},
    )
    if result.status == 0:
        return Relaxation(result.x, float(result.fun), result.lower.marginals, False)
    return Relaxation(None, -math.inf, np.zeros(0), result.status == 2)


def minimise(rows: Rows, time_limit_s: float, relative_gap: float) -> tuple[Floats | None, float]:
    """Solve the rows with integrality: values of the incumbent and a bound, infinite where nothing is feasible."""
    lower, upper, ceiling, whole = rows.bounds()
    result = milp(
        rows.cost(),
        integrality=whole,
        bounds=Bounds(np.zeros(rows.width), ceiling),
        constraints=LinearConstraint(rows.matrix(), lower, upper),
        options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": relative_gap},
    )
    if result.status == 2:
        return None, math.inf
    bound = result.mip_dual_bound
    return result.x, -math.inf if bound is None or math.isnan(bound) else float(bound)


@dataclass(frozen=True)
class Solver:
    """Solves one graph.

    remat: per group True, False, or None where the solver decides. relative_gap: at which the integer program may stop.
    """

    graph: ChoiceGraph
    tables: Sequence[Table]
    terms: Terms
    remat: tuple[bool | None, ...]
    time_limit_s: float
    relative_gap: float = 1e-6

    def solve(self) -> Solved:
        """First without bytes: where that choice fits, no bytes are needed, since remat only takes time.

        Raises OutOfMemory.
        """
        started = time.monotonic()
        bound = -math.inf
        if self.terms.price_s_per_byte == 0:
            free = _Way(self, tuple(bool(flag) for flag in self.remat), memory=False).solve(started, math.inf)
            assert free is not None
            if self._fits(free):
                return free
            bound = free.bound
        return self._with_bytes(started, bound)

    def _fits(self, solved: Solved) -> bool:
        limit = self.terms.limit_bytes
        return limit is None or solved.bill.memory_bytes(solved.remat, self.terms.in_flight) <= limit * (1 + 1e-9)

    def _with_bytes(self, started: float, bound: float) -> Solved:
        """The best of the ways to decide remat, most promising relaxation first."""
        ways, complete = self._remat_ways()
        tried = [_Way(self, remat, memory=True) for remat in ways]
        bounds = [way.relaxed(started).objective / way.skeleton.scale if not way.relaxed(started).infeasible else math.inf for way in tried]
        best: Solved | None = None
        lowest = math.inf
        for number in sorted(range(len(tried)), key=lambda number: (bounds[number], number)):
            if math.isinf(bounds[number]) and bounds[number] > 0:
                continue
            found = tried[number].solve(started, math.inf if best is None else best.objective)
            if found is None:
                lowest = min(lowest, bounds[number])
                continue
            lowest = min(lowest, found.bound)
            if best is None or found.objective < best.objective:
                best = found
        if best is None:
            raise self._shortfall(tried, started, all(math.isinf(bound) and bound > 0 for bound in bounds))
        lower = min(lowest, best.objective) if complete else bound
        lower = max(lower, bound)
        gap = max(0.0, best.objective - lower) / best.objective if best.objective > 0 else 0.0
        return replace(best, bound=lower, gap=gap, time_s=time.monotonic() - started)

    def _remat_ways(self) -> tuple[list[tuple[bool, ...]], bool]:
        """Decisions to try, and whether they are all there are.

        Of many groups, those whose segments repeat most are run again first.
        """
        open_ = [group for group, flag in enumerate(self.remat) if flag is None]
        if 2 ** len(open_) <= _REMAT_WAYS:
            chosen = [{group for group, flag in zip(open_, flags, strict=True) if flag} for flags in itertools.product((False, True), repeat=len(open_))]
        else:
            order = sorted(open_, key=lambda group: (-self.graph.groups[group].count, group))
            step = max(1, len(order) // (_REMAT_WAYS - 1))
            chosen = [set(order[:count]) for count in dict.fromkeys([*range(0, len(order), step), len(order)])]
        ways = [
            tuple(number in groups if flag is None else flag for number, flag in enumerate(self.remat)) for groups in chosen
        ]
        return ways, 2 ** len(open_) <= _REMAT_WAYS

    def _shortfall(self, tried: Sequence["_Way"], started: float, proved: bool) -> OutOfMemory:
        """The choice that needs the least bytes."""
        least: OutOfMemory | None = None
        for way in tried:
            choice = way.smallest(self.time_limit_s)
            short = OutOfMemory(choice, bill(self.graph, self.tables, choice), way.remat, self.terms.in_flight, proved)
            least = short if least is None or short.needed_bytes < least.needed_bytes else least
        assert least is not None
        return least


class _Way:
    """The program with remat decided."""

    def __init__(self, solver: Solver, remat: tuple[bool, ...], memory: bool) -> None:
        self.solver, self.remat, self.memory = solver, remat, memory
        self.skeleton = self._build(solver.graph, solver.tables)
        self._relaxed: Relaxation | None = None

    def _build(self, graph: ChoiceGraph, tables: Sequence[Table], elastic: bool = False) -> Skeleton:
        terms = self.solver.terms
        skeleton = SkeletonBuilder(graph, tables, terms, self.remat).build()
        if self.memory:
            unit = (terms.limit_bytes or 2**30) / SCALE
            wants = [[wanted(graph, use) for use in wire.uses] for wire in graph.wires]
            yields = [yielded(graph, wire) for wire in graph.wires]
            MemoryBuilder(graph, wants, yields, terms, self.remat, unit, elastic).build(skeleton)
        return skeleton

    def relaxed(self, started: float) -> Relaxation:
        """The relaxation, solved once."""
        if self._relaxed is None:
            self._relaxed = relax(self.skeleton.rows, self._left(started))
        return self._relaxed

    def _left(self, started: float) -> float:
        return self.solver.time_limit_s - (time.monotonic() - started)

    def solve(self, started: float, cutoff: float) -> Solved | None:
        """The optimum, or the best in time; None where nothing cheaper than `cutoff` was found."""
        relaxed, scale = self.relaxed(started), self.skeleton.scale
        if relaxed.values is None:
            return None if relaxed.infeasible else self._descend(started, -math.inf)
        bound = (relaxed.objective - ties(self.solver.graph)) / scale
        if bound >= cutoff:
            return None
        values = [relaxed.values[columns] for columns in self.skeleton.choice]
        if all(share.max() > 1 - 1e-6 for share in values):
            return self._solved(tuple(int(share.argmax()) for share in values), bound, started, "optimal")
        return self._branch(relaxed, bound, started, cutoff)

    def _branch(self, relaxed: Relaxation, bound: float, started: float, cutoff: float) -> Solved | None:
        """Integer programs over ever more strategies, until the optimum is among them."""
        reduced = [relaxed.reduced[columns] for columns in self.skeleton.choice]
        most = max(float(costs.max()) for costs in reduced)
        trial, best = max(_TRIAL * relaxed.objective, 1e-6), None
        while True:
            kept = [np.flatnonzero(costs <= trial) for costs in reduced]
            found, lowest = self._restricted(kept, started)
            lowest = min(lowest, relaxed.objective + trial) if trial < most else lowest
            bound = max(bound, (lowest - ties(self.solver.graph)) / self.skeleton.scale)
            if found is not None:
                best = self._solved(found, bound, started, "optimal")
                excess = best.objective * self.skeleton.scale - relaxed.objective + ties(self.solver.graph)
                if excess <= trial or trial >= most:
                    break
                trial = excess
            elif trial >= most or bound >= cutoff:
                break
            else:
                trial *= 4
            if self._left(started) <= 0:
                best = best and replace(best, status="time limit")
                break
        if best is None:
            return None if bound >= cutoff or math.isinf(bound) else self._descend(started, bound)
        late = best.status == "optimal" and best.gap > 10 * self.solver.relative_gap + 2 * ties(self.solver.graph) / SCALE
        return replace(best, status="time limit") if late else best

    def _restricted(self, kept: Sequence[np.ndarray], started: float) -> tuple[tuple[int, ...] | None, float]:
        """The integer program over some strategies of each node: its choice, and its bound."""
        nodes = tuple(
            replace(node, strategies=tuple(node.strategies[number] for number in numbers))
            for node, numbers in zip(self.solver.graph.nodes, kept, strict=True)
        )
        graph = replace(self.solver.graph, nodes=nodes)
        tables = [narrowed(graph, wire, table) for wire, table in zip(graph.wires, self.solver.tables, strict=True)]
        skeleton = self._build(graph, tables)
        values, bound = minimise(skeleton.rows, self._left(started), self.solver.relative_gap)
        bound *= self.skeleton.scale / skeleton.scale
        if values is None:
            return None, bound
        return tuple(int(n[values[c].argmax()]) for n, c in zip(kept, skeleton.choice, strict=True)), bound

    def _descend(self, started: float, bound: float) -> Solved | None:
        solver = self.solver
        terms = solver.terms if self.memory else replace(solver.terms, limit_bytes=None)
        found = Descent(solver.graph, solver.tables, terms, self.remat).best()
        return None if found is None else self._solved(found[0], bound, started, "descent")

    def smallest(self, time_limit_s: float) -> tuple[int, ...]:
        """The choice that needs the least bytes (its largest shares, where the relaxation leaves it open)."""
        skeleton = self._build(self.solver.graph, self.solver.tables, elastic=True)
        relaxed = relax(skeleton.rows, time_limit_s)
        if relaxed.values is not None:
            return tuple(int(relaxed.values[columns].argmax()) for columns in skeleton.choice)
        terms = replace(self.solver.terms, limit_bytes=None, price_s_per_byte=1.0)
        found = Descent(self.solver.graph, self.solver.tables, terms, self.remat).best()
        assert found is not None
        return found[0]

    def _solved(self, choice: tuple[int, ...], bound: float, started: float, status: str) -> Solved:
        solver, rows = self.solver, self.skeleton.rows
        cost = bill(solver.graph, solver.tables, choice)
        terms = solver.terms
        objective = cost.objective(self.remat, terms)
        bound = min(bound, objective)
        gap = (objective - bound) / objective if objective > 0 else 0.0
        took = time.monotonic() - started
        return Solved(choice, self.remat, cost, objective, bound, gap, took, rows.width, rows.height, status, terms.in_flight)
