"""The rule language: one line says how an operator may be sharded on one mesh axis.

    linear       "b... k, n k, +n -> b... n"
    softmax      "b... d! -> b... d!"
    embedding    "v@vocab_embedding d, b... -> b... d"

One pattern a tensor, in the operator's argument order; absent optional tensors are skipped. In a pattern

| mark    | meaning |
|---------|---------|
| `k`     | a dim, the same everywhere; one of size 1 against a larger one lacks the letter: it broadcasts |
| `b...`  | any number of dims, each its own letter, aligned at the last; `b!...` marks all of them |
| `k!`    | never split |
| `k~`    | cut in proportion: sizes may differ between tensors, each divides evenly (query and key heads) |
| `k@f`   | split by the named implementation `f` only |
| `(h k)` | merged dims; only the outermost letter may be split, evenly |
| `1`     | a dim of size 1 |
| `+n`    | before a whole pattern: an addend, `P` whenever the result is (without it a bias is added once per rank) |

An empty pattern, or `()`, is a 0-dim tensor; an empty left side is an operator without tensor operands.
From the line follow

* all `I`, all `R`: every rank runs the whole operator;
* split one letter: tensors that have it are `S`, operands that lack it `R`, results that lack it `P`;
* with `linear`, `P` passes from the operands in which the operator is linear to the results; the others are `R`.

A result that lacks a split letter is a partial *sum*: mark with `!` where the operator reduces otherwise (amax).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from autoshard.errors import BadInput
from autoshard.placement import I, P, R, S, shard_sizes
from autoshard.program import Operator, TensorType
from autoshard.rules.implementations import IMPLEMENTATIONS
from autoshard.rules.schema import slots
from autoshard.rules.strategy import AxisStrategy

_DIM = re.compile(
    r"(?P<letter>[a-z][a-z0-9_]*)(?P<mark>[!~]?)(?P<dots>(?:\.\.\.)?)(?P<late>[!~]?)(?:@(?P<name>[a-z_]+))?"
)
_TOKEN = re.compile(r"\([^()]*\)|\S+")


@dataclass(frozen=True)
class Dim:
    """One dim of a tensor pattern. letters: one, several for merged dims, none for a literal 1."""

    letters: tuple[str, ...]
    ellipsis: bool = False


@dataclass(frozen=True)
class TensorPattern:
    """The dims of one tensor; `addend` for a leading `+`."""

    dims: tuple[Dim, ...]
    addend: bool = False


@dataclass(frozen=True)
class Pattern:
    """A parsed line. Letter sets hold the names without dots; `named` maps a letter to its implementation."""

    operands: tuple[TensorPattern, ...]
    results: tuple[TensorPattern, ...]
    fixed: frozenset[str]
    proportional: frozenset[str]
    named: tuple[tuple[str, str], ...]


@cache
def parse(text: str) -> Pattern:
    """Read one line of the language.

    Raises BadInput naming what is wrong with the line.
    """
    marks: dict[str, set[str]] = {"!": set(), "~": set()}
    named: dict[str, str] = {}

    def dim(token: str) -> Dim:
        if token == "1":
            return Dim(())
        if token.startswith("("):
            return Dim(tuple(letter for inner in token[1:-1].split() for letter in dim(inner).letters))
        match = _DIM.fullmatch(token)
        if match is None:
            raise BadInput(
                f"'{token}' is not a dim of a rule",
                where=f"rule '{text}'",
                help="write a letter with !, ~, ... or @name, 1, or (h k)",
            )
        for mark in match["mark"] + match["late"]:
            marks[mark].add(match["letter"])
        if match["name"]:
            if match["name"] not in IMPLEMENTATIONS:
                raise BadInput(
                    f"there is no implementation '{match['name']}'",
                    where=f"rule '{text}'",
                    help=f"known: {', '.join(IMPLEMENTATIONS)}",
                )
            named[match["letter"]] = match["name"]
        return Dim((match["letter"],), bool(match["dots"]))

    def tensor(part: str) -> TensorPattern:
        part = part.strip().replace("()", "")
        addend = part.startswith("+")
        dims = tuple(dim(token) for token in _TOKEN.findall(part.removeprefix("+")))
        letters = [letter for entry in dims for letter in entry.letters]
        repeated = sorted({letter for letter in letters if letters.count(letter) > 1})
        if repeated:
            raise BadInput(
                f"letter '{repeated[0]}' stands twice in '{part}'",
                where=f"rule '{text}'",
                help="give each dim of a tensor its own letter",
            )
        if sum(entry.ellipsis for entry in dims) > 1:
            raise BadInput(f"'{part}' has more than one '...'", where=f"rule '{text}'", help="keep one '...' a tensor")
        return TensorPattern(dims, addend)

    sides = text.split("->")
    if len(sides) != 2:
        raise BadInput(
            "a rule has exactly one '->'", where=f"rule '{text}'", help='for example "b... k, n k, +n -> b... n"'
        )
    operands = tuple(tensor(part) for part in sides[0].split(",")) if sides[0].strip() else ()
    results = tuple(tensor(part) for part in sides[1].split(","))
    if any(result.addend for result in results):
        raise BadInput("'+' marks operands, not results", where=f"rule '{text}'")
    dotted = {
        (letter, entry.ellipsis) for part in operands + results for entry in part.dims for letter in entry.letters
    }
    both = sorted(letter for letter, dots in dotted if dots and (letter, False) in dotted)
    if both:
        raise BadInput(
            f"'{both[0]}' stands both with and without '...'", where=f"rule '{text}'", help="use different letters"
        )
    return Pattern(operands, results, frozenset(marks["!"]), frozenset(marks["~"]), tuple(sorted(named.items())))


@dataclass(frozen=True)
class Rule:
    """How an operator may be sharded on one axis.

    pattern: a line of the language. linear: False; True when the operator is linear in all operands jointly (add);
    or groups of operand positions, each of which may carry `P` while the other operands are whole (mul: ((0,), (1,))).
    divides: (letter, number) pairs: the letter is split only over a divisor of the number (channel groups).
    nonempty: the operator fails on empty tensors, so no shard may be empty.
    """

    pattern: str
    linear: bool | tuple[tuple[int, ...], ...] = False
    divides: tuple[tuple[str, int], ...] = ()
    nonempty: bool = False

    def expand(self, op: Operator, ranks: int) -> tuple[AxisStrategy, ...]:
        """All ways to run `op` on an axis of `ranks` ranks: all I, all R, each letter, P passed through.

        Raises BadInput when the pattern does not fit the operator's shapes.
        """
        pattern = parse(self.pattern)
        try:
            bound = bind(pattern, op)
        except BadInput as error:
            shapes = ", ".join(str(list(operand.shape)) for operand in op.operands)
            results = ", ".join(str(list(result.shape)) for result in op.results)
            raise BadInput(error.what, where=f"rule '{self.pattern}' for {op.name}: {shapes} -> {results}") from error
        found = list(redundant(op))
        found += [strategy for letter in bound.sizes if (strategy := self._split(pattern, bound, op, letter, ranks))]
        found += self._partial(bound, op)
        return tuple(dict.fromkeys(found))

    def _split(self, pattern: Pattern, bound: "Bound", op: Operator, letter: str, ranks: int) -> AxisStrategy | None:
        name = letter.partition(".")[0]
        named = dict(pattern.named).get(name)
        implementation = IMPLEMENTATIONS[named] if named else None
        if name in pattern.fixed or bound.sizes[letter] < 2:
            return None
        if any(number % ranks for divided, number in self.divides if divided == name):
            return None
        even = name in pattern.proportional or (implementation is not None and implementation.even)
        for tensor, type_ in zip(bound.operands + bound.results, op.operands + op.results, strict=True):
            at = tensor.find(letter)
            if at is None:
                continue
            group = tensor.groups[at]
            if group[0] != letter:
                return None
            if (even or len(group) > 1) and (bound.sizes[letter] % ranks or type_.shape[at] % ranks):
                return None
            if self.nonempty and 0 in shard_sizes(type_.shape[at], ranks):
                return None
        reduced = implementation.reduced if implementation else P
        whole = implementation.whole if implementation else R
        results = tuple(S(at) if (at := tensor.find(letter)) is not None else reduced for tensor in bound.results)
        addend = P if results and results[0] == P else whole
        operands = tuple(
            S(at) if (at := tensor.find(letter)) is not None else addend if tensor.addend else whole
            for tensor in bound.operands
        )
        if any(
            placement == P and not may_be_partial(type_) for placement, type_ in zip(results, op.results, strict=True)
        ):
            return None
        return AxisStrategy(operands, results, named)

    def _partial(self, bound: "Bound", op: Operator) -> list[AxisStrategy]:
        present = bound.slots
        groups = (tuple(present),) if self.linear is True else (self.linear or ())
        found = []
        for group in groups:
            if not group or not set(group) <= set(present):
                continue
            operands = tuple(
                P if slot in group or tensor.addend else R for slot, tensor in zip(present, bound.operands, strict=True)
            )
            carriers = [type_ for placement, type_ in zip(operands, op.operands, strict=True) if placement == P]
            if not all(may_be_partial(type_) for type_ in (*carriers, *op.results)):
                continue
            if any(type_.dtype.is_floating_point for type_ in carriers) and not all(map(carries_gradient, op.results)):
                continue  # rounding to integers is not linear
            found.append(AxisStrategy(operands, (P,) * len(op.results)))
        return found


RuleFunction = Callable[[Operator], Rule | None]
"""Writes the rule of one call from its shapes and arguments; None where only redundant running is legal."""


@dataclass(frozen=True)
class BoundTensor:
    """groups: per dim the letters with size above 1 in it, outermost first (none where the tensor lacks the letter)."""

    groups: tuple[tuple[str, ...], ...]
    addend: bool

    def find(self, letter: str) -> int | None:
        """The dim that holds `letter`."""
        return next((at for at, group in enumerate(self.groups) if letter in group), None)


@dataclass(frozen=True)
class Bound:
    """A pattern laid over one operator's shapes. sizes: letter ("b.0" is the last dim of `b...`) -> size."""

    operands: tuple[BoundTensor, ...]
    results: tuple[BoundTensor, ...]
    sizes: Mapping[str, int]
    slots: tuple[int, ...]


