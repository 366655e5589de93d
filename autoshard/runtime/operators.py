"""Operators that are not themselves when their tensors are split: the local programs, with what they must exchange.

`groups` are the process groups of the axes that split the tensor, outermost axis first. With several groups the
earlier one cuts first. Shards are cut as torch.chunk cuts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


def vocab_embedding(
    ids: Tensor, weight: Tensor, rows: int, *groups: ProcessGroup, padding_idx: int | None = None
) -> Tensor:
    """ids (...), weight: this rank's share of a table (rows, d) -> (..., d), partial: zero for other ranks' ids."""
    first, count = _shard_range(rows, groups)
    if count == 0:
        return weight.sum(0).expand(*ids.shape, weight.shape[1])
    mine = (ids >= first) & (ids < first + count)
    ids = torch.where(mine, ids - first, 0)
    padding = padding_idx is not None and first <= padding_idx < first + count
    out = F.embedding(ids, weight, padding_idx=padding_idx - first if padding and padding_idx is not None else None)
    return out * mine.unsqueeze(-1)


def vocab_cross_entropy(
    logits: Tensor,
    target: Tensor,
    classes: int,
    *groups: ProcessGroup,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "sum",
) -> Tensor:
    """Cross entropy of logits (n, c, ...) whose c is this rank's share of `classes`; target (n, ...) of class indices.

    weight: of all classes, or None. reduction: "sum" (a scalar) or "none" (n, ...). The loss is the same on all ranks.
    Only three numbers a sample travel: the largest logit, the sum of exponentials, the target's logit.
    """
    losses = _VocabCrossEntropy.apply(logits, target, classes, groups, weight, ignore_index, label_smoothing)
    return losses.sum() if reduction == "sum" else losses


class _VocabCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        classes: int,
        groups: tuple[ProcessGroup, ...],
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        dim = min(1, logits.dim() - 1)
        first, count = _shard_range(classes, groups)
        x = logits.movedim(dim, -1).to(_accumulation_dtype(logits.dtype))
        largest = x.new_full(x.shape[:-1], -math.inf) if count == 0 else x.amax(-1)
        for group in groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        x = x - largest.unsqueeze(-1)

        valid = target != ignore_index
        mine = valid & (target >= first) & (target < first + count)
        own_target = torch.where(mine, target - first, 0)
        at_target = x.gather(-1, own_target.unsqueeze(-1)).squeeze(-1) if count else torch.zeros_like(largest)
        own_weight = x.new_ones(count) if weight is None else weight[first : first + count].to(x.dtype)
        # A logit of -inf (a class ruled out) times a smoothing of 0 would be nan.
        spread = (x * own_weight).sum(-1) if smoothing else torch.zeros_like(largest)
        probabilities = x.exp_()
        totals = torch.stack([probabilities.sum(-1), torch.where(mine, at_target, 0), spread])
        for group in groups:
            dist.all_reduce(totals, group=group)
        total, at_target, spread = totals

        all_weights = float(classes) if weight is None else weight.to(x.dtype).sum()
        of_target = valid.to(x.dtype)
        if weight is not None:
            of_target = of_target * weight[torch.where(valid, target, 0)]
        losses = (1 - smoothing) * of_target * (total.log() - at_target)
        if smoothing:
            losses = losses + torch.where(valid, smoothing / classes * (all_weights * total.log() - spread), 0)

        ctx.save_for_backward(probabilities.div_(total.unsqueeze(-1)), own_target, mine, valid, of_target, own_weight)
        ctx.all_weights, ctx.smoothing, ctx.classes, ctx.dim, ctx.dtype = (
            all_weights, smoothing, classes, dim, logits.dtype,
        )  # fmt: skip
        return losses.to(logits.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, own_target, mine, valid, of_target, own_weight = ctx.saved_tensors
        of_target = (1 - ctx.smoothing) * of_target
        scale = of_target
        if ctx.smoothing:
            scale = scale + valid.to(scale.dtype) * (ctx.smoothing / ctx.classes * ctx.all_weights)
        result = probabilities * scale.unsqueeze(-1)
        if result.shape[-1]:
            result.scatter_add_(-1, own_target.unsqueeze(-1), -(of_target * mine).unsqueeze(-1))
        if ctx.smoothing:
            result -= valid.to(result.dtype).unsqueeze(-1) * (ctx.smoothing / ctx.classes * own_weight)
        result = (result * gradient.unsqueeze(-1)).to(ctx.dtype).movedim(-1, ctx.dim)
        return (result, *[None] * 6)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    *groups: ProcessGroup,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Training batch norm of x (n, c, ...) whose n is split over the groups, by the statistics of the whole batch.

    -> (x normalised, new running mean, new running variance). Shares of n may differ. The gradients of weight and bias
    are this rank's part of a sum.
    """
    out, mean, variance, count = _BatchNorm.apply(x, weight, bias, eps, groups)
    with torch.no_grad():
        if running_mean is not None:
            running_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = (variance * (count / (count - 1))).to(running_var.dtype)
            running_var = torch.lerp(running_var, unbiased, momentum)
    return out, running_mean, running_var


