"""Writing lines of the rule language from shapes, for operators whose pattern depends on their arguments."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def dims_of(rank: int, prefix: str = "d") -> tuple[str, ...]:
    """Letters d0, d1, ... of a tensor of `rank` dims."""
    return tuple(f"{prefix}{at}" for at in range(rank))


def mark(letters: Sequence[str], at: Collection[int], suffix: str = "!") -> tuple[str, ...]:
    """The letters with `suffix` on those at the given positions."""
    return tuple(letter + suffix if position in at else letter for position, letter in enumerate(letters))


def without(letters: Sequence[str], at: Collection[int]) -> tuple[str, ...]:
    """The letters that are not at the given positions."""
    return tuple(letter for position, letter in enumerate(letters) if position not in at)


def wrap(dim: int, rank: int) -> int:
    """A dim counted from the end as one counted from the start."""
    return dim % rank if rank else 0


def wrap_all(dims: Any, rank: int) -> tuple[int, ...]:
    """Dims given as an int, a list, or None (all of them), counted from the start."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return tuple(range(rank))
    if isinstance(dims, int):
        return (wrap(dims, rank),)
    return tuple(wrap(dim, rank) for dim in dims)


def line(operands: Iterable[Iterable[str]], results: Iterable[Iterable[str]]) -> str:
    """The line of the language with these patterns."""
    left, right = (", ".join(" ".join(part) or "()" for part in side) for side in (operands, results))
    return f"{left} -> {right}"
