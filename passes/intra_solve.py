"""Solving the integer program.

For each way to decide remat, `intra_ascent` gives a bound and a choice, with bytes at the price that makes the bound
highest. Where the two meet, the choice is the optimum. Else everything that would cost more than bound + a trial gap is
left out, which leaves a program hundreds of times smaller; HiGHS solves it, and when its optimum lies within the trial
gap it is the optimum of the whole program, otherwise the trial gap grows. Ways whose bound is no better than a choice
in hand are skipped.
"""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from autoshard.passes.intra_ascent import Ascent, Excess
from autoshard.passes.intra_bill import Bill, Terms, bill
from autoshard.passes.intra_graph import ChoiceGraph, wanted, yielded
from autoshard.passes.intra_memory import MemoryBuilder
from autoshard.passes.intra_model import SCALE, SkeletonBuilder, ties
from autoshard.passes.intra_rows import Rows
from autoshard.passes.intra_tables import Floats, Table, narrowed

_TRIAL = 0.003
"""First trial gap, relative."""

_CLOSE = 1e-9
"""Relative difference at which a bound and a choice are the same number."""

_PASSES = 60
_PRICES = 24
"""Prices of a byte that are tried at most."""

_MOST_PAIRS = 400_000
"""Largest program that is handed to HiGHS."""

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

    def __init__(
        self, choice: tuple[int, ...], bill: Bill, remat: tuple[bool, ...], in_flight: int, proved: bool
    ) -> None:
        self.choice, self.bill, self.remat, self.proved = choice, bill, remat, proved
        self.needed_bytes = bill.memory_bytes(remat, in_flight)
        super().__init__(f"{self.needed_bytes:.0f} bytes")


