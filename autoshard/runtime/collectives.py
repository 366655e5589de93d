"""Changes of a tensor's placement over one process group, each with the backward that its two ends ask for.

On one group a tensor is invariant (I: the same on every rank, its gradient too), replicated (R: the same on every rank,
each rank has a partial sum of its gradient), partial (P: a partial sum, its gradient the same on every rank) or
sharded (S: a slice along `dim`, of the gradient too).

| function                                  | from -> to | forward                      | backward                     |
|-------------------------------------------|------------|------------------------------|------------------------------|
| all_gather(x, dim, group, size)           | S -> R     | all-gather                   | reduce-scatter               |
| gather_parameter(x, dim, group, size)     | S -> R     | all-gather, not kept         | gather again, reduce-scatter |
| all_gather_invariant(x, dim, group, size) | S -> I     | all-gather                   | slice                        |
| all_reduce(x, group)                      | P -> I     | all-reduce                   | nothing                      |
| all_reduce_both(x, group)                 | P -> R     | all-reduce                   | all-reduce                   |
| reduce_scatter(x, dim, group)             | P -> S     | reduce-scatter               | all-gather                   |
| sum_gradient(x, group)                    | I -> R     | nothing                      | all-reduce                   |
| shard(x, dim, group)                      | I -> S     | slice                        | all-gather                   |
| take_shard(x, dim, group)                 | R -> S     | slice                        | pad with zeros               |
| keep_one(x, group)                        | I -> P     | zero, except on one rank     | nothing                      |
| keep_one_both(x, group)                   | R -> P     | zero, except on one rank     | zero, except on one rank     |
| keep_one_gradient(x, group)               | R -> I     | nothing                      | zero, except on one rank     |
| pad_shard(x, dim, group, size)            | S -> P     | pad with zeros               | slice                        |
| all_to_all(x, source, target, group, size)| S -> S     | all-to-all                   | all-to-all                   |

Shards are cut as torch.chunk cuts: as large as the first one until the dim is used up, the last ones shorter or empty.
`size` is the dim's size before it was cut; it may be left out where it divides evenly. Nothing happens in a group of
one rank. Every tensor is made contiguous before it is sent: collectives on strided memory are silently wrong.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# Before torch 2.13 under their older names.
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: ProcessGroup, size: int | None = None) -> Tensor:
    """S -> R: the whole value. Backward: each rank gets its slice of the summed gradient."""
    size = _whole_size(x, dim, group, size)
    return _convert(x, group, lambda x: gathered(x, dim, group, size), lambda d: reduced_shard(d, dim, group))


def all_gather_invariant(x: Tensor, dim: int, group: ProcessGroup, size: int | None = None) -> Tensor:
    """S -> I: the whole value. Backward: slice of the gradient."""
    size = _whole_size(x, dim, group, size)
    return _convert(x, group, lambda x: gathered(x, dim, group, size), lambda d: own_shard(d, dim, group))


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """P -> I: the sum. Backward: nothing to do."""
    return _convert(x, group, lambda x: summed(x, group), lambda d: d)


def all_reduce_both(x: Tensor, group: ProcessGroup) -> Tensor:
    """P -> R: the sum. Backward: the sum of the gradients."""
    return _convert(x, group, lambda x: summed(x, group), lambda d: summed(d, group))


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """P -> S: own slice of the sum. Backward: the whole gradient."""
    size = x.shape[dim]
    return _convert(x, group, lambda x: reduced_shard(x, dim, group), lambda d: gathered(d, dim, group, size))


def sum_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """I -> R: the value as it is. Backward: the sum of the gradients."""
    return _convert(x, group, lambda x: x, lambda d: summed(d, group))


def shard(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """I -> S: own slice. Backward: the whole gradient."""
    size = x.shape[dim]
    return _convert(x, group, lambda x: own_shard(x, dim, group), lambda d: gathered(d, dim, group, size))


def take_shard(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """R -> S: own slice. Backward: zero outside of the slice."""
    size = x.shape[dim]
    return _convert(x, group, lambda x: own_shard(x, dim, group), lambda d: padded(d, dim, group, size))


def keep_one(x: Tensor, group: ProcessGroup) -> Tensor:
    """I -> P: the value on the first rank, zero on the others. Backward: nothing to do."""
    return _convert(x, group, lambda x: on_one_rank(x, group), lambda d: d)


def keep_one_both(x: Tensor, group: ProcessGroup) -> Tensor:
    """R -> P: the value on the first rank, zero on the others. Backward: likewise."""
    return _convert(x, group, lambda x: on_one_rank(x, group), lambda d: on_one_rank(d, group))


def keep_one_gradient(x: Tensor, group: ProcessGroup) -> Tensor:
    """R -> I: the value as it is. Backward: the gradient on the first rank, zero on the others."""
    return _convert(x, group, lambda x: x, lambda d: on_one_rank(d, group))


def pad_shard(x: Tensor, dim: int, group: ProcessGroup, size: int | None = None) -> Tensor:
    """S -> P: zero outside of the own slice. Backward: slice of the gradient."""
    size = _whole_size(x, dim, group, size)
    return _convert(x, group, lambda x: padded(x, dim, group, size), lambda d: own_shard(d, dim, group))


def all_to_all(x: Tensor, source: int, target: int, group: ProcessGroup, size: int | None = None) -> Tensor:
    """S(source) -> S(target); `size` is the whole size of dim `source`. Backward: the way back."""
    size, target_size = _whole_size(x, source, group, size), x.shape[target]
    return _convert(
        x,
        group,
        lambda x: exchanged(x, source, target, group, size),
        lambda d: exchanged(d, target, source, group, target_size),
    )


# Gathered parameters are not kept for backward ------------------------------------------------------------------------


class _GatheredFrom:
    """Where a gathered parameter came from. In backward it is gathered once, and freed after its last use."""

    def __init__(self, shard: Tensor, dim: int, group: ProcessGroup, size: int) -> None:
        self.shard, self.dim, self.group, self.size = shard, dim, group, size
        self.version = shard._version
        self.again: Tensor | None = None

    def gather_again(self) -> Tensor:
        if self.shard._version != self.version:
            raise RuntimeError("a sharded parameter was changed between forward and the backward that needs it")
        if self.again is not None:
            return self.again
        with torch.no_grad():
            whole = gathered(self.shard.detach(), self.dim, self.group, self.size)
        if self.shard.requires_grad:  # then `reduce_gradient`, which runs after the last use, lets go of it
            self.again = whole
        return whole

    def reduce_gradient(self, gradient: Tensor) -> Tensor:
        self.again = None
        return reduced_shard(gradient, self.dim, self.group)


def gather_parameter(x: Tensor, dim: int, group: ProcessGroup, size: int | None = None) -> Tensor:
    """S -> R like `all_gather`; inside `gather_again()` backward gathers the value again instead of keeping it."""
    if group.size() == 1:
        return x
    source = _GatheredFrom(x, dim, group, _whole_size(x, dim, group, size))
    whole = _convert(x, group, lambda x: gathered(x, dim, group, source.size), source.reduce_gradient)
    whole.untyped_storage().gathered_from = source  # type: ignore[attr-defined]
    return whole


@contextlib.contextmanager
def gather_again() -> Iterator[None]:
    """Context or decorator of a forward: autograd saves of a gathered parameter only where to gather it from.

    Views of it (a transpose, say) included; a copy in another dtype is a tensor of its own and is kept. Enter it
    outside of torch.utils.checkpoint, which frees and recomputes everything of the region that it wraps.
    """
    with torch.autograd.graph.saved_tensors_hooks(_forget, _recall):
        yield


def _forget(x: Tensor) -> Any:
    source = getattr(x.untyped_storage(), "gathered_from", None) if x.layout == torch.strided else None
    if source is None or x.dtype != source.shard.dtype:
        return x
    return source, x.size(), x.stride(), x.storage_offset()


def _recall(saved: Any) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    source, size, stride, offset = saved
    return source.gather_again().as_strided(size, stride, offset)


# The moves themselves, without gradients ------------------------------------------------------------------------------


def gathered(x: Tensor, dim: int, group: ProcessGroup, size: int) -> Tensor:
    """All ranks' shards of a dim of `size`, put together."""
    ranks, dim = group.size(), dim % x.dim()
    step = _step(size, ranks)
    x = _lengthened(x, dim, step).contiguous()
    pieces = x.new_empty(ranks, *x.shape)
    _gather(pieces.flatten(0, 1), x, group=group)
    whole = pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(), dim)
    return whole if step * ranks == size else whole.narrow(dim, 0, size).contiguous()


