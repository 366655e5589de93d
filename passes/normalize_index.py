"""Lookups that count a dim from end to end are that dim itself: `x[arange(B)[:, None], i]` asks nothing of dim 0.

`aten.index.Tensor` with `arange` over a whole dim of what it indexes is how mask code of public models and many a loss
("the score of the target", "the last token") pick for each sample. To the rules an index is any index: the dim it
points into stays whole, and numbering the samples couples them. Written without the counting index, samples can be cut
apart. An index *counts* along its dim d when its element is the coordinate there, whatever the others are:

    counts           arange(n), from 0 by 1, and what unsqueeze, squeeze, expand, permute and reshape to (.. 1, n, 1 ..)
                     make of it, if n is the size of the dim that it indexes, for every input
    all count        x[i, j] = x with its dims moved to where they are counted
    rest lacks d     x[i, r] = x[:, r] with dims moved: the other indices have size 1 where i counts
    rest has d       x[i, r] = gather(x, dim of r, r aligned with x): one other index, of one dim beside the counted

Values and gradients are the same to the bit, except that a gradient met twice at one place may be added in another
order. `gather` knows no negative numbers: they are counted from the end first, unless the index cannot have any.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.passes.normalize_build import Builder, same_shape, same_size
from autoshard.program import is_operator, is_tensor

aten = torch.ops.aten

_WHOLE = (torch.int64, torch.int32)
_NOT_NEGATIVE = frozenset({aten.argmax.default, aten.argmin.default, aten.arange.default})

Label = tuple[str, int]
"""A dim of a value on the way to the result: ("own", dim of x) or ("looked up", dim of the indices together)."""


def drop_counting_indices(graph: fx.Graph) -> None:
    """Rewrite every lookup in which an index counts a whole dim. `propagate_needs_grad` has to follow."""
    for node in list(graph.nodes):
        if not is_operator(node) or node.target is not aten.index.Tensor:
            continue
        lookup = _read(node)
        if lookup is None:
            continue
        with graph.inserting_before(node):
            made = _Rewrite(Builder(graph, node), node, lookup).run()
        node.replace_all_uses_with(made)
        graph.erase_node(node)


@dataclass(frozen=True)
class _Lookup:
    """x[indices]. counted: dim of x -> dim of the indices together along which its index counts.

    rest: dim of x -> its index, of the others. coupled: dims in `counted` where the one other index is not of size 1.
    rank: of the indices together.
    """

    source: fx.Node
    indices: Mapping[int, fx.Node]
    counted: Mapping[int, int]
    rest: Mapping[int, fx.Node]
    coupled: frozenset[int]
    rank: int

    @property
    def start(self) -> int:
        """Where the dims of the indices stand in the result."""
        return _start(list(self.indices))


def _start(indexed: Sequence[int]) -> int:
    """Dims that indices make stand where the indexed dims were, or first where these are apart."""
    return indexed[0] if indexed == list(range(indexed[0], indexed[0] + len(indexed))) else 0


def _read(node: fx.Node) -> _Lookup | None:
    """What a lookup does; None where no index counts, or nothing simpler says the same."""
    source: Any = node.args[0]
    given: Any = node.args[1]
    indices = {dim: index for dim, index in enumerate(given) if index is not None}
    if any(_value(index).dtype not in _WHOLE or not _value(index).dim() for index in indices.values()):
        return None
    rank = max(_value(index).dim() for index in indices.values())
    counted: dict[int, int] = {}
    for dim, index in indices.items():
        along = counts_along(index)
        if along is not None and same_size(_value(index).shape[along], _value(source).shape[dim]):
            place = along + rank - _value(index).dim()
            if place not in counted.values():
                counted[dim] = place
    while counted:
        rest = {dim: index for dim, index in indices.items() if dim not in counted}
        coupled = {
            dim for dim, place in counted.items() if any(not _is_one(_size(r, place, rank)) for r in rest.values())
        }
        if not coupled or _can_gather(rest, counted, rank):
            return _Lookup(source, indices, counted, rest, frozenset(coupled), rank)
        counted = {dim: place for dim, place in counted.items() if dim not in coupled}
    return None


def counts_along(node: fx.Node) -> int | None:
    """The dim along which every element of an integer tensor is its own coordinate, of a size that is not 1."""
    value = node.meta.get("val")
    if node.op != "call_function" or not is_tensor(value) or value.dtype not in _WHOLE:
        return None
    if node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
        start = 0 if node.target is aten.arange.default else node.args[0]
        step = node.args[2] if len(node.args) > 2 else 1
        return 0 if start == 0 and step == 1 and not _is_one(value.shape[0]) else None
    source = node.args[0] if node.args else None
    along = counts_along(source) if isinstance(source, fx.Node) else None
    return None if along is None else _moved(node, value, _value(source), along)


def _moved(node: fx.Node, value: Tensor, source: Tensor, along: int) -> int | None:
    """Where the dim `along` of the operand of a view is in its result."""
    rank, target = source.dim(), node.target
    args: Any = node.args[1:]
    if target is aten._to_copy.default:
        return along
    if target is aten.expand.default:
        return along + value.dim() - rank
    if target is aten.unsqueeze.default:
        return along + (args[0] % (rank + 1) <= along)
    if target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
        dims = range(rank) if not args else [args[0]] if isinstance(args[0], int) else args[0]
        return along - sum(1 for dim in {dim % rank for dim in dims} if dim < along and _is_one(source.shape[dim]))
    if target is aten.permute.default:
        return [dim % rank for dim in args[0]].index(along)
    if target is aten.transpose.int:
        first, second = (dim % rank for dim in args[:2])
        return {first: second, second: first}.get(along, along)
    if target is aten.reshape.default:
        wide = [dim for dim, size in enumerate(value.shape) if not _is_one(size)]
        alone = all(_is_one(size) for dim, size in enumerate(source.shape) if dim != along)
        return wide[0] if alone and len(wide) == 1 else None
    return None


def _can_gather(rest: Mapping[int, fx.Node], counted: Mapping[int, int], rank: int) -> bool:
    """Whether the rest is one index that has, beside what is counted, at most one dim, and the counted sizes."""
    if len(rest) != 1:
        return False
    index = next(iter(rest.values()))
    return len(_free(index, counted, rank)) <= 1


def _free(index: fx.Node, counted: Mapping[int, int], rank: int) -> list[int]:
    """Dims of the indices together in which an index is not of size 1 and that nothing counts."""
    return [place for place in range(rank) if place not in counted.values() and not _is_one(_size(index, place, rank))]


@dataclass
class _Rewrite:
    """Builds the same value without the counting indices; `labels` say what each dim of the value so far is."""

    build: Builder
    node: fx.Node
    lookup: _Lookup

    def run(self) -> fx.Node:
        lookup = self.lookup
        own = [("own", dim) for dim in range(_value(lookup.source).dim())]
        if lookup.coupled:
            made, labels = self._gathered(own)
        elif lookup.rest:
            made, labels = self._looked_up(own)
        else:
            made, labels = lookup.source, own
        return self._arranged(made, labels)

    def _looked_up(self, own: Sequence[Label]) -> tuple[fx.Node, list[Label]]:
        """x[:, r]: only the other indices; the dims of size 1 along which the dropped ones counted go after."""
        rest, counted, rank = self.lookup.rest, self.lookup.counted.values(), self.lookup.rank
        made = self.build.call(aten.index.Tensor, self.lookup.source, [rest.get(dim) for dim in range(max(rest) + 1)])
        start = _start(list(rest))
        looked = range(rank - max(_value(index).dim() for index in rest.values()), rank)
        gone = [start + at for at, place in enumerate(looked) if place in counted]
        made = self.build.call(aten.squeeze.dims, made, gone) if gone else made
        labels = [label for label in own if label[1] not in rest]
        labels[start:start] = [("looked up", place) for place in looked if place not in counted]
        return made, labels

    def _gathered(self, own: Sequence[Label]) -> tuple[fx.Node, list[Label]]:
        """gather(x, dim, r): r with its dims where x has them, its own (or size 1) in place of what it indexes."""
        lookup, build, rank = self.lookup, self.build, len(own)
        ((dim, index),) = lookup.rest.items()
        free = _free(index, lookup.counted, lookup.rank)
        index = self._not_negative(index, dim)
        if _value(index).dtype is not torch.int64:
            index = build.call(aten._to_copy.default, index, dtype=torch.int64)
        goes = {lookup.counted[counted]: counted for counted in lookup.coupled} | dict.fromkeys(free, dim)
        index = self._squeezed(index, [place for place in range(lookup.rank) if place not in goes])
        held = [goes[place] for place in sorted(goes)]
        index = self._permuted(index, sorted(range(len(held)), key=held.__getitem__))
        for at in range(rank):
            if at not in held:
                index = build.call(aten.unsqueeze.default, index, at)
        if set(range(rank)) - {dim, *held}:
            wanted = [self._size_of(index if at == dim else lookup.source, at) for at in range(rank)]
            index = build.call(aten.expand.default, index, wanted)
        made = build.call(aten.gather.default, lookup.source, dim, index)
        labels = list(own)
        if free:
            labels[dim] = ("looked up", free[0])
        else:
            made = build.call(aten.squeeze.dim, made, dim)
            del labels[dim]
        return made, labels

    def _not_negative(self, index: fx.Node, dim: int) -> fx.Node:
        if _cannot_be_negative(index):
            return index
        below = self.build.call(aten.lt.Scalar, index, 0)
        wrapped = self.build.call(aten.add.Tensor, index, self._size_of(self.lookup.source, dim))
        return self.build.call(aten.where.self, below, wrapped, index)

    def _arranged(self, made: fx.Node, labels: list[Label]) -> fx.Node:
        """Dims in the order of the result, dims that only indices of size 1 had put in, the whole repeated to size."""
        lookup, goal = self.lookup, self.node.meta["val"]
        counted = {place: dim for dim, place in lookup.counted.items()}
        wanted: list[Label] = [("own", dim) for dim in range(_value(lookup.source).dim()) if dim not in lookup.indices]
        wanted[lookup.start : lookup.start] = [
            ("own", counted[place]) if place in counted else ("looked up", place) for place in range(lookup.rank)
        ]
        made = self._permuted(made, [labels.index(label) for label in wanted if label in labels])
        for at, label in enumerate(wanted):
            if label not in labels:
                made = self.build.call(aten.unsqueeze.default, made, at)
        if not same_shape(_value(made), goal):
            sizes = [self._result_size(made, at, label) for at, label in enumerate(wanted)]
            made = self.build.call(aten.expand.default, made, sizes)
        return made

    def _result_size(self, made: fx.Node, at: int, label: Label) -> Any:
        if same_size(_value(made).shape[at], self.node.meta["val"].shape[at]):
            return self._size_of(self.lookup.source, label[1]) if label[0] == "own" else self._size_of(made, at)
        for index in self.lookup.indices.values():
            dim = label[1] - self.lookup.rank + _value(index).dim()
            if dim >= 0 and not _is_one(_value(index).shape[dim]):
                return self._size_of(index, dim)
        raise AssertionError(f"no index of {self.node} has the size of dim {at} of its result")

    def _size_of(self, node: fx.Node, dim: int) -> Any:
        """A size as an argument: a number, or a node that reads it."""
        size = _value(node).shape[dim]
        return self.build.call(aten.sym_size.int, node, dim) if _open(size) else int(size)

    def _squeezed(self, index: fx.Node, places: Sequence[int]) -> fx.Node:
        """An index without its dims at these places of the indices together, as far as it has them."""
        dims = [place - self.lookup.rank + _value(index).dim() for place in sorted(places)]
        dims = [dim for dim in dims if dim >= 0]
        return self.build.call(aten.squeeze.dims, index, dims) if dims else index

    def _permuted(self, made: fx.Node, order: Sequence[int]) -> fx.Node:
        return made if list(order) == list(range(len(order))) else self.build.call(aten.permute.default, made, order)


def _cannot_be_negative(index: fx.Node) -> bool:
    """Positions that an operator found, moved about or not."""
    while index.target in (aten.unsqueeze.default, aten.reshape.default, aten._to_copy.default, aten.expand.default):
        if _value(index).dtype not in _WHOLE:
            return False
        assert isinstance(index.args[0], fx.Node)
        index = index.args[0]
    return index.target in _NOT_NEGATIVE


def _size(index: fx.Node, place: int, rank: int) -> Any:
    """Size of an index at a place of the indices together; 1 where it lacks the dim."""
    dim = place - rank + _value(index).dim()
    return 1 if dim < 0 else _value(index).shape[dim]


def _is_one(size: Any) -> bool:
    return not _open(size) and int(size) == 1


def _open(size: Any) -> bool:
    return isinstance(size, torch.SymInt)


def _value(node: Any) -> Tensor:
    value = node.meta["val"]
    assert is_tensor(value)
    return value