def minimise(rows: Rows, time_limit_s: float, relative_gap: float) -> tuple[Floats | None, float]:
    """Solve the rows: values of all columns (None: none found) and a bound, infinite where nothing is feasible.

    Without HiGHS's presolve: that of 1.12 calls some of these programs infeasible that are not, and hangs on others.
    """
    lower, upper, ceiling, whole = rows.bounds()
    result = milp(
        rows.cost(),
        integrality=whole,
        bounds=Bounds(np.zeros(rows.width), ceiling),
        constraints=LinearConstraint(rows.matrix(), lower, upper),
        options={"time_limit": max(time_limit_s, 0.1), "mip_rel_gap": relative_gap, "presolve": False},
    )
    if result.status == 2:
        return None, math.inf
    bound = (
        -math.inf
        if result.mip_dual_bound is None or math.isnan(result.mip_dual_bound)
        else float(result.mip_dual_bound)
    )
    return result.x, bound


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
            decided = tuple(bool(flag) for flag in self.remat)
            unlimited = replace(self.terms, limit_bytes=None)
            free = _Way(self, unlimited, decided, started).solve(math.inf)
            assert free is not None
            if (
                self.terms.limit_bytes is None
                or free.bill.memory_bytes(decided, self.terms.in_flight) <= self.terms.limit_bytes
            ):
                return free
            bound = free.bound
        return self._with_bytes(started, bound)

    def _with_bytes(self, started: float, bound: float) -> Solved:
        """The best of the ways to decide remat, most promising first."""
        flags, complete = self._remat_ways()
        ways = [_Way(self, self.terms, remat, started) for remat in flags]
        best: Solved | None = None
        lowest = math.inf
        for way in sorted(ways, key=lambda way: way.lower):
            found = way.solve(math.inf if best is None else best.objective)
            lowest = min(lowest, way.lower)
            if found is not None and (best is None or found.objective < best.objective):
                best = found
        if best is None:
            raise self._shortfall(ways)
        lower = max(min(lowest, best.objective) if complete else -math.inf, bound)
        gap = max(0.0, best.objective - lower) / best.objective if best.objective > 0 else 0.0
        status = "time limit" if time.monotonic() - started > self.time_limit_s else best.status
        return replace(best, bound=lower, gap=gap, time_s=time.monotonic() - started, status=status)

    def _remat_ways(self) -> tuple[list[tuple[bool, ...]], bool]:
        """Decisions to try, and whether they are all there are.

        Of many groups, those whose segments repeat most are run again first.
        """
        open_ = [group for group, flag in enumerate(self.remat) if flag is None]
        if 2 ** len(open_) <= _REMAT_WAYS:
            chosen = [
                {group for group, flag in zip(open_, flags, strict=True) if flag}
                for flags in itertools.product((False, True), repeat=len(open_))
            ]
        else:
            order = sorted(open_, key=lambda group: (-self.graph.groups[group].count, group))
            step = max(1, len(order) // (_REMAT_WAYS - 1))
            chosen = [set(order[:count]) for count in dict.fromkeys([*range(0, len(order), step), len(order)])]
        ways = [
            tuple(number in groups if flag is None else flag for number, flag in enumerate(self.remat))
            for groups in chosen
        ]
        return ways, 2 ** len(open_) <= _REMAT_WAYS

    def _shortfall(self, ways: Sequence["_Way"]) -> OutOfMemory:
        """The choice that needs the least bytes."""
        proved = all(math.isinf(way.lower) for way in ways)
        found = [
            OutOfMemory(choice, bill(self.graph, self.tables, choice), way.remat, self.terms.in_flight, proved)
            for way in ways
            for choice in way.small
        ]
        return min(found, key=lambda short: short.needed_bytes)


class _Way:
    """The program with remat decided.

    lower: no choice that fits costs less (infinite: nothing fits). best: the cheapest choice met that fits.
    small: choices met that need few bytes.
    """

    def __init__(self, solver: Solver, terms: Terms, remat: tuple[bool, ...], started: float) -> None:
        self.solver, self.terms, self.remat, self.started = solver, terms, remat, started
        self.ascent = Ascent(solver.graph, solver.tables, terms, remat)
        self.best: tuple[float, tuple[int, ...]] | None = None
        self.small = [self.ascent.smallest()]
        self.lower, self.byte_price = self._priced()

    def _left(self) -> float:
        return self.solver.time_limit_s - (time.monotonic() - self.started)

    def _try(self, choice: tuple[int, ...]) -> tuple[float, float]:
        """Remember a choice if it is the cheapest that fits; its objective and its bytes above the limit."""
        cost = bill(self.solver.graph, self.solver.tables, choice)
        above = -math.inf
        if self.terms.limit_bytes is not None:
            above = cost.memory_bytes(self.remat, self.terms.in_flight) - self.terms.limit_bytes
        objective = cost.objective(self.remat, self.terms)
        if above <= 0 and (self.best is None or objective < self.best[0]):
            self.best = objective, choice
        return objective, above

    def _priced(self) -> tuple[float, float]:
        """(bound, price of a byte) at the price, beyond `terms.price_s_per_byte`, that makes the bound highest.

        The bound is concave in the price. A choice is a line, its seconds + price * its bytes above the limit; the next
        price is where the line of the last that was too large meets that of the last that fits.
        """
        limit, base = self.terms.limit_bytes, self.terms.price_s_per_byte
        bound, choice = self.ascent.run(base, _PASSES)
        objective, above = self._try(choice)
        if limit is None or above <= 0:
            return bound, 0.0
        if self.ascent.least_bytes > limit:
            self.small.append(self.ascent.run(base + 1e3 * max(bound, 1e-9) / limit, _PASSES)[1])
            return math.inf, 0.0
        best, low, high, same = (bound, 0.0), (0.0, objective, above), None, 0
        for _ in range(_PRICES):
            price = _meeting(low, high, 0.1 * max(bound, 1e-9) / limit)
            bound, choice = self.ascent.run(base + price, _PASSES)
            best = max(best, (bound - price * limit, price))
            objective, above = self._try(choice)
            line = objective + price * above
            if above > 0:
                same = same + 1 if above == low[2] else 0
                if same == 4:
                    break  # dearer bytes change nothing any more
                low = price, objective, above
                self.small = [self.small[0], choice]
            else:
                high = price, objective, above
            met = best[0] >= line - 1e-4 * abs(line) and above <= 0
            if self._left() <= 0 or met or (high is not None and high[0] - low[0] < 2e-3 * high[0]):
                break
        return best

    def solve(self, cutoff: float) -> Solved | None:
        """The optimum, or the best in time; None where nothing cheaper than `cutoff` was found."""
        if self.lower >= cutoff:
            return None
        size = (0, 0)
        if self._gap() > _CLOSE:
            self.ascent.run(self.terms.price_s_per_byte + self.byte_price, _PASSES)
            size = self._search(self.ascent.excess(), self.lower)
        return self._solved(size) if self.best is not None else None

    def _gap(self) -> float:
        return math.inf if self.best is None else (self.best[0] - self.lower) / max(abs(self.best[0]), 1e-30)

    def _search(self, excess: Excess, base: float) -> tuple[int, int]:
        """Integer programs over what costs at most `base` + a growing trial gap; the size of the last."""
        trial, size = _TRIAL * abs(base), (0, 0)
        while self._gap() > _CLOSE and self._left() > 0:
            if self.best is not None:
                trial = min(trial, self.best[0] - base)
            part = self._part(excess, trial * (1 + 1e-6))
            if part.pairs > _MOST_PAIRS:
                break
            choice, bound, size = self._optimum(part)
            if choice is None and self.best is not None and self.best[0] < base + trial * (1 - 1e-9):
                break  # the choice in hand is in the part: whatever HiGHS says of it is wrong
            self.lower = max(self.lower, bound if part.whole else min(bound, base + trial))
            if choice is not None:
                self._try(choice)
            if part.whole or (choice is not None and self.best is not None and self.best[0] <= base + trial):
                break
            trial *= 4
        return size

    def _part(self, excess: Excess, most: float) -> "_Part":
        """The graph without strategies and pairs whose excess is above `most`."""
        solver = self.solver
        kept = tuple(np.flatnonzero(more <= most) for more in excess.strategies)
        nodes = tuple(
            replace(node, strategies=tuple(node.strategies[number] for number in numbers))
            for node, numbers in zip(solver.graph.nodes, kept, strict=True)
        )
        graph = replace(solver.graph, nodes=nodes)
        narrow = [narrowed(graph, wire, table) for wire, table in zip(graph.wires, solver.tables, strict=True)]
        offered = {
            (wire, share): more[np.ix_(narrow[wire].rows, narrow[wire].columns)] <= most
            for (wire, share), more in excess.pairs.items()
        }
        pairs = sum(int(mask.sum()) * len(graph.wires[wire].uses) for (wire, _), mask in offered.items())
        whole = all(
            len(numbers) == len(node.strategies) for numbers, node in zip(kept, solver.graph.nodes, strict=True)
        )
        whole = whole and all(bool((more <= most)[np.isfinite(more)].all()) for more in excess.pairs.values())
        return _Part(graph, [entry.table for entry in narrow], offered, kept, pairs, whole)

    def _optimum(self, part: "_Part") -> tuple[tuple[int, ...] | None, float, tuple[int, int]]:
        """HiGHS on a part: choice (None: none found), bound, and (columns, rows)."""
        skeleton = SkeletonBuilder(part.graph, part.tables, self.terms, self.remat, part.offered).build()
        if self.terms.limit_bytes is not None or self.terms.price_s_per_byte:
            wants = [[wanted(part.graph, use) for use in wire.uses] for wire in part.graph.wires]
            yields = [yielded(part.graph, wire) for wire in part.graph.wires]
            unit = (self.terms.limit_bytes or 2**30) / SCALE
            MemoryBuilder(part.graph, wants, yields, self.terms, self.remat, unit).build(skeleton)
        rows = skeleton.rows
        values, bound = minimise(rows, self._left(), self.solver.relative_gap)
        bound = (bound - ties(part.graph)) / skeleton.scale
        if values is None:
            return None, bound, (rows.width, rows.height)
        best = zip(part.kept, skeleton.choice, strict=True)
        return (
            tuple(int(numbers[values[columns].argmax()]) for numbers, columns in best),
            bound,
            (rows.width, rows.height),
        )

    def _solved(self, size: tuple[int, int]) -> Solved:
        assert self.best is not None
        objective, choice = self.best
        lower = min(self.lower, objective)
        gap = (objective - lower) / objective if objective > 0 else 0.0
        status = "optimal" if gap <= _CLOSE + 10 * self.solver.relative_gap else "time limit"
        cost = bill(self.solver.graph, self.solver.tables, choice)
        took = time.monotonic() - self.started
        return Solved(choice, self.remat, cost, objective, lower, gap, took, *size, status, self.terms.in_flight)


_Line = tuple[float, float, float]
"""(price at which a choice was met, its objective, its bytes above the limit)"""


def _meeting(low: _Line, high: _Line | None, first: float) -> float:
    """The price at which two choices cost the same; inside their own prices, not too near to either."""
    if high is None:
        return max(4 * low[0], first)
    span = high[0] - low[0]
    price = (high[1] - low[1]) / (low[2] - high[2])
    return min(max(price, low[0] + 0.1 * span), high[0] - 0.1 * span)


@dataclass(frozen=True)
class _Part:
    """A graph with fewer strategies. kept[n]: numbers of node n's strategies; pairs: of all transports; whole: all."""

    graph: ChoiceGraph
    tables: list[Table]
    offered: dict[tuple[int, str], NDArray[np.bool_]]
    kept: tuple[NDArray[np.int64], ...]
    pairs: int
    whole: bool
