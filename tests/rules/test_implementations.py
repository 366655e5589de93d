"""Implementations that communicate, on gloo ranks: their shards, put together, equal the operator run whole."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.program import Operator
from autoshard.ranks import run_ranks
from autoshard.rules import AxisStrategy, axis_strategies, oracle
from autoshard.rules.implementations import IMPLEMENTATIONS
from autoshard.rules.schema import overload
from autoshard.runtime import operators
from tests.rules.samples import Line, c, f, i, make, u

Arguments = Mapping[str, Any]


def vocab_embedding(op: Operator, arguments: Arguments, weight: Tensor, ids: Tensor) -> dict[int, Tensor]:
    padding = arguments["padding_idx"] if arguments["padding_idx"] >= 0 else None
    return {0: operators.vocab_embedding(ids, weight, op.operands[0].shape[0], dist.group.WORLD, padding_idx=padding)}


def vocab_cross_entropy(op: Operator, arguments: Arguments, logits: Tensor, target: Tensor) -> dict[int, Tensor]:
    options = {name: arguments[name] for name in ("ignore_index", "label_smoothing")}
    classes = op.operands[0].shape[min(1, logits.dim() - 1)]
    reduction = ("none", "mean", "sum")[arguments["reduction"]]
    return {0: operators.vocab_cross_entropy(logits, target, classes, dist.group.WORLD, reduction=reduction, **options)}


def batch_norm(op: Operator, arguments: Arguments, *tensors: Tensor) -> dict[int, Tensor]:
    affine = tensors[1:3] if len(tensors) == 5 else (None, None)
    numbers = arguments["momentum"], arguments["eps"]
    out, mean, variance = operators.batch_norm(tensors[0], *affine, *tensors[-2:], *numbers, dist.group.WORLD)
    return {0: out, 3: mean, 4: variance}


HELPERS: dict[str, Callable[..., dict[int, Tensor]]] = {
    "vocab_embedding": vocab_embedding,
    "vocab_cross_entropy": vocab_cross_entropy,
    "batch_norm_synced": batch_norm,
}
NORM = "aten._native_batch_norm_legit_functional.default"
CASES: list[tuple[str, Line]] = [
    ("aten.embedding.default", (f(9, 6), i(9, 4, 5))),
    ("aten.embedding.default", (f(5, 4), i(5, 6), 2)),
    ("aten.cross_entropy_loss.default", (f(8, 6), i(6, 8), None, 2)),
    ("aten.cross_entropy_loss.default", (f(8, 9), i(9, 8), None, 0, 2, 0.1)),
    ("aten.cross_entropy_loss.default", (f(4, 5, 3), i(5, 4, 3), None, 2, 1)),
    ("aten.cross_entropy_loss.default", (f(3), i(3), None, 2)),
    (NORM, (f(4, 6, 3, 2), f(6), f(6), c(f(6)), c(u(6)), True, 0.1, 1e-5)),
    (NORM, (f(7, 3), None, None, c(f(3)), c(u(3)), True, 0.1, 1e-5)),
]


def local_run(
    rank: int, ranks: int, cases: Sequence[tuple[str, Line]]
) -> list[tuple[Operator, AxisStrategy, Any, Any]]:
    """Each named strategy of each case on this rank: (operator, strategy, results by index, operand gradients)."""
    ran = []
    for name, line in cases:
        op, tensors = oracle.call(name, *make(line))
        for strategy in axis_strategies(op, ranks):
            if strategy.implementation is None:
                continue
            generator = torch.Generator().manual_seed(1)
            cuts = [
                oracle.cut(tensor.detach(), (placement,), (ranks,), generator)[rank].clone()
                for tensor, placement in zip(tensors, strategy.operands, strict=True)
            ]
            leaves = [part.requires_grad_(tensor.requires_grad) for part, tensor in zip(cuts, tensors, strict=True)]
            results = HELPERS[strategy.implementation](op, op.arguments, *leaves)
            upstream = oracle.cut(gradient(op), oracle.dual(strategy.results[:1]), (ranks,), generator)[rank]
            results[0].backward(upstream)
            found = {at: result.detach() for at, result in results.items()}
            ran.append((op, strategy, found, [leaf.grad for leaf in leaves]))
    return ran


def gradient(op: Operator) -> Tensor:
    """The true gradient given to the first result."""
    return torch.randn(op.results[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_shards_equal_the_whole(ranks: int) -> None:
    everyone = run_ranks(local_run, ranks, CASES)
    whole = []
    for name, line in CASES:
        args = make(line)[0]
        op, _ = oracle.call(name, args)
        target = overload(name)
        assert target is not None
        results = target(*args)
        results = (results,) if isinstance(results, Tensor) else results
        results[0].backward(gradient(op))
        floats = [value for value in args if isinstance(value, Tensor)]
        whole.append((op, results, [value.grad for value in floats]))
    seen = set()
    for each in zip(*everyone, strict=True):
        op, strategy = each[0][:2]
        results, gradients = next(entry[1:] for entry in whole if entry[0] == op)
        where = f"{op.name} by {strategy.implementation}"
        for at in each[0][2]:
            joined = oracle.join([ran[2][at] for ran in each], strategy.results[at : at + 1], (ranks,), where)
            torch.testing.assert_close(joined, results[at].detach(), rtol=1e-10, atol=1e-10)
        for at, true in enumerate(gradients):
            if true is not None:
                parts = [ran[3][at] for ran in each]
                joined = oracle.join(parts, oracle.dual(strategy.operands[at : at + 1]), (ranks,), where)
                torch.testing.assert_close(joined, true, rtol=1e-10, atol=1e-10)
        seen.add(strategy.implementation)
    assert seen == set(HELPERS)


def test_every_helper_exists() -> None:
    for implementation in IMPLEMENTATIONS.values():
        assert implementation.helper is None or callable(getattr(operators, implementation.helper))
    assert {entry.name for entry in IMPLEMENTATIONS.values() if entry.helper} == set(HELPERS)
