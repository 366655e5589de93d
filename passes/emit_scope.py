"""What is known at one place of a forward: the text of tensors, sizes, groups and devices.

`Needs` is the scope that only notes what an item asks for; `plan_needs` finds the tensor that each size and device is
read from, before names are given: that tensor must then have a name, and be alive, at that place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]

from autoshard.errors import UntraceableModel
from autoshard.passes.emit_expression import ATOM, PRODUCT, SUM, Expression
from autoshard.passes.local import Extent, LocalTensor

Source = tuple[str, int]
"""A tensor and one of its dims."""


@dataclass
class Needs:
    """Notes what text an item needs besides its operands. extents: what `size` is asked for; device: whether."""

    tensors: Mapping[str, LocalTensor]
    extents: list[tuple[Extent, tuple[str, ...]]] = field(default_factory=list)
    device_wanted: bool = False
    groups: list[str] = field(default_factory=list)
    imports: set[tuple[str, str]] = field(default_factory=set)

    def ref(self, name: str) -> Expression:
        return Expression("x")

    def tensor(self, name: str) -> LocalTensor:
        return self.tensors[name]

    def size(self, extent: Extent | int, near: Sequence[str] = ()) -> Expression:
        if isinstance(extent, Extent) and not isinstance(extent.size, int):
            self.extents.append((extent, tuple(near)))
        return Expression("0")

    def group(self, axis: str) -> str:
        self.groups.append(axis)
        return axis

    def device(self, near: Sequence[str] = ()) -> str:
        self.device_wanted = True
        return "d"

    def uses(self, module: str, name: str) -> str:
        self.imports.add((module, name))
        return name


def symbols_of(size: Any) -> list[Any]:
    """The symbols of a size, by name."""
    return sorted(sympy.sympify(size).free_symbols, key=str)


def find_source(
    size: Any, axes: tuple[str, ...], near: Sequence[str], around: Sequence[str], tensors: Mapping[str, LocalTensor]
) -> Source | None:
    """A dim with this whole size: cut by the same axes if there is one, else cut otherwise but evenly."""
    for exact in (True, False):
        for name in (*near, *around):
            for dim, extent in enumerate(tensors[name].dims):
                if extent.size == size and (extent.axes == axes if exact else extent.even):
                    return name, dim
    return None


def size_text(
    extent: Extent,
    source_of: Callable[[Any, tuple[str, ...]], tuple[Expression, Extent]],
    ranks: Callable[[str], str],
    helper: Callable[[str, str], str],
) -> Expression:
    """This rank's size of a dim as text. source_of: reads a symbolic size and says how what it read is cut."""
    if isinstance(extent.size, int):
        return _cut(Expression(str(extent.size)), extent, ranks, helper)
    found = source_of(extent.size, extent.axes)
    text, read = found
    kept = [axis for axis in read.axes if axis in extent.axes]
    grown = [axis for axis in read.axes if axis not in kept]
    for axis in grown:
        text = Expression(f"{text.within(PRODUCT)} * {ranks(axis)}", PRODUCT)
    for axis in (axis for axis in extent.axes if axis not in kept):
        text = Expression(f"{text.within(ATOM)} // {ranks(axis)}", PRODUCT)
    return text


def _cut(
    whole: Expression, extent: Extent, ranks: Callable[[str], str], helper: Callable[[str, str], str]
) -> Expression:
    if not extent.axes:
        return whole
    if not extent.even:
        groups = ", ".join(ranks(axis).removesuffix(".size()") for axis in extent.axes)
        return Expression(f"{helper('collectives', 'shard_size')}({whole.text}, {groups})")
    text = whole.within(PRODUCT)
    for axis in extent.axes:
        text = f"{text} // {ranks(axis)}"
    return Expression(text, PRODUCT)


def expression_text(size: Any, atom: Callable[[Any], Expression]) -> Expression:
    """A sympy size with its symbols replaced by text. Sums, products, powers and integer division are written out."""
    size = sympy.sympify(size)
    if size.is_Symbol:
        return atom(size)
    if size.is_number:
        return Expression(str(size))
    parts = [expression_text(argument, atom) for argument in _ordered(size)]
    if size.is_Add:
        return Expression(" + ".join(part.within(SUM) for part in parts).replace("+ -", "- "), SUM)
    if size.is_Mul:
        return Expression(" * ".join(part.within(PRODUCT) for part in parts), PRODUCT)
    name = type(size).__name__
    if name in ("FloorDiv", "CleanDiv", "floor"):
        return Expression(f"{parts[0].within(PRODUCT)} // {parts[1].within(ATOM)}", PRODUCT)
    if name in ("Mod", "PythonMod"):
        return Expression(f"{parts[0].within(PRODUCT)} % {parts[1].within(ATOM)}", PRODUCT)
    if name == "Pow":
        return Expression(f"{parts[0].within(ATOM)} ** {parts[1].within(ATOM)}")
    if name in ("ToFloat", "Identity"):
        return parts[0]
    if name in ("IntTrueDiv", "FloatTrueDiv"):
        return Expression(f"{parts[0].within(PRODUCT)} / {parts[1].within(ATOM)}", PRODUCT)
    if name in ("TruncToInt", "FloorToInt"):
        return Expression(f"int({parts[0].text})")
    if name in ("Max", "Min"):
        return Expression(f"{name.lower()}({', '.join(part.text for part in parts)})")
    raise UntraceableModel(
        f"the size or number {size} of the inputs' sizes cannot be written",
        help="compute it from tensors, or give it as a Python number",
    )


def _ordered(size: Any) -> Iterator[Any]:
    """Arguments, symbols first where the order is free."""
    if size.is_Add or size.is_Mul:
        free = not size.is_Mul
        yield from sorted(size.args, key=lambda item: (item.is_number == free, str(item)))
    else:
        yield from size.args
