"""What an operator's schema says: which arguments are tensors, whether it mutates or draws random numbers."""

from functools import cache

import torch

from autoshard.program import Operand, Operator


@cache
def overload(name: str) -> torch._ops.OpOverload | None:
    """The overload called `name` ("aten.linear.default"), or None where no such operator is registered."""
    try:
        namespace, packet, variant = name.split(".")
        found = getattr(getattr(getattr(torch.ops, namespace), packet), variant)
    except (AttributeError, ValueError, RuntimeError):
        return None
    return found if isinstance(found, torch._ops.OpOverload) else None


@cache
def tensor_arguments(name: str) -> tuple[tuple[str, bool], ...] | None:
    """Names of the tensor arguments in schema order, each with whether it is a list; None for an unknown operator."""
    found = overload(name)
    if found is None:
        return None
    types = [(argument.name, str(argument.type)) for argument in found._schema.arguments]
    return tuple((argument, "List" in type_) for argument, type_ in types if "Tensor" in type_)


def slots(op: Operator) -> tuple[int, ...]:
    """For each operand its position among the operator's tensor arguments, absent optional ones counted.

    layer_norm(x, shape, None, bias) has slots (0, 2). Operators with tensor lists count their operands one by one.
    """
    names = tensor_arguments(op.name)
    if names is None or any(is_list for _, is_list in names) or any(name not in op.arguments for name, _ in names):
        return tuple(range(len(op.operands)))
    found = [slot for slot, (name, _) in enumerate(names) if isinstance(op.arguments[name], Operand)]
    return tuple(found) if len(found) == len(op.operands) else tuple(range(len(op.operands)))


def operand_index(op: Operator, argument: str) -> int | None:
    """Index of the operand passed as `argument`, None where it is absent or no tensor."""
    value = op.arguments.get(argument)
    return value.index if isinstance(value, Operand) else None


def runs_redundantly(name: str) -> bool:
    """Whether the same inputs give the same results on every rank: functional, and no random numbers."""
    found = overload(name)
    if found is None:
        return False
    return not found._schema.is_mutable and torch.Tag.nondeterministic_seeded not in found.tags