def bind(pattern: Pattern, op: Operator) -> Bound:
    """Lay a pattern over an operator's shapes.

    Raises BadInput where ranks or sizes do not agree with the pattern.
    """
    present = slots(op)
    if present and present[-1] >= len(pattern.operands):
        raise BadInput(f"the operator has {present[-1] + 1} tensor operands, the rule {len(pattern.operands)}")
    if len(op.results) != len(pattern.results):
        raise BadInput(f"the operator has {len(op.results)} results, the rule {len(pattern.results)}")
    tensors = [
        (pattern.operands[slot], type_, f"operand {index}")
        for index, (slot, type_) in enumerate(zip(present, op.operands, strict=True))
    ]
    tensors += [
        (part, type_, f"result {index}")
        for index, (part, type_) in enumerate(zip(pattern.results, op.results, strict=True))
    ]
    spelt = [_spell(part, type_, name) for part, type_, name in tensors]
    sizes = _sizes(pattern, spelt, [type_.shape for _, type_, _ in tensors], [name for _, _, name in tensors])
    bound = []
    for (part, type_, _), dims in zip(tensors, spelt, strict=True):
        groups = tuple(
            tuple(letter for letter in group if sizes[letter] > 1) if size > 1 else ()
            for group, size in zip(dims, type_.shape, strict=True)
        )
        bound.append(BoundTensor(groups, part.addend))
    count = len(op.operands)
    return Bound(tuple(bound[:count]), tuple(bound[count:]), sizes, present)