def sync_batch_norm(x: Tensor, norm: Any, *groups: ProcessGroup) -> Tensor:
    """What `norm`, a torch.nn.BatchNorm in training, does to x split over the groups: by the whole batch's numbers."""
    momentum = 0.0 if norm.momentum is None else norm.momentum
    out, mean, variance = batch_norm(
        x, norm.weight, norm.bias, norm.running_mean, norm.running_var, momentum, norm.eps, *groups
    )
    with torch.no_grad():
        if norm.running_mean is not None and mean is not None and variance is not None:
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
            norm.num_batches_tracked.add_(1)
    return out


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: tuple[ProcessGroup, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
        wide = x.to(_accumulation_dtype(x.dtype))
        count = wide.new_tensor([x.numel() // x.shape[1]])
        sums = torch.cat([wide.sum(dims), count])
        for group in groups:
            dist.all_reduce(sums, group=group)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        centered = wide - mean.view(shape)
        squares = centered.square().sum(dims)
        for group in groups:
            dist.all_reduce(squares, group=group)
        variance = squares / count
        scale = torch.rsqrt(variance + eps)
        out = centered * scale.view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.groups, ctx.dims, ctx.shape, ctx.has_bias = groups, dims, shape, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return out.to(x.dtype), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        shape = ctx.shape
        gradient = gradient.to(mean.dtype)
        normal = (x - mean.view(shape)) * scale.view(shape)
        own = torch.stack([gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)])
        sums = own.clone()
        for group in ctx.groups:
            dist.all_reduce(sums, group=group)
        mean_gradient, mean_product = sums / count
        result = (gradient - mean_gradient.view(shape) - normal * mean_product.view(shape)) * scale.view(shape)
        if weight is not None:
            result = result * weight.view(shape)
        weight_gradient = None if weight is None else own[1].to(weight.dtype)
        bias_gradient = own[0].to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return result.to(x.dtype), weight_gradient, bias_gradient, None, None


def dropout(x: Tensor, p: float, training: bool, *groups: ProcessGroup) -> Tensor:
    """Dropout of x split over `groups`: ranks that hold copies of x drop the same elements, its shards differ."""
    if not training or p == 0:
        return x
    keep = torch.empty_like(x, dtype=torch.bool, memory_format=torch.contiguous_format)
    keep.bernoulli_(1 - p, generator=shard_generator(x.device, *groups))
    return x * keep * (1 / (1 - p) if p < 1 else 0.0)


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, p: float, training: bool, *groups: ProcessGroup, **options: Any
) -> Tensor:
    """scaled_dot_product_attention with dropout of its weights; masks as in `dropout`; options: its other arguments."""
    if not training or p == 0:
        return F.scaled_dot_product_attention(q, k, v, **options)
    seed = shard_generator(q.device, *groups).initial_seed()
    with torch.random.fork_rng([q.device] if q.device.type == "cuda" else []):  # it draws from the default generator
        torch.manual_seed(seed)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=p, **options)


def shard_generator(device: torch.device, *groups: ProcessGroup) -> torch.Generator:
    """A generator for one draw: the same on ranks at the same place in `groups`, another at each other place.

    Its seed is drawn from the default CPU generator, which must have been seeded alike on all ranks.
    """
    seed = int(torch.randint(2**62, ()))
    place = 0
    for group in groups:
        place = place * group.size() + group.rank()
    return torch.Generator(device).manual_seed(seed + place)


def _shard_range(size: int, groups: tuple[ProcessGroup, ...]) -> tuple[int, int]:
    """Start and length of this rank's shard of a dim of `size` that `groups` cut, the first one first."""
    start = 0
    for group in groups:
        step = -(-size // group.size())
        begin = min(size, group.rank() * step)
        start, size = start + begin, min(step, size - begin)
    return start, size


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
