"""Lookups by index: indices are split freely, the dim they index stays whole."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from autoshard.program import Operand, Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line, mark, wrap


def _embedding(op: Operator) -> Rule:
    """Rows by id. A table split by rows has its own implementation; counting ids over the batch keeps it whole."""
    if op.arguments.get("scale_grad_by_freq"):
        return Rule("v! d, b!... -> b!... d")
    return Rule("v@vocab_embedding d, b... -> b... d")


def _index_letters(op: Operator) -> tuple[list[str], list[list[str]], list[str]] | None:
    """Letters of x, of each index and of x[indices]; None for boolean masks, whose result size depends on values."""
    shape, indices = op.operands[0].shape, op.arguments["indices"]
    given = {at: op.operands[index.index] for at, index in enumerate(indices) if isinstance(index, Operand)}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        return None
    rank = max(len(index.shape) for index in given.values())
    looked_up = dims_of(rank, "i")
    own = mark(dims_of(len(shape)), given)
    positions = sorted(given)
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    start = positions[0] if adjacent else 0
    rest = [letter for at, letter in enumerate(own) if at not in given]
    result = [*rest[:start], *looked_up, *rest[start:]]
    return list(own), [list(looked_up[rank - len(given[at].shape) :]) for at in positions], result


def _index(op: Operator) -> Rule | None:
    letters = _index_letters(op)
    if letters is None:
        return None
    own, indices, result = letters
    return Rule(line((own, *indices), (result,)), linear=((0,),))


def _index_put(op: Operator) -> Rule | None:
    """x with x[indices] replaced by (or increased by) values: only dims that are not indexed are split."""
    letters = _index_letters(op)
    if letters is None:
        return None
    own, indices, result = letters
    fixed = [letter if letter in own else letter + "!" for letter in result]
    indices = [[letter + "!" for letter in index] for index in indices]
    values = fixed[len(fixed) - len(op.operands[-1].shape) :]
    return Rule(line((own, *indices, values), (own,)))


def _index_select(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments["dim"], rank)
    own = mark(dims_of(rank), [dim])
    result = ["i" if at == dim else letter for at, letter in enumerate(own)]
    return Rule(
        line((own, ("i",) if op.operands[1].shape else ()), (result if op.operands[1].shape else own,)), linear=((0,),)
    )


def _gather(op: Operator) -> Rule:
    """Indices along `dim` are split freely, other dims together with x where both have the whole dim."""
    shape, index = op.operands[0].shape, op.operands[1].shape
    dim = wrap(op.arguments["dim"], len(shape))
    own = dims_of(len(shape))
    source = ["x!" if at == dim else letter if shape[at] == index[at] else f"x{at}!" for at, letter in enumerate(own)]
    target = [letter if at == dim or shape[at] == index[at] else f"y{at}!" for at, letter in enumerate(own)]
    return Rule(line((source, target), (target,)), linear=((0,),))


def _scatter(op: Operator) -> Rule:
    """x with elements replaced by (or increased by) src at index along `dim`: dims that all share are split."""
    shape, dim = op.operands[0].shape, wrap(op.arguments["dim"], len(op.operands[0].shape))
    shared = [
        at for at in range(len(shape)) if at != dim and all(operand.shape[at] == shape[at] for operand in op.operands)
    ]
    parts = [
        [letter if at in shared else f"x{at}p{part}!" for at, letter in enumerate(dims_of(len(shape)))]
        for part in range(len(op.operands))
    ]
    return Rule(line(parts, (parts[0],)))


def _index_add(op: Operator) -> Rule:
    rank = len(op.operands[0].shape)
    dim = wrap(op.arguments["dim"], rank)
    own = mark(dims_of(rank), [dim])
    source = ["i!" if at == dim else letter for at, letter in enumerate(own)]
    return Rule(line((own, ("i!",), source), (own,)), linear=((0, 2),))


def _one_hot(op: Operator) -> Rule:
    return Rule("b... -> b... c!")


RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {
        "aten.embedding.default": _embedding,
        "aten.index.Tensor": _index,
        "aten.index_put.default": _index_put,
        "aten.index_select.default": _index_select,
        "aten.gather.default": _gather,
        "aten.take_along_dim.default": _gather,
        "aten.scatter.src": _scatter,
        "aten.scatter.value": _scatter,
        "aten.scatter_add.default": _scatter,
        "aten.index_add.default": _index_add,
        "aten.one_hot.default": _one_hot,
    }
)