def _spell(part: TensorPattern, type_: TensorType, name: str) -> tuple[tuple[str, ...], ...]:
    """The letters of each dim, `b...` written out as b.n ... b.1 b.0."""
    extra = len(type_.shape) - len(part.dims)
    if any(dim.ellipsis for dim in part.dims):
        extra += 1
    if extra < 0 or (extra > 0 and not any(dim.ellipsis for dim in part.dims)):
        raise BadInput(f"{name} has {len(type_.shape)} dims, its pattern {len(part.dims)}")
    spelt: list[tuple[str, ...]] = []
    for dim in part.dims:
        if dim.ellipsis:
            spelt += [(f"{dim.letters[0]}.{at}",) for at in reversed(range(extra))]
        else:
            spelt.append(dim.letters)
    return tuple(spelt)


def _sizes(
    pattern: Pattern,
    spelt: Sequence[tuple[tuple[str, ...], ...]],
    shapes: Sequence[tuple[int, ...]],
    names: Sequence[str],
) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for dims, shape in zip(spelt, shapes, strict=True):
        for group, size in zip(dims, shape, strict=True):
            if len(group) == 1:
                sizes[group[0]] = max(size, sizes.get(group[0], size)) if size != 0 else 0
    for dims, shape, name in zip(spelt, shapes, names, strict=True):
        for group, size in zip(dims, shape, strict=True):
            if not group and size != 1:
                raise BadInput(f"{name} has size {size} where the rule says 1")
            if len(group) == 1:
                loose = group[0].partition(".")[0] in pattern.proportional
                broadcast = size == 1 and name.startswith("operand")
                if size != sizes[group[0]] and not broadcast and not loose:
                    raise BadInput(f"letter '{group[0]}' is {sizes[group[0]]} elsewhere and {size} in {name}")
            if len(group) > 1:
                _solve(group, size, name, sizes)
    return sizes


def _solve(group: tuple[str, ...], size: int, name: str, sizes: dict[str, int]) -> None:
    """Find the one unknown size of merged dims."""
    known, unknown = 1, [letter for letter in group if letter not in sizes]
    for letter in group:
        known *= sizes.get(letter, 1)
    if len(unknown) > 1:
        raise BadInput(
            f"sizes of {', '.join(unknown)} in ({' '.join(group)}) cannot be known: at most one may stand there alone"
        )
    if unknown and known and size % known == 0:
        sizes[unknown[0]], known = size // known, size
    if known != size:
        raise BadInput(f"({' '.join(group)}) is {known} by its letters and {size} in {name}")


def redundant(op: Operator) -> tuple[AxisStrategy, ...]:
    """All I and all R: every rank runs the whole operator."""
    return tuple(AxisStrategy((kind,) * len(op.operands), (kind,) * len(op.results)) for kind in (I, R))


def may_be_partial(type_: TensorType) -> bool:
    """Whether the values can be a sum of partial values (booleans cannot)."""
    return type_.dtype is not torch.bool


def carries_gradient(type_: TensorType) -> bool:
    """Whether autograd can give the tensor a gradient."""
    return type_.dtype.is_floating_point or type_.dtype.is_complex
