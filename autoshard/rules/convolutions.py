"""Convolutions, pooling, resampling: batch and channels are split, space stays whole."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction


def _convolution(op: Operator) -> Rule:
    """Input b c x..., weight o c k..., bias o. Grouped: whole groups of channels may be split off."""
    groups = op.arguments.get("groups", 1)
    transposed = bool(op.arguments.get("transposed")) or "transpose" in op.name
    batch = "b " if len(op.operands[0].shape) == len(op.operands[1].shape) else ""
    source, target = f"{batch}c x!...", f"{batch}o y!..."
    if groups == 1:
        weight = "c o k!..." if transposed else "o c k!..."
        return Rule(f"{source}, {weight}, +o -> {target}", linear=((0,),), nonempty=True)
    return Rule(
        f"{batch}c~ x!..., c~ i! k!..., +c~ -> {batch}c~ y!...",
        linear=((0,),),
        divides=(("c", groups),),
        nonempty=True,
    )


def _spatial(dims: int, linear: bool) -> RuleFunction:
    """Operators that work on the last `dims` dims of each sample and channel."""

    def rule(op: Operator) -> Rule:
        source = " ".join(f"x{at}!" for at in range(dims))
        target = source.replace("x", "y")
        return Rule(f"b... {source} -> {', '.join([f'b... {target}'] * len(op.results))}", linear=linear, nonempty=True)

    return rule


def _table() -> dict[str, Rule | RuleFunction]:
    rules: dict[str, Rule | RuleFunction] = {
        "aten.convolution.default": _convolution,
        "aten.conv_transpose1d.default": _convolution,
        "aten.conv_transpose2d.input": _convolution,
        "aten.conv_transpose3d.input": _convolution,
    }
    for dims in (1, 2, 3):
        rules |= {
            f"aten.conv{dims}d.default": _convolution,
            f"aten.conv{dims}d.padding": _convolution,
            f"aten.max_pool{dims}d.default": _spatial(dims, False),
            f"aten.max_pool{dims}d_with_indices.default": _spatial(dims, False),
            f"aten.avg_pool{dims}d.default": _spatial(dims, True),
            f"aten.adaptive_avg_pool{dims}d.default": _spatial(dims, True),
            f"aten._adaptive_avg_pool{dims}d.default": _spatial(dims, True),
            f"aten.adaptive_max_pool{dims}d.default": _spatial(dims, False),
            f"aten.upsample_nearest{dims}d.vec": _spatial(dims, True),
            f"aten.upsample_nearest{dims}d.default": _spatial(dims, True),
        }
    for name, dims in (
        ("upsample_linear1d", 1),
        ("upsample_bilinear2d", 2),
        ("upsample_bicubic2d", 2),
        ("upsample_trilinear3d", 3),
    ):
        rules |= {f"aten.{name}.vec": _spatial(dims, True), f"aten.{name}.default": _spatial(dims, True)}
    for name in ("max_pool1d_with_indices", "_adaptive_avg_pool1d"):
        del rules[f"aten.{name}.default"]  # torch has none
    return rules


RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(_table())