def reduced_shard(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's shard of the sum over the ranks."""
    ranks, dim, size = group.size(), dim % x.dim(), x.shape[dim]
    step = _step(size, ranks)
    shape = [*x.shape[:dim], step, *x.shape[dim + 1 :]]
    x = _lengthened(x, dim, step * ranks)
    x = x.contiguous() if dim == 0 else torch.cat([x.narrow(dim, rank * step, step) for rank in range(ranks)])
    piece = x.new_empty(shape)
    _reduce_scatter(piece, x, group=group)
    length = _shard_range(size, ranks, group.rank())[1]
    return piece if length == step else piece.narrow(dim, 0, length).contiguous()


def summed(x: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks, in new memory."""
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def exchanged(x: Tensor, source: int, target: int, group: ProcessGroup, size: int) -> Tensor:
    """From a shard of dim `source` (whole size: `size`) to a shard of dim `target`, which is whole in x."""
    ranks, source, target = group.size(), source % x.dim(), target % x.dim()
    cuts = [_shard_range(x.shape[target], ranks, rank) for rank in range(ranks)]
    sent = [x.narrow(target, start, length).flatten() for start, length in cuts]
    shapes = [list(x.shape) for _ in range(ranks)]
    for rank, shape in enumerate(shapes):
        shape[source], shape[target] = _shard_range(size, ranks, rank)[1], cuts[group.rank()][1]
    counts = [math.prod(shape) for shape in shapes]
    received = x.new_empty(sum(counts))
    dist.all_to_all_single(received, torch.cat(sent), counts, [piece.numel() for piece in sent], group=group)
    return torch.cat([p.view(shape) for p, shape in zip(received.split(counts), shapes, strict=True)], source)


def own_shard(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's slice, in memory of its own so that the whole can be freed."""
    start, length = _shard_range(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)


def padded(x: Tensor, dim: int, group: ProcessGroup, size: int) -> Tensor:
    """This rank's shard in its place among zeros."""
    start, length = _shard_range(size, group.size(), group.rank())
    shape = list(x.shape)
    shape[dim] = size
    whole = x.new_zeros(shape)
    whole.narrow(dim, start, length).copy_(x)
    return whole


def on_one_rank(x: Tensor, group: ProcessGroup) -> Tensor:
    """x on the first rank of the group, zeros on the others."""
    return x if group.rank() == 0 else torch.zeros_like(x)


Move = Callable[[Tensor], Tensor]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.convert_gradient = backward
        y = forward(x)
        return y.view_as(y) if y is x else y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.convert_gradient(gradient), None, None


def _convert(x: Tensor, group: ProcessGroup, forward: Move, backward: Move) -> Tensor:
    return x if group.size() == 1 else _Convert.apply(x, forward, backward)


def _whole_size(x: Tensor, dim: int, group: ProcessGroup, size: int | None) -> int:
    return x.shape[dim] * group.size() if size is None else size


def _step(size: int, ranks: int) -> int:
    """Size of the first, the largest, of the shards."""
    return -(-size // ranks)


def _shard_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """Start and length of the shard of `rank` of a dim of `size`."""
    start = min(size, rank * _step(size, ranks))
    return start, min(_step(size, ranks), size - start)


def shard_size(size: int, *groups: ProcessGroup) -> int:
    """Length of this rank's shard of a dim of `size` that `groups` cut, the first one first."""
    for group in groups:
        size = _shard_range(size, group.size(), group.rank())[1]
    return size


def _lengthened(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros after the end of `dim` up to `size`: uneven shards travel at the size of the first."""
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)
