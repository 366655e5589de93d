"""Bytes: parameters with their gradients and optimizer state, and what autograd keeps of an operator for its backward.

What is kept is observed: the operator runs on meta tensors (shapes without memory) under saved-tensor hooks, and every
saved tensor is traced to the operand or result whose storage it shares. Attention is the exception: meta tensors take
its unfused form, so the fused form's list is written down (queries, keys, values, result, and one float32 a row).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autoshard.placement import Layout, local_shape
from autoshard.program import Operand, Operator, TensorType

OPTIMIZER_STATES: Mapping[str, int] = MappingProxyType({"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2})
"""Tensors of a parameter's size and dtype that an optimizer keeps for it."""


@dataclass(frozen=True)
class SavedValues:
    """What autograd keeps for an operator's backward: operands and results by index, and bytes of its own.

    extra_bytes: tensors that are neither (a dropout mask not returned, row statistics), at the operator's shapes.
    observed: False where the operator could not be run and everything is assumed kept.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    extra_bytes: int = 0
    observed: bool = True


@dataclass(frozen=True)
class ParameterMemory:
    """Bytes of one parameter on its fullest rank."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All three."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


def optimizer_state_bytes(parameter_bytes: int, optimizer: str) -> int:
    """Bytes of optimizer state for `parameter_bytes` of parameters; an unknown optimizer counts as adamw."""
    return OPTIMIZER_STATES.get(optimizer, 2) * parameter_bytes


def parameter_memory(
    type: TensorType, layout: Layout, axis_sizes: tuple[int, ...], optimizer: str, trainable: bool = True
) -> ParameterMemory:
    """Bytes of a parameter of global type `type` stored in `layout`."""
    own = math.prod(local_shape(type.shape, layout, axis_sizes)) * type.dtype.itemsize
    if not trainable:
        return ParameterMemory(own, 0, 0)
    return ParameterMemory(own, own, optimizer_state_bytes(own, optimizer))


def saved_values(op: Operator) -> SavedValues:
    """What autograd keeps of `op`, at whatever shapes it has (local or global), for backward."""
    if not any(operand.needs_grad and _differentiable(operand) for operand in op.operands):
        return SavedValues((), ())
    arguments = tuple((name, _frozen(value)) for name, value in op.arguments.items())
    try:
        return _saved_values(op.name, op.operands, op.results, arguments)
    except TypeError:  # an argument that cannot be hashed
        return _observe(op.name, op.operands, op.results, arguments)


@lru_cache(maxsize=65536)
def _saved_values(
    name: str,
    operands: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    arguments: tuple[tuple[str, Any], ...],
) -> SavedValues:
    return _observe(name, operands, results, arguments)


def _observe(
    name: str,
    operands: tuple[TensorType, ...],
    results: tuple[TensorType, ...],
    arguments: tuple[tuple[str, Any], ...],
) -> SavedValues:
    if "scaled_dot_product" in name:
        rows = math.prod(operands[0].shape[:-1])
        mask = tuple(range(3, len(operands)))
        return SavedValues((0, 1, 2, *mask), (0,), 4 * rows)
    try:
        return _run(name, operands, dict(arguments))
    except Exception:  # any failure of any operator, custom ones too, has the same answer
        floating = tuple(index for index, operand in enumerate(operands) if _differentiable(operand))
        return SavedValues(floating, tuple(range(len(results))), observed=False)


def _run(name: str, operands: tuple[TensorType, ...], arguments: Mapping[str, Any]) -> SavedValues:
    call = _overload(name)
    leaves = [_meta(operand) for operand in operands]
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in call._schema.arguments:
        if argument.name not in arguments:
            continue
        value = _tensors(arguments[argument.name], leaves)
        if argument.name == "device" and value is not None:
            value = torch.device("meta")
        if argument.kwarg_only:
            named[argument.name] = value
        else:
            positional.append(value)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = call(*positional, **named)
    outputs = [value for value in (output if isinstance(output, (tuple, list)) else (output,)) if _is_tensor(value)]
    return _traced(kept, leaves, outputs)


def _traced(kept: list[Tensor], leaves: list[Tensor], outputs: list[Tensor]) -> SavedValues:
    of_operand = {_storage(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}
    of_result = {_storage(output): index for index, output in reversed(list(enumerate(outputs)))}
    operands, results, extra = set(), set(), {}
    for tensor in kept:
        storage = _storage(tensor)
        if storage in of_operand:
            operands.add(of_operand[storage])
        elif storage in of_result:
            results.add(of_result[storage])
        else:
            extra[storage] = tensor.untyped_storage().nbytes()
    return SavedValues(tuple(sorted(operands)), tuple(sorted(results)), sum(extra.values()))


def _overload(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _meta(type: TensorType) -> Tensor:
    tensor = torch.empty(type.shape, dtype=type.dtype, device="meta")
    return tensor.requires_grad_(type.needs_grad and _differentiable(type))


def _tensors(value: Any, leaves: list[Tensor]) -> Any:
    if isinstance(value, Operand):
        return leaves[value.index]
    if isinstance(value, (tuple, list)):
        return [_tensors(item, leaves) for item in value]
    return value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, (tuple, list)) else value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _differentiable(type: TensorType) -> bool:
    return type.dtype.is_floating_point or type.dtype.is_complex
