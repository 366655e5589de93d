"""Scaled dot product attention: batch, heads, and queries where each sees what its rank holds."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction


def _attention(op: Operator) -> Rule:
    """Queries b... h s k, keys and values b... h t k.

    Queries may be split unless the causal mask, which counts from a shard's own first query, is drawn by the operator.
    With enable_gqa query heads and fewer key-value heads are cut in proportion.
    """
    rank = len(op.operands[0].shape)
    queries = "s!" if op.arguments.get("is_causal") else "s"
    heads = "" if rank < 3 else "h~" if op.arguments.get("enable_gqa") else "h"
    batch = "b..." if rank > 3 else ""
    keys = f"{batch} {heads} t! k!"
    mask_rank = len(op.operands[3].shape) if len(op.operands) > 3 else 0
    mask = " ".join(
        [batch if mask_rank > 3 else "", heads if mask_rank > 2 else "", queries if mask_rank > 1 else "", "t!"]
    )
    return Rule(
        f"{batch} {heads} {queries} k!, {keys}, {keys.replace('k!', 'v!')}, {mask} -> {batch} {heads} {queries} v!"
    )


RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType({"aten.scaled_dot_product_attention.default": _attention})
