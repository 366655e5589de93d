"""Operators with exchanges inside against torch's own on whole tensors."""

import itertools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autoshard.ranks import run_ranks
from autoshard.runtime import collectives as c
from autoshard.runtime import operators
from autoshard.runtime.mesh import Mesh


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def embedding(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    for rows, padding in itertools.product((8, 7, 5, 1), (None, 0, 4)):
        if padding is not None and padding >= rows:
            continue
        torch.manual_seed(rows)
        table = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
        ids, gradient = torch.randint(rows, (4, 5)), torch.randn(4, 5, 3, dtype=torch.float64)
        wanted = F.embedding(ids, table, padding_idx=padding)
        wanted.backward(gradient)
        weight = c.own_shard(table.detach(), 0, group).requires_grad_()
        out = c.all_reduce(operators.vocab_embedding(ids, weight, rows, group, padding_idx=padding), group)
        close(out, wanted)
        out.backward(gradient)
        close(weight.grad, c.own_shard(table.grad, 0, group))


def cross_entropy(rank: int, ranks: int) -> None:
    whole = dist.group.WORLD
    mesh = Mesh({"a": 2, "b": 2}) if ranks == 4 else None
    layouts = [(whole,)] if mesh is None else [(whole,), (mesh.group("a"), mesh.group("b"))]
    shapes = [(6, 9), (6, 8), (3, 5, 4), (7,), (6, 2), (0, 5)]
    for groups, shape, smoothing, weighted in itertools.product(layouts, shapes, (0.0, 0.1), (False, True)):
        torch.manual_seed(len(shape) + shape[-1])
        dim = min(1, len(shape) - 1)
        classes = shape[dim]
        logits = (torch.randn(shape, dtype=torch.float64) * 30).requires_grad_()
        target = torch.randint(classes, shape[:dim] + shape[dim + 1 :])
        if target.dim() and target.numel():
            target[0] = -5
        weight = torch.rand(classes, dtype=torch.float64) if weighted else None
        own = logits.detach()
        for group in groups:
            own = c.own_shard(own, dim, group)
        own.requires_grad_()
        for reduction in ("sum", "none"):
            logits.grad = own.grad = None
            options = {"ignore_index": -5, "label_smoothing": smoothing, "weight": weight, "reduction": reduction}
            wanted = F.cross_entropy(logits, target, **options)
            got = operators.vocab_cross_entropy(own, target, classes, *groups, **options)
            close(got, wanted)
            gradient = torch.randn_like(wanted)
            wanted.backward(gradient)
            got.backward(gradient)
            expected = logits.grad
            for group in groups:
                expected = c.own_shard(expected, dim, group)
            close(own.grad, expected)
    logits = torch.full((2, 8), -1e30)
    logits[:, 3] = 1e30
    wanted = F.cross_entropy(logits, torch.tensor([3, 3]), reduction="sum")
    got = operators.vocab_cross_entropy(c.own_shard(logits, 1, whole), torch.tensor([3, 3]), 8, whole)
    assert got == wanted == 0
    logits = torch.randn(5, 8, dtype=torch.bfloat16)
    target = torch.randint(8, (5,))
    got = operators.vocab_cross_entropy(c.own_shard(logits, 1, whole), target, 8, whole)
    torch.testing.assert_close(got, F.cross_entropy(logits, target, reduction="sum"))


def batch_norm(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    for shape, affine in itertools.product([(8, 3), (7, 3, 4), (5, 2, 3, 2)], (True, False)):
        torch.manual_seed(shape[0])
        x = (torch.randn(shape, dtype=torch.float64) * 3 + 5).requires_grad_()
        channels, gradient = shape[1], torch.randn(shape, dtype=torch.float64)
        weight = torch.randn(channels, dtype=torch.float64, requires_grad=True) if affine else None
        bias = torch.randn(channels, dtype=torch.float64, requires_grad=True) if affine else None
        mean, var = torch.randn(channels, dtype=torch.float64), torch.rand(channels, dtype=torch.float64)
        new_mean, new_var = mean.clone(), var.clone()
        wanted = F.batch_norm(x, new_mean, new_var, weight, bias, True, 0.3, 1e-4)
        wanted.backward(gradient)
        own = c.own_shard(x.detach(), 0, group).requires_grad_()
        w, b = (None if t is None else t.detach().clone().requires_grad_() for t in (weight, bias))
        out, got_mean, got_var = operators.batch_norm(own, w, b, mean, var, 0.3, 1e-4, group)
        close(out, c.own_shard(wanted, 0, group))
        close(got_mean, new_mean)
        close(got_var, new_var)
        out.backward(c.own_shard(gradient, 0, group))
        close(own.grad, c.own_shard(x.grad, 0, group))
        if affine:
            close(c.summed(w.grad, group), weight.grad)
            close(c.summed(b.grad, group), bias.grad)
        assert operators.batch_norm(own, w, b, None, None, 0.3, 1e-4, group)[1:] == (None, None)


def dropout(rank: int, ranks: int) -> Tensor:
    mesh = Mesh({"dp": 2, "tp": 2})
    torch.manual_seed(3)
    x = torch.ones(1000, requires_grad=True)
    y = operators.dropout(x, 0.25, True, mesh.group("dp"))
    assert abs((y > 0).float().mean() - 0.75) < 0.06 and set(y.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    y.sum().backward()
    assert x.grad.equal(y.detach())
    assert not y.equal(operators.dropout(x, 0.25, True, mesh.group("dp")))
    assert operators.dropout(x, 0.25, False) is x and operators.dropout(x, 1.0, True).sum() == 0
    return y.detach()


def test_vocab_embedding() -> None:
    run_ranks(embedding, 3)


def test_vocab_cross_entropy() -> None:
    for ranks in (2, 3, 4):
        run_ranks(cross_entropy, ranks)


def test_batch_norm() -> None:
    for ranks in (2, 3):
        run_ranks(batch_norm, ranks)


def test_dropout_masks_agree_on_copies_and_differ_on_shards() -> None:
    a, b, other_a, other_b = run_ranks(dropout, 4)
    assert a.equal(b) and other_a.equal(other_b) and not a.equal(other_a)
