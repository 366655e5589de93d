"""Tensors made from nothing: whole on every rank, or, where every element is alike, cut anywhere."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line


def _filled(op: Operator) -> Rule:
    """full, zeros, ones, empty: any dim may be cut."""
    return Rule(line((), (dims_of(len(op.results[0].shape)),)))


def _counted(op: Operator) -> Rule:
    """arange and its kin: values depend on the position."""
    return Rule(line((), ([letter + "!" for letter in dims_of(len(op.results[0].shape))],)))


def _new(op: Operator) -> Rule:
    """new_zeros(x, size): only the dtype of x matters."""
    other, own = dims_of(len(op.operands[0].shape), "x"), dims_of(len(op.results[0].shape))
    return Rule(line(([letter + "!" for letter in other],), (own,)))


LIKE = Rule("b... -> b...")

RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(
    {f"aten.{name}": _filled for name in ("full.default", "zeros.default", "ones.default", "empty.memory_format")}
    | {
        f"aten.{name}": _counted
        for name in (
            "arange.default",
            "arange.start",
            "arange.start_step",
            "linspace.default",
            "scalar_tensor.default",
            "eye.default",
            "eye.m",
            "tril_indices.default",
            "triu_indices.default",
        )
    }
    | {f"aten.{name}.default": _new for name in ("new_zeros", "new_ones", "new_full", "new_empty")}
    | {f"aten.{name}.default": LIKE for name in ("zeros_like", "ones_like", "full_like", "empty_like")}
)
