"""Solving the integer program.

For each way to decide remat, one linear relaxation (HiGHS, dual simplex). Where its x are whole it is the optimum. Else
a choice that uses a column of reduced cost d costs at least the relaxation plus d: columns with d above a trial gap are
left out, which leaves a far smaller program; its integer optimum, when it lies within the trial gap of the relaxation,
is the optimum of the whole program, and otherwise gives the next trial gap. Ways whose relaxation is no better than a
choice in hand are skipped.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from autoshard.passes.intra_bill import Bill, Terms, bill
from autoshard.passes.intra_descent import Descent
from autoshard.passes.intra_graph import ChoiceGraph, wanted, yielded
from autoshard.passes.intra_memory import MemoryBuilder
from autoshard.passes.intra_model import SCALE, SkeletonBuilder, ties
from autoshard.passes.intra_rows import Rows
from autoshard.passes.intra_tables import Floats, Table

_TRIAL = 0.003
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
    """Answer of the linear relaxation: values (None: none in time), objective and reduced costs of the columns."""

    values: Floats | None
    objective: float
    reduced: Floats


def relax(rows: Rows, cost: Floats, fixed: int | None, time_limit_s: float) -> Relaxation:
    """Minimise `cost` over the rows without integrality, column `fixed` at 0."""
    lower, upper, ceiling, _ = rows.bounds()
    if fixed is not None:
        ceiling[fixed] = 0.0
    matrix = rows.matrix().tocsr()
    equal, above, below = lower == upper, (lower > -np.inf) & (lower < upper), (upper < np.inf) & (lower < upper)
    unequal = bool((below | above).any())
    result = linprog(
        cost,
        A_ub=sparse.vstack([matrix[below], -matrix[above]]) if unequal else None,
        b_ub=np.concatenate([upper[below], -lower[above]]) if unequal else None,
        A_eq=matrix[equal],
        b_eq=lower[equal],
        bounds=np.stack([np.zeros(rows.width), ceiling], axis=1),
        method="highs-ds",
        options={"time_limit": max(time_limit_s, 0.1)},
    )
    if result.status != 0:
        return Relaxation(None, -math.inf, np.zeros(0))
    return Relaxation(result.x, float(result.fun), result.lower.marginals)


def minimise(rows: Rows, kept: NDArray[np.int64], time_limit_s: float, relative_gap: float) -> tuple[Floats | None, float]:
    """Solve the rows over the kept columns, others 0: values of all columns (None: none found) and a bound."""
    lower, upper, ceiling, whole = rows.bounds()
    result = milp(
        rows.cost()[kept],
        integrality=whole[kept],
        bounds=Bounds(np.zeros(len(kept)), ceiling[kept]),
        constraints=LinearConstraint(rows.matrix()[:, kept], lower, upper),
        options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": relative_gap},
    )
    if result.status == 2:
        return None, math.inf
    bound = -math.inf if result.mip_dual_bound is None or math.isnan(result.mip_dual_bound) else float(result.mip_dual_bound)
    if result.x is None:
        return None, bound
    values = np.zeros(rows.width)
    values[kept] = result.x
    return values, bound


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
        flags, complete = self._remat_ways()
        ways = [_Way(self, remat, memory=True) for remat in flags]
        fitting = [way for way in ways if not way.overflows(started)]
        best: Solved | None = None
        lowest = math.inf
        for way in sorted(fitting, key=lambda way: way.bound(started)):
            found = way.solve(started, math.inf if best is None else best.objective)
            lowest = min(lowest, way.bound(started) if found is None else found.bound)
            if found is not None and (best is None or found.objective < best.objective):
                best = found
        if best is None:
            raise self._shortfall(ways, started, proved=not fitting)
        lower = max(min(lowest, best.objective) if complete else -math.inf, bound)
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
            choice = way.smallest(started)
            short = OutOfMemory(choice, bill(self.graph, self.tables, choice), way.remat, self.terms.in_flight, proved)
            least = short if least is None or short.needed_bytes < least.needed_bytes else least
        assert least is not None
        return least


class _Way:
    """The program with remat decided."""

    def __init__(self, solver: Solver, remat: tuple[bool, ...], memory: bool) -> None:
        self.solver, self.remat, self.memory = solver, remat, memory
        graph, terms = solver.graph, solver.terms
        self.skeleton = SkeletonBuilder(graph, solver.tables, terms, remat).build()
        self.above: int | None = None
        if memory:
            wants = [[wanted(graph, use) for use in wire.uses] for wire in graph.wires]
            yields = [yielded(graph, wire) for wire in graph.wires]
            unit = (terms.limit_bytes or 2**30) / SCALE
            self.above = MemoryBuilder(graph, wants, yields, terms, remat, unit).build(self.skeleton)
        self._relaxed: Relaxation | None = None
        self._smallest: Relaxation | None = None

    def _left(self, started: float) -> float:
        return self.solver.time_limit_s - (time.monotonic() - started)

    def relaxed(self, started: float) -> Relaxation:
        """The relaxation, solved once."""
        if self._relaxed is None:
            self._relaxed = relax(self.skeleton.rows, self.skeleton.rows.cost(), self.above, self._left(started))
        return self._relaxed

    def bound(self, started: float) -> float:
        """No choice has a smaller objective."""
        return (self.relaxed(started).objective - ties(self.solver.graph)) / self.skeleton.scale

    def overflows(self, started: float) -> bool:
        """Whether nothing fits: even the relaxation that minimises bytes alone is above the limit.

        Asked before `relaxed`: the simplex method may take minutes to see that an infeasible program is so.
        """
        if self.above is None:
            return False
        least = self.least_bytes(started)
        return least.values is not None and bool(least.values[self.above] > 1e-7)

    def least_bytes(self, started: float) -> Relaxation:
        """The relaxation that minimises the bytes above the limit alone."""
        if self._smallest is None:
            cost = np.zeros(self.skeleton.rows.width)
            cost[self.above] = 1.0
            self._smallest = relax(self.skeleton.rows, cost, None, max(self._left(started), 5.0))
        return self._smallest

    def smallest(self, started: float) -> tuple[int, ...]:
        """The choice that needs the least bytes (its largest shares, where the relaxation leaves it open)."""
        relaxed = self.least_bytes(started)
        if relaxed.values is not None:
            return self._chosen(relaxed.values)
        terms = replace(self.solver.terms, limit_bytes=None, price_s_per_byte=1.0)
        found = Descent(self.solver.graph, self.solver.tables, terms, self.remat).best()
        assert found is not None
        return found[0]

    def _chosen(self, values: Floats) -> tuple[int, ...]:
        return tuple(int(values[columns].argmax()) for columns in self.skeleton.choice)

    def solve(self, started: float, cutoff: float) -> Solved | None:
        """The optimum, or the best in time; None where nothing cheaper than `cutoff` was found."""
        relaxed = self.relaxed(started)
        if relaxed.values is None:
            return self._descend(started, -math.inf)
        if self.bound(started) >= cutoff:
            return None
        if all(relaxed.values[columns].max() > 1 - 1e-6 for columns in self.skeleton.choice):
            return self._solved(self._chosen(relaxed.values), self.bound(started), started, "optimal")
        return self._branch(relaxed, started, cutoff)

    def _branch(self, relaxed: Relaxation, started: float, cutoff: float) -> Solved | None:
        """Integer programs over ever more columns, until the optimum is among them."""
        rows, slack, scale = self.skeleton.rows, ties(self.solver.graph), self.skeleton.scale
        binary, bound = rows.zero_or_one(), self.bound(started)
        amounts = np.ones(rows.width, dtype=bool)
        if self.above is not None:
            amounts[self.above] = False
        most = float(relaxed.reduced[binary].max())
        trial, best = _TRIAL * relaxed.objective, None
        while self._left(started) > 0:
            kept = np.flatnonzero(amounts & (~binary | (relaxed.reduced <= trial)))
            values, lowest = minimise(rows, kept, self._left(started), self.solver.relative_gap)
            lowest = min(lowest, relaxed.objective + trial) if trial < most else lowest
            bound = max(bound, (lowest - slack) / scale)
            if values is None and (trial >= most or bound >= cutoff):
                break
            if values is None:
                trial *= 4
                continue
            best = self._solved(self._chosen(values), bound, started, "optimal")
            excess = best.objective * scale - relaxed.objective + slack
            if excess <= trial or trial >= most:
                break
            trial = min(excess, 4 * trial)
        if best is None:
            return None if bound >= cutoff or math.isinf(bound) else self._descend(started, bound)
        late = best.gap > 10 * self.solver.relative_gap + 2 * slack / SCALE
        return replace(best, status="time limit") if late else best

    def _descend(self, started: float, bound: float) -> Solved | None:
        solver = self.solver
        terms = solver.terms if self.memory else replace(solver.terms, limit_bytes=None)
        found = Descent(solver.graph, solver.tables, terms, self.remat).best()
        return None if found is None else self._solved(found[0], bound, started, "descent")

    def _solved(self, choice: tuple[int, ...], bound: float, started: float, status: str) -> Solved:
        solver, rows = self.solver, self.skeleton.rows
        cost = bill(solver.graph, solver.tables, choice)
        objective = cost.objective(self.remat, solver.terms)
        bound = min(bound, objective)
        gap = (objective - bound) / objective if objective > 0 else 0.0
        took = time.monotonic() - started
        return Solved(
            choice, self.remat, cost, objective, bound, gap, took, rows.width, rows.height, status, solver.terms.in_flight
        )
