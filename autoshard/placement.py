"""What a tensor is on each mesh axis: `I`, `R`, `P`, `S(dim)`, and the conversions between them.

| placement      | forward value on each rank | gradient on each rank                                   |
|----------------|----------------------------|---------------------------------------------------------|
| `I` invariant  | the whole value, the same  | the whole gradient, the same                            |
| `R` replicated | the whole value, the same  | a partial sum: the true gradient is the sum over the axis |
| `P` partial    | a partial sum              | the whole gradient, the same                            |
| `S(d)` sharded | a slice along dim d        | the same slice of the gradient                          |

Telling `R` from `I` fixes the backward collective of every conversion by its two ends (`CONVERSIONS`).
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoshard.errors import BadInput

Kind = Literal["I", "R", "P", "S"]


@dataclass(frozen=True, order=True)
class Placement:
    """One tensor on one mesh axis. `dim` is set for `S` only and is never negative."""

    kind: Kind
    dim: int | None = None

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    @property
    def is_sharded(self) -> bool:
        return self.kind == "S"


I = Placement("I")  # noqa: E741 - the placement's name in the whole field
R = Placement("R")
P = Placement("P")


def S(dim: int) -> Placement:
    """Sharded along tensor dim `dim` (0 or more)."""
    return Placement("S", dim)


_PLACEMENT = re.compile(r"(I|R|P)|S\((\d+)\)")


def parse_placement(text: str) -> Placement:
    """Read "I", "R", "P" or "S(1)"."""
    match = _PLACEMENT.fullmatch(text.strip())
    if match is None:
        raise BadInput(f"'{text}' is not a placement", help="write I, R, P or S(dim), for example S(0)")
    return Placement(match[1]) if match[1] else S(int(match[2]))  # type: ignore[arg-type]


Layout = tuple[Placement, ...]
"""A tensor's placements, one per mesh axis in the mesh's order (outermost axis first).

Where several axes shard one dim, the earlier axis cuts first and the later axis cuts its piece. Shards have the sizes
of `shard_sizes`: as even as the dim allows, the last ranks shorter or empty.
"""


def shard_sizes(size: int, ranks: int) -> tuple[int, ...]:
    """Shards of a dim of `size` over `ranks` ranks, as torch.chunk and DTensor cut: 5 over 4 is (2, 2, 1, 0)."""
    step = -(-size // ranks)
    return tuple(max(0, min(step, size - rank * step)) for rank in range(ranks))


def local_shape(
    shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int], rank: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Shape of the shard at mesh coordinate `rank` (the largest one, at coordinate 0, when None)."""
    local = list(shape)
    for axis, (placement, ranks) in enumerate(zip(layout, axis_sizes, strict=True)):
        if placement.dim is not None:
            local[placement.dim] = shard_sizes(local[placement.dim], ranks)[0 if rank is None else rank[axis]]
    return tuple(local)


def splits_evenly(shape: Sequence[int], layout: Layout, axis_sizes: Sequence[int]) -> bool:
    """Whether every rank's shard has the same shape."""
    ranks_of_dim: dict[int, int] = {}
    for placement, ranks in zip(layout, axis_sizes, strict=True):
        if placement.dim is not None:
            ranks_of_dim[placement.dim] = ranks_of_dim.get(placement.dim, 1) * ranks
    return all(shape[dim] % ranks == 0 for dim, ranks in ranks_of_dim.items())


def format_layout(layout: Layout, axes: Sequence[str]) -> str:
    """ "S(0)@dp, I@tp": the layout with the axes' names."""
    return ", ".join(f"{placement}@{axis}" for placement, axis in zip(layout, axes, strict=True))


@dataclass(frozen=True)
class Conversion:
    """What one change of placement on one axis does, forward and backward."""

    forward: str
    backward: str


def conversion(source: Placement, target: Placement) -> Conversion:
    """The conversion from `source` to `target` on one axis.

    Names: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" move bytes; "slice", "pad", "mask", "none" do not.
    Raises KeyError for P -> R written the wrong way round: every pair of different placements has an entry.
    """
    if source == target:
        return Conversion("none", "none")
    return CONVERSIONS[source.kind, target.kind]


CONVERSIONS: dict[tuple[Kind, Kind], Conversion] = {
    ("S", "R"): Conversion("all_gather", "reduce_scatter"),
    ("S", "I"): Conversion("all_gather", "slice"),
    ("P", "I"): Conversion("all_reduce", "none"),
    ("P", "R"): Conversion("all_reduce", "all_reduce"),
    ("P", "S"): Conversion("reduce_scatter", "all_gather"),
    ("I", "R"): Conversion("none", "all_reduce"),
    ("I", "S"): Conversion("slice", "all_gather"),
    ("R", "S"): Conversion("slice", "pad"),
    ("I", "P"): Conversion("mask", "none"),
    ("R", "P"): Conversion("mask", "mask"),
    ("S", "P"): Conversion("pad", "slice"),
    ("R", "I"): Conversion("none", "mask"),
    ("S", "S"): Conversion("all_to_all", "all_to_all"),
}


def product(sizes: Sequence[int]) -> int:
    """Number of ranks of a mesh with these axis sizes."""
    return math.prod(sizes)
