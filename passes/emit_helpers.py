"""Calls of the helpers that are copied beside emitted code: changes of placement, and operators on split tensors."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.passes.emit_expression import (
    PRODUCT,
    Expression,
    Scope,
    Writer,
    function,
    loss_arguments,
    text,
    value,
)
from autoshard.passes.local import LocalNode


def _dropout(node: LocalNode, scope: Scope) -> Expression:
    name = node.arguments.get("input", node.arguments.get("self")).name
    given = [scope.ref(name).text, text(node.arguments["p"], scope), "self.training", *_splitting(name, scope)]
    return Expression(f"{scope.uses('operators', 'dropout')}({', '.join(given)})")


def _attention(node: LocalNode, scope: Scope) -> Expression:
    called = function("F.scaled_dot_product_attention")
    if node.arguments.get("dropout_p", 0.0) == 0:
        return called(node, scope)
    tensors = [text(node.arguments[name], scope) for name in ("query", "key", "value")]
    groups = _splitting(node.arguments["query"].name, scope)
    given = [*tensors, text(node.arguments["dropout_p"], scope), "self.training", *groups]
    for name, default in (("attn_mask", None), ("is_causal", False), ("scale", None), ("enable_gqa", False)):
        if node.arguments.get(name, default) is not default:
            given.append(f"{name}={text(node.arguments[name], scope)}")
    return Expression(f"{scope.uses('operators', 'attention_with_dropout')}({', '.join(given)})")


def _splitting(name: str, scope: Scope) -> list[str]:
    """Groups of the axes that split a tensor."""
    axes = dict.fromkeys(axis for extent in scope.tensor(name).dims for axis in extent.axes)
    return [scope.group(axis) for axis in axes]


def _groups(node: LocalNode, scope: Scope) -> list[str]:
    return [scope.group(axis) for axis in node.groups]


def _vocab_embedding(node: LocalNode, scope: Scope) -> Expression:
    given = [text(node.arguments[name], scope) for name in ("indices", "weight", "rows")] + _groups(node, scope)
    if node.arguments.get("padding_idx", -1) >= 0:
        given.append(f"padding_idx={text(node.arguments['padding_idx'], scope)}")
    return Expression(f"{scope.uses('operators', 'vocab_embedding')}({', '.join(given)})")


def _vocab_cross_entropy(node: LocalNode, scope: Scope) -> Expression:
    given = [text(node.arguments[name], scope) for name in ("self", "target", "classes")] + _groups(node, scope)
    given += [item for item in loss_arguments(node, scope) if item != 'reduction="sum"']
    return Expression(f"{scope.uses('operators', 'vocab_cross_entropy')}({', '.join(given)})")


def _batch_norm(node: LocalNode, scope: Scope) -> Expression:
    names = ("input", "weight", "bias", "running_mean", "running_var", "momentum", "eps")
    given = [text(node.arguments.get(name), scope) for name in names] + _groups(node, scope)
    return Expression(f"{scope.uses('operators', 'batch_norm')}({', '.join(given)})")


BATCH_NORM_RESULTS = (0, 3, 4)
"""Which results of the ATen operator the helper returns."""


def _average(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["x"], scope)
    factors = [f"{group}.size()" for group in _groups(node, scope)]
    if "microbatches" in node.arguments:
        factors.append(text(node.arguments["microbatches"], scope))
    divisor = factors[0] if len(factors) == 1 else f"({' * '.join(factors)})"
    return Expression(f"{x.within(PRODUCT)} / {divisor}", PRODUCT)


def conversion(node: LocalNode, scope: Scope) -> Expression:
    """A call of a function of collectives.py."""
    function = scope.uses("collectives", node.target)
    given = [text(node.arguments["x"], scope)]
    given += [f"{name}={node.arguments[name]}" for name in ("dim", "source", "target") if name in node.arguments]
    group = scope.group(node.groups[0])
    given.append(f"group={group}" if len(given) > 1 else group)
    if "size" in node.arguments:
        given.append(f"size={text(node.arguments['size'], scope)}")
    return Expression(f"{function}({', '.join(given)})")


WRITERS: Mapping[str, Writer] = MappingProxyType(
    {
        "aten.dropout.default": _dropout,
        "aten.scaled_dot_product_attention.default": _attention,
        "aten.native_dropout.default": _dropout,
        "aten._native_batch_norm_legit_functional.default": _batch_norm,
        "vocab_embedding": _vocab_embedding,
        "vocab_cross_entropy": _vocab_cross_entropy,
        "batch_norm": _batch_norm,
        "average": _average,
    }
)
