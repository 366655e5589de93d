"""Proof of a rule by execution: shards run in one process and put together must equal the operator run whole.

Operands are cut by their placements (partial sums at random), every rank's local call runs with autograd, results are
joined by their placements and compared; then each rank is given the gradient that its result's placement says, and the
operands' gradients are joined and compared. `placement` has the table of what a gradient is under each placement.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import BadInput, NotEqual
from autoshard.placement import Layout, P, R, local_shape, product, shard_sizes
from autoshard.program import Operand, Operator, tensor_type
from autoshard.rules.implementations import IMPLEMENTATIONS
from autoshard.rules.local import local_arguments
from autoshard.rules.schema import overload
from autoshard.rules.strategy import AxisStrategy
from autoshard.rules.table import DEFAULT_RULES, RuleTable, axis_strategies

_TOLERANCE = 1e-9


def check(
    name: str, args: Sequence[Any], *, rules: RuleTable = DEFAULT_RULES, ranks: Sequence[int] = (2, 3, 4), seed: int = 0
) -> int:
    """Prove the rule of operator `name` on one call with the example arguments `args` (float64 tensors that
    require gradients where the rule is to be proved backward, sizes, flags).

    Returns how many strategies were run. Implementations that communicate are not run here.
    Raises NotEqual naming the first strategy that is wrong.
    """
    op, tensors = call(name, args)
    count = 0
    for size in ranks:
        for strategy in axis_strategies(op, size, rules):
            if is_local(strategy):
                prove(op, tensors, (strategy,), (size,), seed)
                count += 1
    return count


def call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[Operator, list[Tensor]]:
    """The `Operator` of one call and its tensor operands.

    Raises BadInput where no such operator is registered.
    """
    target = overload(name)
    if target is None:
        raise BadInput(f"there is no operator {name}", help="import the module that registers it first")
    tensors: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Operand(len(tensors) - 1)
        return tuple(plain(item) for item in value) if isinstance(value, (list, tuple)) else value

    given = dict(kwargs or {})
    arguments: dict[str, Any] = {}
    for at, argument in enumerate(target._schema.arguments):
        if at < len(args) and not argument.kwarg_only:
            arguments[argument.name] = plain(args[at])
        elif argument.name in given:
            arguments[argument.name] = plain(given[argument.name])
        elif argument.has_default_value():
            arguments[argument.name] = plain(argument.default_value)
    op = Operator(name, tuple(tensor_type(tensor, tensor.requires_grad) for tensor in tensors), (), arguments)
    return replace(op, results=tuple(map(tensor_type, _run(op, arguments, tensors)))), tensors


def is_local(strategy: AxisStrategy) -> bool:
    """Whether the strategy runs without communication inside."""
    return strategy.implementation is None or not IMPLEMENTATIONS[strategy.implementation].communicates


def prove(
    op: Operator,
    tensors: Sequence[Tensor],
    strategies: Sequence[AxisStrategy],
    axis_sizes: Sequence[int],
    seed: int = 0,
    values: bool = True,
) -> None:
    """Run one strategy an axis on all shards and compare with the whole operator. `values=False` compares shapes only.

    Raises NotEqual saying what differs.
    """
    generator = torch.Generator().manual_seed(seed)
    operand_layouts: list[Layout] = [
        tuple(strategy.operands[at] for strategy in strategies) for at in range(len(tensors))
    ]
    result_layouts: list[Layout] = [
        tuple(strategy.results[at] for strategy in strategies) for at in range(len(op.results))
    ]
    whole = [_leaf(tensor, tensor.requires_grad) for tensor in tensors]
    expected = _run(op, op.arguments, whole)
    shapes_of = [list(tensor.shape) for tensor in tensors]
    where = f"{op.name} as {'; '.join(map(_text, strategies))} on {list(axis_sizes)} ranks, operands {shapes_of}"

    shards = [
        cut(tensor.detach(), layout, axis_sizes, generator)
        for tensor, layout in zip(tensors, operand_layouts, strict=True)
    ]
    coordinates = list(itertools.product(*(range(size) for size in axis_sizes)))
    local_results, local_leaves = [], []
    for position, coordinate in enumerate(coordinates):
        leaves = [_leaf(pieces[position], tensor.requires_grad) for pieces, tensor in zip(shards, tensors, strict=True)]
        shapes = [
            local_shape(result.shape, layout, axis_sizes, coordinate)
            for result, layout in zip(op.results, result_layouts, strict=True)
        ]
        arguments = local_arguments(op, [tuple(leaf.shape) for leaf in leaves], shapes)
        try:
            results = _run_local(op, arguments, leaves, strategies, axis_sizes, coordinate)
        except Exception as error:
            raise NotEqual(f"the local call fails: {error}", where=where) from error
        for at, (result, shape) in enumerate(zip(results, shapes, strict=True)):
            if tuple(result.shape) != shape:
                raise NotEqual(
                    f"result {at} has shape {tuple(result.shape)} on rank {coordinate}, its placement says {shape}",
                    where=where,
                )
        local_results.append(results)
        local_leaves.append(leaves)
    if not values:
        return
    for at, (value, layout) in enumerate(zip(expected, result_layouts, strict=True)):
        _compare(
            join([results[at].detach() for results in local_results], layout, axis_sizes, where),
            value.detach(),
            f"result {at}",
            where,
        )
    _check_gradients(
        whole, expected, local_leaves, local_results, operand_layouts, result_layouts, axis_sizes, generator, where
    )


def _check_gradients(
    whole: Sequence[Tensor],
    expected: Sequence[Tensor],
    local_leaves: Sequence[Sequence[Tensor]],
    local_results: Sequence[Sequence[Tensor]],
    operand_layouts: Sequence[Layout],
    result_layouts: Sequence[Layout],
    axis_sizes: Sequence[int],
    generator: torch.Generator,
    where: str,
) -> None:
    flowing = [at for at, value in enumerate(expected) if value.requires_grad]
    leaves = [at for at, leaf in enumerate(whole) if leaf.requires_grad]
    if not flowing or not leaves:
        return
    upstream = {at: torch.randn(expected[at].shape, dtype=expected[at].dtype, generator=generator) for at in flowing}
    true = _gradients([whole[at] for at in leaves], [expected[at] for at in flowing], [upstream[at] for at in flowing])
    pieces = {at: cut(upstream[at], dual(result_layouts[at]), axis_sizes, generator) for at in flowing}
    found = [
        _gradients(
            [ranked[at] for at in leaves], [results[at] for at in flowing], [pieces[at][position] for at in flowing]
        )
        for position, (ranked, results) in enumerate(zip(local_leaves, local_results, strict=True))
    ]
    for number, at in enumerate(leaves):
        joined = join([gradients[number] for gradients in found], dual(operand_layouts[at]), axis_sizes, where)
        _compare(joined, true[number], f"gradient of operand {at}", where)


def _gradients(leaves: Sequence[Tensor], results: Sequence[Tensor], upstream: Sequence[Tensor]) -> list[Tensor]:
    """Gradients with zeros where none flows."""
    live = [(result, gradient) for result, gradient in zip(results, upstream, strict=True) if result.requires_grad]
    if not live:
        return [torch.zeros_like(leaf) for leaf in leaves]
    found = torch.autograd.grad(
        [result for result, _ in live], list(leaves), [gradient for _, gradient in live], allow_unused=True
    )
    return [
        torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in zip(leaves, found, strict=True)
    ]


def dual(layout: Layout) -> Layout:
    """How the gradient lies when the value lies as `layout`: partial where replicated, whole where partial."""
    swap = {R: P, P: R}
    return tuple(swap.get(placement, placement) for placement in layout)


def cut(tensor: Tensor, layout: Layout, axis_sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Each rank's piece, ranks in mesh order; partial sums are random."""
    if not layout:
        return [tensor]
    ranks, placement = axis_sizes[0], layout[0]
    if placement.dim is not None:
        pieces = list(torch.split(tensor, list(shard_sizes(tensor.shape[placement.dim], ranks)), placement.dim))
    elif placement == P:
        pieces = [_noise(tensor, generator) for _ in range(ranks - 1)]
        pieces.append(tensor - sum(pieces))
    else:
        pieces = [tensor] * ranks
    return [part for piece in pieces for part in cut(piece, layout[1:], axis_sizes[1:], generator)]


