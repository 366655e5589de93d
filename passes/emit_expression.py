"""Python expressions and what they are written from: tensors, sizes, groups; kinds of operators that are written alike.

A writer gets a node's arguments by name and a `Scope` that turns tensors, sizes, process groups and devices into text,
and returns an `Expression`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoshard.passes.local import Extent, LocalNode, LocalTensor, Ref

ATOM, POWER, UNARY, PRODUCT, SUM, BITS, COMPARISON, TERNARY = range(8)


@dataclass(frozen=True)
class Expression:
    """Python text. level: how loosely its outermost operator binds."""

    text: str
    level: int = ATOM

    def within(self, level: int) -> str:
        """The text, in parentheses where it binds more loosely than `level`."""
        return self.text if self.level <= level else f"({self.text})"


class Scope(Protocol):
    """What the text around an expression knows."""

    def ref(self, name: str) -> Expression:
        """A tensor."""

    def tensor(self, name: str) -> LocalTensor:
        """What a name stands for."""

    def size(self, extent: Extent | int, near: Sequence[str] = ()) -> Expression:
        """This rank's size of a dim. near: tensors to read it from, if they have it."""

    def group(self, axis: str) -> str:
        """The process group of an axis."""

    def device(self, near: Sequence[str] = ()) -> str:
        """The device that tensors are made on."""

    def uses(self, module: str, name: str) -> str:
        """A name to import."""


Writer = Callable[[LocalNode, Scope], Expression]


# Arguments ------------------------------------------------------------------------------------------------------------


def value(argument: Any, scope: Scope) -> Expression:
    """An argument as Python."""
    if isinstance(argument, Ref):
        return scope.ref(argument.name)
    if isinstance(argument, Extent):
        return scope.size(argument)
    if isinstance(argument, (tuple, list)):
        items = [value(item, scope).text for item in argument]
        return Expression(f"({', '.join(items)}{',' if len(items) == 1 else ''})")
    if isinstance(argument, float):
        if math.isinf(argument) or math.isnan(argument):
            return Expression(f'float("{argument}")')
        return Expression(repr(argument), UNARY if argument < 0 else ATOM)
    if isinstance(argument, bool) or argument is None:
        return Expression(str(argument))
    if isinstance(argument, int):
        return Expression(str(argument), UNARY if argument < 0 else ATOM)
    if isinstance(argument, str):
        return Expression(f'"{argument}"')
    if isinstance(argument, (torch.dtype, torch.memory_format, torch.layout)):
        return Expression(str(argument))
    if isinstance(argument, torch.device):
        return Expression(f'torch.device("{argument}")')
    return Expression(repr(argument))


def text(argument: Any, scope: Scope) -> str:
    """An argument as Python text."""
    return value(argument, scope).text


def listed(items: Sequence[Any], scope: Scope) -> str:
    """Comma-separated arguments."""
    return ", ".join(text(item, scope) for item in items)


_SKIPPED = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking", "implicit", "cudnn_enable"})


def schema(node: LocalNode) -> Any:
    """The operator's schema."""
    namespace, name, overload = node.target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema


def further(
    node: LocalNode, scope: Scope, done: Sequence[str], dims_as_numbers: bool = True, by_position: int = 99
) -> list[str]:
    """Arguments besides `done` that are not at their defaults.

    By position while nothing is left out, `by_position` of them at most; then by name.
    """
    found: list[str] = []
    by_name = False
    for argument in schema(node).arguments:
        name = argument.name
        if name in done or name in _SKIPPED or name not in node.arguments:
            continue
        given = node.arguments[name]
        given = tuple(given) if isinstance(given, list) else given
        default = argument.default_value
        default = tuple(default) if isinstance(default, list) else default
        if argument.has_default_value() and type(given) is type(default) and given == default:
            by_name = True
            continue
        if dims_as_numbers and name == "dim" and isinstance(given, tuple) and len(given) == 1:
            given = given[0]
        written = text(given, scope)
        by_name = by_name or argument.kwarg_only or isinstance(given, bool) or len(found) >= by_position
        found.append(f"{name}={written}" if by_name else written)
    return found


def first_result(node: LocalNode, scope: Scope) -> LocalTensor:
    """The first result that is read."""
    return scope.tensor(next(name for name in node.results if name))


def local_dims(node: LocalNode, scope: Scope) -> tuple[Extent, ...]:
    """Dims of the first result that is read."""
    return first_result(node, scope).dims


# Kinds of writers -----------------------------------------------------------------------------------------------------


def method(name: str = "") -> Writer:
    """x.name(...)"""

    def write(node: LocalNode, scope: Scope) -> Expression:
        own = schema(node).arguments[0].name
        called = name or node.target.split(".")[1]
        x = value(node.arguments[own], scope)
        return Expression(f"{x.within(ATOM)}.{called}({', '.join(further(node, scope, (own,)))})")

    return write


def function(called: str, by_position: int = 99) -> Writer:
    """called(x, ...), the first `by_position` arguments by position: torch.nn.functional has others in their places."""

    def write(node: LocalNode, scope: Scope) -> Expression:
        if called.startswith("F."):
            scope.uses("F", "")
        return Expression(f"{called}({', '.join(further(node, scope, (), by_position=by_position))})")

    return write


def binary(symbol: str, level: int) -> Writer:
    """x + y; with a factor for the second where there is an alpha."""

    def write(node: LocalNode, scope: Scope) -> Expression:
        names = [argument.name for argument in schema(node).arguments[:2]]
        left, right = (value(node.arguments[name], scope) for name in names)
        right = _times(node.arguments.get("alpha", 1), right, scope)
        closer = level - 1 if level not in (COMPARISON, BITS) else SUM
        leftmost = level if level in (SUM, PRODUCT) else closer
        return Expression(f"{left.within(leftmost)} {symbol} {right.within(closer)}", level)

    return write


def _times(alpha: Any, x: Expression, scope: Scope) -> Expression:
    return x if alpha == 1 else Expression(f"{text(alpha, scope)} * {x.within(UNARY)}", PRODUCT)


def reversed_binary(symbol: str, level: int) -> Writer:
    """rsub: other - self."""

    def write(node: LocalNode, scope: Scope) -> Expression:
        x, other = value(node.arguments["self"], scope), value(node.arguments["other"], scope)
        x = _times(node.arguments.get("alpha", 1), x, scope)
        return Expression(f"{other.within(level)} {symbol} {x.within(level - 1)}", level)

    return write


def unary(symbol: str) -> Writer:
    """-x"""
    return lambda node, scope: Expression(f"{symbol}{value(node.arguments['self'], scope).within(UNARY)}", UNARY)


# Losses ---------------------------------------------------------------------------------------------------------------

REDUCTIONS = ("none", "mean", "sum")


def loss_arguments(node: LocalNode, scope: Scope) -> list[str]:
    """Arguments of a classification loss besides scores and targets."""
    arguments, given = node.arguments, []
    if arguments.get("weight") is not None:
        given.append(f"weight={text(arguments['weight'], scope)}")
    if arguments.get("ignore_index", -100) != -100:
        given.append(f"ignore_index={text(arguments['ignore_index'], scope)}")
    if arguments.get("label_smoothing", 0.0) != 0.0:
        given.append(f"label_smoothing={text(arguments['label_smoothing'], scope)}")
    return [*given, f'reduction="{REDUCTIONS[arguments.get("reduction", 1)]}"']
