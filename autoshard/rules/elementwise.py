"""Operators that work element by element: any dim may be split; linear ones let P through."""

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.program import Operator
from autoshard.rules.language import Rule, RuleFunction
from autoshard.rules.letters import dims_of, line

UNARY = Rule("b... -> b...")
UNARY_LINEAR = Rule("b... -> b...", linear=True)
BINARY = Rule("b..., b... -> b...")
BINARY_LINEAR = Rule(
    "b..., b... -> b...", linear=((0, 1),)
)  # jointly: a number in place of the second is no partial sum
TERNARY = Rule("b..., b..., b... -> b...")

_UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_not ceil celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 "
    "floor frac gelu hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan leaky_relu lgamma log log10 "
    "log1p log2 log_sigmoid logical_not logit mish reciprocal relu relu6 round rsqrt selu sgn sigmoid sign silu sin "
    "sinh softplus softshrink sqrt square tan tanh trunc threshold nan_to_num clamp clamp_min clamp_max deg2rad "
    "rad2deg special_expit"
)
_BINARY = "maximum minimum fmin fmax atan2 hypot logical_and logical_or logical_xor logaddexp logaddexp2"
_TENSOR_OR_SCALAR = "eq ne lt le gt ge remainder fmod bitwise_and bitwise_or bitwise_xor"


def _type_as(op: Operator) -> Rule:
    """type_as(x, other): only the dtype of `other` matters, whatever its shape."""
    own, other = dims_of(len(op.operands[0].shape)), dims_of(len(op.operands[1].shape), "x")
    return Rule(line((own, (letter + "!" for letter in other)), (own,)), linear=((0,),))


def _masked_fill(op: Operator) -> Rule:
    """Filling with zero is linear."""
    return Rule("b..., b... -> b...", linear=((0,),) if op.arguments.get("value") == 0 else False)


def _divide(op: Operator) -> Rule:
    """Division is linear in the numerator unless it rounds."""
    return Rule("b..., b... -> b...", linear=False if op.arguments.get("rounding_mode") else ((0,),))


def _where_scalar(op: Operator) -> Rule:
    """where(condition, x, 0) and where(condition, 0, x) are linear in x."""
    other = op.arguments.get("other", op.arguments.get("self"))
    scalar = op.arguments["self"] if op.name.endswith("ScalarSelf") else other
    return Rule("b..., b... -> b...", linear=((1,),) if scalar == 0 else False)


def _product(op: Operator) -> Rule:
    """x * y is linear in x and in y, one at a time; not in an x multiplied by itself, which arrives as two operands."""
    return Rule("b..., b... -> b...", linear=((0,), (1,)))


def _table() -> dict[str, Rule | RuleFunction]:
    rules: dict[str, Rule | RuleFunction] = {f"aten.{name}.default": UNARY for name in _UNARY.split()}
    rules |= {f"aten.{name}.default": BINARY for name in _BINARY.split()}
    for name in _TENSOR_OR_SCALAR.split():
        rules |= {f"aten.{name}.Tensor": BINARY, f"aten.{name}.Scalar": UNARY}
    rules |= {f"aten.{name}.Tensor": BINARY for name in ("__and__", "__or__", "__xor__")}
    rules |= {f"aten.{name}.Scalar": UNARY for name in ("__and__", "__or__", "__xor__")}
    rules |= {
        "aten.floor_divide.default": BINARY,
        "aten.floor_divide.Scalar": UNARY,
        "aten.xlogy.Tensor": BINARY,
        "aten.add.Tensor": BINARY_LINEAR,
        "aten.sub.Tensor": BINARY_LINEAR,
        "aten.rsub.Scalar": UNARY,
        "aten.rsub.Tensor": BINARY_LINEAR,
        "aten.add.Scalar": UNARY,
        "aten.sub.Scalar": UNARY,
        "aten.neg.default": UNARY_LINEAR,
        "aten.positive.default": UNARY_LINEAR,
        "aten.mul.Tensor": _product,
        "aten.mul.Scalar": UNARY_LINEAR,
        "aten.div.Tensor": _divide,
        "aten.div.Scalar": UNARY_LINEAR,
        "aten.div.Tensor_mode": _divide,
        "aten.true_divide.Tensor": _divide,
        "aten.pow.Tensor_Scalar": UNARY,
        "aten.pow.Tensor_Tensor": BINARY,
        "aten.pow.Scalar": UNARY,
        "aten.min.other": BINARY,
        "aten.max.other": BINARY,
        "aten.clamp.Tensor": TERNARY,
        "aten.clamp_min.Tensor": BINARY,
        "aten.clamp_max.Tensor": BINARY,
        "aten.round.decimals": UNARY,
        "aten.prelu.default": _prelu,
        "aten.lerp.Scalar": BINARY_LINEAR,
        "aten.lerp.Tensor": Rule("b..., b..., b... -> b...", linear=((0, 1),)),
        "aten.addcmul.default": Rule("b..., b..., b... -> b...", linear=((0, 1), (0, 2))),
        "aten.addcdiv.default": Rule("b..., b..., b... -> b...", linear=((0, 1),)),
        "aten.where.self": Rule("b..., b..., b... -> b...", linear=((1, 2),)),
        "aten.where.ScalarOther": _where_scalar,
        "aten.where.ScalarSelf": _where_scalar,
        "aten.where.Scalar": UNARY,
        "aten.masked_fill.Scalar": _masked_fill,
        "aten.masked_fill.Tensor": Rule("b..., b..., b... -> b...", linear=((0, 2),)),
        "aten.copy.default": Rule("b..., b... -> b..."),
        "aten._to_copy.default": UNARY_LINEAR,  # except to integers, which `Rule.expand` refuses
        "aten.to.dtype": UNARY_LINEAR,  # except to integers, which `Rule.expand` refuses
        "aten.type_as.default": _type_as,
        "aten.clone.default": UNARY_LINEAR,
        "aten.contiguous.default": UNARY_LINEAR,
        "aten.alias.default": UNARY_LINEAR,
        "aten.detach.default": UNARY_LINEAR,
        "aten.lift_fresh.default": UNARY_LINEAR,
        "aten.lift_fresh_copy.default": UNARY_LINEAR,
        "aten.fill.Scalar": UNARY,
        "aten.fill.Tensor": Rule("b..., -> b..."),
    }
    for name in ("bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__"):
        rules[f"aten.{name}.Tensor"] = BINARY
    return rules


def _prelu(op: Operator) -> Rule:
    """prelu(x, weight): one weight, or one a channel (dim 1)."""
    rank = len(op.operands[0].shape)
    if op.operands[1].numel == 1:
        own = dims_of(rank)
        return Rule(line((own, ("w!",) * len(op.operands[1].shape)), (own,)))
    return Rule("b c x..., c -> b c x..." if rank > 1 else "c, c -> c")


RULES: Mapping[str, Rule | RuleFunction] = MappingProxyType(_table())
