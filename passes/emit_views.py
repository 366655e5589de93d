"""Reshapes as a person writes them: `flatten` and `unflatten` of the dims that change."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from autoshard.passes.emit_expression import ATOM, Expression, Scope, Writer, local_dims, value
from autoshard.passes.local import Extent, LocalNode


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]] | None:
    """Ranges of dims before and after that hold the same elements, as small as can be. None for empty tensors."""
    if 0 in before or 0 in after:
        return None
    found = []
    i = j = 0
    while i < len(before) or j < len(after):
        start_i, start_j = i, j
        left = right = 1
        if i < len(before):
            left, i = before[i], i + 1
        if j < len(after):
            right, j = after[j], j + 1
        while left != right:
            if left < right and i < len(before):
                left, i = left * before[i], i + 1
            elif left > right and j < len(after):
                right, j = right * after[j], j + 1
            else:
                return None
        found.append((range(start_i, i), range(start_j, j)))
    return found


def reshape(node: LocalNode, scope: Scope) -> Expression:
    """x.flatten(...).unflatten(...)"""
    name = node.arguments["self"].name
    result = next(item for item in node.results if item)
    before, after = scope.tensor(name).dims, local_dims(node, scope)
    x = value(node.arguments["self"], scope).within(ATOM)
    pairs = groups(scope.tensor(name).example, scope.tensor(result).example)
    if pairs is None or any(not left or not right for left, right in pairs):
        return Expression(f"{x}.reshape({_sizes(after, name, scope)})")
    calls, shift = [], 0
    for left, right in reversed(pairs):
        if len(left) == len(right) == 1:
            continue
        if len(left) > 1:
            calls.append(
                f".flatten({left.start}, {left.stop - 1})"
                if left.stop < len(before) or shift
                else f".flatten({left.start})"
            )
        if len(right) > 1:
            sizes = _with_one_open([after[dim] for dim in right], name, scope)
            calls.append(f".unflatten({left.start}, ({sizes}))")
        shift += len(right) - 1
    return Expression(x + "".join(calls)) if calls else Expression(f"{x}.reshape({_sizes(after, name, scope)})")


def _sizes(dims: Sequence[Extent], name: str, scope: Scope) -> str:
    return _with_one_open(dims, name, scope) if dims else "()"


def _with_one_open(dims: Sequence[Extent], name: str, scope: Scope) -> str:
    """Sizes, the first that is no plain number left open."""
    left_open = next((i for i, extent in enumerate(dims) if extent.axes or not isinstance(extent.size, int)), None)
    return ", ".join(
        "-1" if number == left_open else scope.size(extent, (name,)).text for number, extent in enumerate(dims)
    )


NAMES = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default", "aten.unflatten.int")
WRITERS: Mapping[str, Writer] = MappingProxyType(dict.fromkeys((f"{name}" for name in NAMES), reshape))