def join(pieces: Sequence[Tensor], layout: Layout, axis_sizes: Sequence[int], where: str) -> Tensor:
    """The whole value of the pieces of all ranks.

    Raises NotEqual where copies that must be equal are not.
    """
    if not layout:
        return pieces[0]
    each = product(axis_sizes[1:])
    parts = [join(pieces[at : at + each], layout[1:], axis_sizes[1:], where) for at in range(0, len(pieces), each)]
    if layout[0].dim is not None:
        return torch.cat(parts, layout[0].dim)
    if layout[0] == P:
        return torch.stack(parts).sum(0)
    for part in parts[1:]:
        _compare(part, parts[0], "a copy that should be equal on all ranks", where)
    return parts[0]


def _run(op: Operator, arguments: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    def real(value: Any) -> Any:
        if isinstance(value, Operand):
            return tensors[value.index]
        return [real(item) for item in value] if isinstance(value, tuple) else value

    target = overload(op.name)
    assert target is not None, op.name
    result = target(**{name: real(value) for name, value in arguments.items()})
    return [result] if isinstance(result, Tensor) else [item for item in result if isinstance(item, Tensor)]


def _run_local(
    op: Operator,
    arguments: Mapping[str, Any],
    tensors: list[Tensor],
    strategies: Sequence[AxisStrategy],
    axis_sizes: Sequence[int],
    coordinate: Sequence[int],
) -> list[Tensor]:
    scale = 1
    run: Callable[[Operator, Mapping[str, Any], Sequence[Tensor]], list[Tensor]] = _run
    for strategy, ranks, rank in zip(strategies, axis_sizes, coordinate, strict=True):
        if strategy.implementation == "average":
            scale *= ranks
        elif strategy.implementation == "vocab_embedding":
            start = rank * math.ceil(op.operands[0].shape[0] / ranks)

            def run(
                op: Operator, arguments: Mapping[str, Any], tensors: Sequence[Tensor], start: int = start
            ) -> list[Tensor]:
                return [_embedding_of_rows(arguments, tensors[0], tensors[1], start)]

        elif strategy.implementation is not None:
            raise BadInput(f"the oracle cannot run '{strategy.implementation}' in one process")
    return [result / scale for result in run(op, arguments, tensors)] if scale > 1 else run(op, arguments, tensors)


def _embedding_of_rows(arguments: Mapping[str, Any], weight: Tensor, ids: Tensor, start: int) -> Tensor:
    """Rows held here, zero for others; the padding row yields its value and takes no gradient."""
    held = (ids >= start) & (ids < start + weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
    rows = weight[(ids - start).clamp(0, weight.shape[0] - 1)]
    rows = torch.where((ids == arguments["padding_idx"]).unsqueeze(-1), rows.detach(), rows)
    return rows * held.unsqueeze(-1)


def _leaf(tensor: Tensor, flows: bool) -> Tensor:
    return tensor.detach().clone().requires_grad_(flows)


def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
    return torch.randint(-3, 4, tensor.shape, generator=generator).to(tensor.dtype)


def _compare(found: Tensor, expected: Tensor, what: str, where: str) -> None:
    if found.shape != expected.shape:
        raise NotEqual(f"{what} has shape {list(found.shape)} instead of {list(expected.shape)}", where=where)
    if not expected.is_floating_point():
        if not torch.equal(found, expected):
            raise NotEqual(f"{what} differs", where=where)
        return
    scale = 1.0 + (float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0)
    if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True):
        error = float((found - expected).nan_to_num().abs().max())
        raise NotEqual(f"{what} differs by {error:.1e}", where=where)


def _text(strategy: AxisStrategy) -> str:
    name = f" by {strategy.implementation}" if strategy.implementation else ""
    return f"{', '.join(map(str, strategy.operands))} -> {', '.join(map(str, strategy.results))}{name}"
