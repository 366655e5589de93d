"""Columns and rows of a linear program, gathered as numpy arrays and named by family."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from autoshard.passes.intra_tables import Floats, Integers


@dataclass
class Rows:
    """A linear program under construction: minimise cost . z, lower <= A z <= upper, 0 <= z <= ceiling."""

    width: int = 0
    height: int = 0
    costs: list[Floats] = field(default_factory=list)
    charged: list[tuple[Integers, Floats]] = field(default_factory=list)
    ceilings: list[Floats] = field(default_factory=list)
    whole: list[Floats] = field(default_factory=list)
    lowers: list[Floats] = field(default_factory=list)
    uppers: list[Floats] = field(default_factory=list)
    entry_rows: list[Integers] = field(default_factory=list)
    entry_columns: list[Integers] = field(default_factory=list)
    entry_values: list[Floats] = field(default_factory=list)
    families: list[tuple[str, int, int]] = field(default_factory=list)

    def columns(self, cost: Floats, *, ceiling: float = np.inf, whole: bool = False) -> Integers:
        """Add one column for each cost; the numbers of the new columns. whole: integer values only."""
        count = len(cost)
        self.costs.append(np.asarray(cost, dtype=np.float64))
        self.ceilings.append(np.full(count, ceiling))
        self.whole.append(np.full(count, float(whole)))
        self.width += count
        return np.arange(self.width - count, self.width, dtype=np.int64)

    def rows(self, family: str, lower: float, upper: float, count: int = 1) -> Integers:
        """Add `count` empty rows of a family; their numbers."""
        self.lowers.append(np.full(count, lower))
        self.uppers.append(np.full(count, upper))
        self.families.append((family, self.height, count))
        self.height += count
        return np.arange(self.height - count, self.height, dtype=np.int64)

    def enter(self, rows: Integers, columns: Integers, values: Floats | float) -> None:
        """A[rows, columns] += values, broadcast against each other."""
        rows, columns, numbers = np.broadcast_arrays(rows, columns, np.asarray(values, dtype=np.float64))
        self.entry_rows.append(rows.ravel())
        self.entry_columns.append(columns.ravel())
        self.entry_values.append(numbers.ravel())

    def charge(self, columns: Integers, costs: Floats) -> None:
        """Add to the costs of existing columns."""
        self.charged.append((np.asarray(columns), np.asarray(costs, dtype=np.float64)))

    def cost(self) -> Floats:
        """The objective's coefficients."""
        total = np.array(_joined(self.costs))
        for columns, costs in self.charged:
            np.add.at(total, columns, costs)
        return total

    def matrix(self) -> sparse.csc_array:
        """A, in compressed columns."""
        places = (_joined(self.entry_rows).astype(np.int32), _joined(self.entry_columns).astype(np.int32))
        return sparse.coo_array((_joined(self.entry_values), places), shape=(self.height, self.width)).tocsc()

    def family_sizes(self) -> dict[str, int]:
        """Number of rows of each family."""
        sizes: dict[str, int] = {}
        for family, _, count in self.families:
            sizes[family] = sizes.get(family, 0) + count
        return sizes

    def bounds(self) -> tuple[Floats, Floats, Floats, NDArray[np.float64]]:
        """(lower, upper) of the rows, ceilings and integrality of the columns."""
        return _joined(self.lowers), _joined(self.uppers), _joined(self.ceilings), _joined(self.whole)


def _joined(pieces: list[NDArray[np.float64]] | list[Integers]) -> NDArray[np.float64]:
    return np.concatenate(pieces) if pieces else np.zeros(0)
