"""The local call: the operator on one rank's shards, sizes in its arguments cut to what the rank holds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autoshard.placement import Layout, local_shape
from autoshard.program import Operator

Shape = tuple[int, ...]
Adjust = Callable[[Operator, Sequence[Shape], Sequence[Shape]], Mapping[str, Any]]


def _size(argument: str) -> Adjust:
    """The argument is the result's shape."""
    return lambda op, operands, results: {argument: results[0]}


def _unflatten(op: Operator, operands: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
    dim = op.arguments["dim"] % len(op.operands[0].shape)
    return {"sizes": results[0][dim : dim + len(op.arguments["sizes"])]}


def _repeats(op: Operator, operands: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
    """New dims and dims of size 1 are repeated to the local size; the others as often as before."""
    repeats = op.arguments["repeats"]
    new = len(repeats) - len(operands[0])
    source = (1,) * new + tuple(op.operands[0].shape)
    return {
        "repeats": tuple(
            local if size == 1 else times for local, size, times in zip(results[0], source, repeats, strict=True)
        )
    }


def _groups(argument: str, dim: int) -> Adjust:
    """A number of groups of operand 0's channels, counted by the channels left."""

    def adjust(op: Operator, operands: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
        groups = op.arguments.get(argument, 1)
        at = dim % len(operands[0])
        return {argument: groups if groups == 1 else groups * operands[0][at] // op.operands[0].shape[at]}

    return adjust


def _convolution(op: Operator, operands: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
    """The channel dim is the second where samples are stacked, else the first."""
    return _groups("groups", 1 - (len(operands[1]) - len(operands[0])))(op, operands, results)


def _slice(op: Operator, operands: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
    """A slice that keeps a whole dim has an end that may be that dim's size."""
    dim = op.arguments.get("dim", 0) % len(operands[0])
    return {"start": 0, "end": operands[0][dim]} if operands[0][dim] != op.operands[0].shape[dim] else {}


def _narrow(op: Operator, operands: Sequence[Shape], results: Sequence[Shape]) -> Mapping[str, Any]:
    dim = op.arguments["dim"] % len(operands[0])
    return {"length": results[0][dim]}


LOCAL_ARGUMENTS: Mapping[str, Adjust] = MappingProxyType(
    {
        "aten.reshape.default": _size("shape"),
        "aten.view.default": _size("size"),
        "aten._unsafe_view.default": _size("size"),
        "aten.view_copy.default": _size("size"),
        "aten.unflatten.int": _unflatten,
        "aten.expand.default": _size("size"),
        "aten.broadcast_to.default": _size("size"),
        "aten.repeat.default": _repeats,
        "aten.slice.Tensor": _slice,
        "aten.narrow.default": _narrow,
        "aten.full.default": _size("size"),
        "aten.zeros.default": _size("size"),
        "aten.ones.default": _size("size"),
        "aten.empty.memory_format": _size("size"),
        "aten.new_zeros.default": _size("size"),
        "aten.new_ones.default": _size("size"),
        "aten.new_full.default": _size("size"),
        "aten.new_empty.default": _size("size"),
        "aten.group_norm.default": _groups("num_groups", 1),
        "aten.convolution.default": _convolution,
        "aten.conv1d.default": _convolution,
        "aten.conv2d.default": _convolution,
        "aten.conv3d.default": _convolution,
        "aten.conv1d.padding": _convolution,
        "aten.conv2d.padding": _convolution,
        "aten.conv3d.padding": _convolution,
        "aten.conv_transpose1d.default": _convolution,
        "aten.conv_transpose2d.input": _convolution,
        "aten.conv_transpose3d.input": _convolution,
    }
)


def local_arguments(
    op: Operator, local_operand_shapes: Sequence[Shape], local_result_shapes: Sequence[Shape]
) -> Mapping[str, Any]:
    """All arguments of the local call: those of `op`, sizes replaced by this rank's.

    local_operand_shapes, local_result_shapes: this rank's shapes, in the order of `op.operands` and `op.results`.
    """
    adjust = LOCAL_ARGUMENTS.get(op.name)
    if adjust is None or not (local_operand_shapes or local_result_shapes):
        return op.arguments
    return {**op.arguments, **adjust(op, local_operand_shapes, local_result_shapes)}


def local_operator(
    op: Operator,
    operands: Sequence[Layout],
    results: Sequence[Layout],
    axis_sizes: Sequence[int],
    rank: Sequence[int] | None = None,
) -> Operator:
    """The operator as the rank at mesh coordinate `rank` (the one with the largest shards, when None) sees it."""
    operand_types = tuple(
        replace(type_, shape=local_shape(type_.shape, layout, axis_sizes, rank))
        for type_, layout in zip(op.operands, operands, strict=True)
    )
    result_types = tuple(
        replace(type_, shape=local_shape(type_.shape, layout, axis_sizes, rank))
        for type_, layout in zip(op.results, results, strict=True)
    )
    arguments = local_arguments(op, [type_.shape for type_ in operand_types], [type_.shape for type_ in result_types])
    return Operator(op.name, operand_types, result_types, arguments)
