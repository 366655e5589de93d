"""ATen operators as the Python that a person writes for them. What is not here is called as `torch.ops.aten...`."""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from autoshard.passes.emit_expression import (
    ATOM,
    BITS,
    COMPARISON,
    POWER,
    PRODUCT,
    REDUCTIONS,
    SUM,
    Expression,
    Scope,
    Writer,
    binary,
    first_result,
    function,
    further,
    listed,
    local_dims,
    loss_arguments,
    method,
    reversed_binary,
    schema,
    text,
    unary,
    value,
)
from autoshard.passes.local import Extent, LocalNode, Ref


def _power(node: LocalNode, scope: Scope) -> Expression:
    base, exponent = value(node.arguments["self"], scope), value(node.arguments["exponent"], scope)
    return Expression(f"{base.within(ATOM)} ** {exponent.within(ATOM)}", POWER)


# Single operators -----------------------------------------------------------------------------------------------------


def _linear(node: LocalNode, scope: Scope) -> Expression:
    scope.uses("F", "")
    given = [node.arguments[name] for name in ("input", "weight", "bias") if node.arguments.get(name) is not None]
    return Expression(f"F.linear({listed(given, scope)})")


def _norm(called: str) -> Writer:
    def write(node: LocalNode, scope: Scope) -> Expression:
        scope.uses("F", "")
        weight = node.arguments.get("weight")
        shape = Expression(f"{scope.ref(weight.name).within(ATOM)}.shape") if isinstance(weight, Ref) else None
        written = shape.text if shape else text(tuple(node.arguments["normalized_shape"]), scope)
        given = [text(node.arguments["input"], scope), written]
        return Expression(f"{called}({', '.join([*given, *further(node, scope, ('input', 'normalized_shape'))])})")

    return write


def _group_norm(node: LocalNode, scope: Scope) -> Expression:
    scope.uses("F", "")
    channels = scope.tensor(node.arguments["input"].name).dims[1]
    groups = scope.size(Extent(node.arguments["num_groups"], channels.axes))
    given = [text(node.arguments["input"], scope), groups.text]
    return Expression(
        f"F.group_norm({', '.join([*given, *further(node, scope, ('input', 'num_groups', 'cudnn_enabled'))])})"
    )


def _convolution(called: str) -> Writer:
    def write(node: LocalNode, scope: Scope) -> Expression:
        scope.uses("F", "")
        x, weight = scope.tensor(node.arguments["input"].name), scope.tensor(node.arguments["weight"].name)
        channels = x.dims[1 - (len(weight.dims) - len(x.dims))]
        given = further(node, scope, ("groups",))
        groups = node.arguments.get("groups", 1)
        if groups != 1:
            given.append(f"groups={scope.size(Extent(groups, channels.axes)).text}")
        return Expression(f"{called}({', '.join(given)})")

    return write


def _embedding(node: LocalNode, scope: Scope) -> Expression:
    scope.uses("F", "")
    given = [text(node.arguments[name], scope) for name in ("indices", "weight")]
    if node.arguments.get("padding_idx", -1) >= 0:
        given.append(text(node.arguments["padding_idx"], scope))
    if node.arguments.get("scale_grad_by_freq"):
        given.append("scale_grad_by_freq=True")
    return Expression(f"F.embedding({', '.join(given)})")


def _cross_entropy(node: LocalNode, scope: Scope) -> Expression:
    scope.uses("F", "")
    given = [text(node.arguments[name], scope) for name in ("self", "target")]
    return Expression(f"F.cross_entropy({', '.join([*given, *loss_arguments(node, scope)])})")


def _nll(node: LocalNode, scope: Scope) -> Expression:
    scope.uses("F", "")
    given = [text(node.arguments[name], scope) for name in ("self", "target")]
    return Expression(f"F.nll_loss({', '.join([*given, *loss_arguments(node, scope)])})")


def _regression(called: str) -> Writer:
    def write(node: LocalNode, scope: Scope) -> Expression:
        scope.uses("F", "")
        given = [text(node.arguments[name], scope) for name in ("self", "target")]
        rest = further(node, scope, ("self", "target", "reduction"), by_position=0)
        return Expression(
            f'{called}({", ".join([*given, *rest])}, reduction="{REDUCTIONS[node.arguments.get("reduction", 1)]}")'
        )

    return write


def _elu(node: LocalNode, scope: Scope) -> Expression:
    if any(node.arguments.get(name, 1) != 1 for name in ("scale", "input_scale")):
        return fallback(node, scope)
    return function("F.elu")(node, scope)


def _to(node: LocalNode, scope: Scope) -> Expression:
    x, dtype = value(node.arguments["self"], scope), node.arguments.get("dtype")
    if dtype is None:
        return Expression(f"{x.within(ATOM)}.clone()")
    return Expression(f"{x.within(ATOM)}.to({dtype})")


def _copy(node: LocalNode, scope: Scope) -> Expression:
    """What a slice was assigned: the source in the slice's dtype and shape."""
    name, source = node.arguments["self"].name, node.arguments["src"].name
    text_ = scope.ref(source).within(ATOM)
    if scope.tensor(source).dtype != scope.tensor(name).dtype:
        text_ += f".to({scope.tensor(name).dtype})"
    if scope.tensor(source).dims != scope.tensor(name).dims:
        text_ += f".expand_as({scope.ref(name).text})"
    return Expression(text_) if text_ != scope.ref(source).within(ATOM) else Expression(f"{text_}.clone()")


def _cat(called: str) -> Writer:
    def write(node: LocalNode, scope: Scope) -> Expression:
        tensors = text(tuple(node.arguments["tensors"]), scope)
        dim = node.arguments.get("dim", 0)
        return Expression(f"{called}({tensors}{f', dim={dim}' if dim else ''})")

    return write


def _index(dim: int, inner: str) -> str:
    return ", ".join([":"] * dim + [inner])


def _dims(node: LocalNode, scope: Scope, name: str = "self") -> int:
    return len(scope.tensor(node.arguments[name].name).dims)


def _select(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["self"], scope).within(ATOM)
    dim = node.arguments["dim"] % _dims(node, scope)
    return Expression(f"{x}[{_index(dim, text(node.arguments['index'], scope))}]")


def _slice(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["self"], scope).within(ATOM)
    operand = scope.tensor(node.arguments["self"].name)
    dim = node.arguments.get("dim", 0) % len(operand.dims)
    start, end, step = (node.arguments.get(name) for name in ("start", "end", "step"))
    whole = operand.dims[dim]
    if (isinstance(end, int) and (end >= 2**62 or end == whole.size)) or (
        isinstance(end, Extent) and end.size == whole.size
    ):
        end = None
    cut = f"{text(start, scope) if start else ''}:{text(end, scope) if end is not None else ''}"
    if step not in (None, 1):
        cut += f":{step}"
    return Expression(f"{x}[{_index(dim, cut)}]")


def _narrow(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["self"], scope).within(ATOM)
    dim = node.arguments["dim"] % _dims(node, scope)
    length = scope.size(local_dims(node, scope)[dim]).text
    return Expression(f"{x}.narrow({dim}, {text(node.arguments['start'], scope)}, {length})")


def _advanced_index(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["self"], scope).within(ATOM)
    inner = [":" if item is None else text(item, scope) for item in node.arguments["indices"]]
    return Expression(f"{x}[{', '.join(inner)}]")


def _split(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["self"], scope).within(ATOM)
    size = node.arguments.get("split_size", node.arguments.get("split_sizes"))
    dim = node.arguments.get("dim", 0)
    operand = scope.tensor(node.arguments["self"].name)
    extent = operand.dims[dim % len(operand.dims)]
    if isinstance(size, int) and extent.axes:
        size = Extent(size, extent.axes)
    return Expression(f"{x}.split({text(size, scope)}{f', dim={dim}' if dim else ''})")


def _expand(node: LocalNode, scope: Scope) -> Expression:
    name = node.arguments["self"].name
    before, after = scope.tensor(name).dims, local_dims(node, scope)
    new = len(after) - len(before)
    sizes = []
    for number, extent in enumerate(after):
        if number >= new and before[number - new] == extent:
            sizes.append("-1")
        else:
            sizes.append(scope.size(extent).text)
    return Expression(f"{value(node.arguments['self'], scope).within(ATOM)}.expand({', '.join(sizes)})")


def _repeat(node: LocalNode, scope: Scope) -> Expression:
    before, after = scope.tensor(node.arguments["self"].name).dims, local_dims(node, scope)
    new, repeats = len(after) - len(before), []
    for number, times in enumerate(node.arguments["repeats"]):
        grown = number < new or before[number - new].size == 1
        repeats.append(scope.size(after[number]).text if grown else text(times, scope))
    return Expression(f"{value(node.arguments['self'], scope).within(ATOM)}.repeat({', '.join(repeats)})")


def _made(called: str) -> Writer:
    """torch.zeros(size, dtype=..., device=...)"""

    def write(node: LocalNode, scope: Scope) -> Expression:
        sizes = ", ".join(scope.size(extent).text for extent in local_dims(node, scope))
        given = [f"({sizes}{',' if len(local_dims(node, scope)) == 1 else ''})"]
        if "fill_value" in node.arguments:
            given.append(text(node.arguments["fill_value"], scope))
        return Expression(f"{called}({', '.join([*given, *_dtype(node, scope), f'device={scope.device()}'])})")

    return write


def _new(node: LocalNode, scope: Scope) -> Expression:
    x = value(node.arguments["self"], scope).within(ATOM)
    sizes = ", ".join(scope.size(extent).text for extent in local_dims(node, scope))
    given = [f"({sizes}{',' if len(local_dims(node, scope)) == 1 else ''})"]
    if "fill_value" in node.arguments:
        given.append(text(node.arguments["fill_value"], scope))
    dtype = _dtype(node, scope) if node.arguments.get("dtype") is not None else []
    return Expression(f"{x}.{node.target.split('.')[1]}({', '.join([*given, *dtype])})")


def _dtype(node: LocalNode, scope: Scope) -> list[str]:
    result = first_result(node, scope)
    default = torch.float32
    return [] if result.dtype == default and node.arguments.get("dtype") is None else [f"dtype={result.dtype}"]


def _arange(node: LocalNode, scope: Scope) -> Expression:
    given = [node.arguments[name] for name in ("start", "end", "step") if name in node.arguments]
    if node.target.endswith("start_step") and node.arguments.get("step", 1) == 1:
        given = given[:2]
    if len(given) == 2 and given[0] == 0:
        given = given[1:]
    result = first_result(node, scope)
    implied = torch.int64 if all(isinstance(item, (int, Extent)) for item in given) else torch.float32
    dtype = [] if result.dtype == implied else [f"dtype={result.dtype}"]
    return Expression(f"torch.arange({', '.join([listed(given, scope), *dtype, f'device={scope.device()}'])})")


def _counted(called: str) -> Writer:
    def write(node: LocalNode, scope: Scope) -> Expression:
        given = further(node, scope, ("dtype",))
        return Expression(f"{called}({', '.join([*given, *_dtype(node, scope), f'device={scope.device()}'])})")

    return write


def fallback(node: LocalNode, scope: Scope) -> Expression:
    """torch.ops.aten.name.overload(...)"""
    given = further(node, scope, (), dims_as_numbers=False)
    if not node.operands() and any(argument.name == "device" for argument in schema(node).arguments):
        given.append(f"device={scope.device()}")
    return Expression(f"torch.ops.{node.target}({', '.join(given)})")


_METHODS = (
    "transpose.int permute.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims sum.default "
    "sum.dim_IntList mean.default mean.dim cos.default sin.default exp.default log.default abs.default rsqrt.default "
    "sqrt.default tanh.default sigmoid.default cumsum.default masked_fill.Scalar masked_fill.Tensor gather.default "
    "amax.default amin.default argmax.default argmin.default clamp.default clamp_min.default clamp_max.default "
    "flip.default roll.default clone.default prod.default prod.dim_int all.default any.default any.dim all.dim "
    "isnan.default floor.default ceil.default round.default sign.default erf.default log1p.default expm1.default "
    "reciprocal.default square.default var.correction std.correction norm.ScalarOpt_dim cumprod.default "
    "index_select.default scatter.src scatter.value scatter_add.default tril.default triu.default detach.default "
    "t.default topk.default sort.default logsumexp.default outer.default diff.default repeat_interleave.self_int "
    "slice_scatter.default select_scatter.default type_as.default logical_not.default logical_and.default "
    "logical_or.default pow.Tensor_Tensor floor_divide.default frac.default trunc.default movedim.int"
)
_FUNCTIONS = (
    "min.other max.other minimum.default maximum.default where.self where.ScalarOther where.ScalarSelf where.Scalar "
    "addmm.default baddbmm.default zeros_like.default ones_like.default full_like.default einsum.default "
    "bucketize.Tensor searchsorted.Tensor logaddexp.default atan2.default div.Tensor_mode div.Scalar_mode lerp.Scalar "
    "lerp.Tensor addcmul.default cross.default"
)

WRITERS: Mapping[str, Writer] = MappingProxyType(
    {f"aten.{name}": method() for name in _METHODS.split()}
    | {f"aten.{name}": function(f"torch.{name.split('.')[0]}") for name in _FUNCTIONS.split()}
    | {
        f"aten.{name}.{overload}": binary(symbol, level)
        for name, symbol, level in (
            ("add", "+", SUM), ("sub", "-", SUM), ("mul", "*", PRODUCT), ("div", "/", PRODUCT),
            ("eq", "==", COMPARISON), ("ne", "!=", COMPARISON), ("lt", "<", COMPARISON), ("le", "<=", COMPARISON),
            ("gt", ">", COMPARISON), ("ge", ">=", COMPARISON), ("remainder", "%", PRODUCT),
            ("__and__", "&", BITS), ("__or__", "|", BITS), ("bitwise_and", "&", BITS), ("bitwise_or", "|", BITS),
            ("bitwise_xor", "^", BITS),
        )
        for overload in ("Tensor", "Scalar")
    }
    | {f"aten.{name}.default": binary("@", PRODUCT) for name in ("mm", "bmm", "matmul", "mv")}
    | {f"aten.pow.{overload}": _power for overload in ("Tensor_Scalar", "Scalar")}
    | {f"aten.rsub.{overload}": reversed_binary("-", SUM) for overload in ("Tensor", "Scalar")}
    | {"aten.neg.default": unary("-"), "aten.bitwise_not.default": unary("~")}
    | {
        f"aten.{name}": function(f"F.{called}")
        for name, called in (
            ("relu.default", "relu"), ("gelu.default", "gelu"), ("silu.default", "silu"),
            ("leaky_relu.default", "leaky_relu"), ("softplus.default", "softplus"), ("hardtanh.default", "hardtanh"),
            ("hardswish.default", "hardswish"), ("hardsigmoid.default", "hardsigmoid"), ("mish.default", "mish"),
            ("log_sigmoid.default", "logsigmoid"),
            ("max_pool2d.default", "max_pool2d"), ("avg_pool2d.default", "avg_pool2d"),
            ("adaptive_avg_pool2d.default", "adaptive_avg_pool2d"), ("max_pool1d.default", "max_pool1d"),
            ("avg_pool1d.default", "avg_pool1d"), ("adaptive_avg_pool1d.default", "adaptive_avg_pool1d"),
            ("pixel_shuffle.default", "pixel_shuffle"), ("glu.default", "glu"),
            ("scaled_dot_product_attention.default", "scaled_dot_product_attention"),
        )
    }
    | {f"aten.{name}.int": function(f"F.{name}", by_position=1) for name in ("softmax", "log_softmax")}
    | {"aten.elu.default": _elu}
    | {"aten.pad.default": function("F.pad"), "aten.one_hot.default": function("F.one_hot")}
    | {f"aten.conv{n}d.{kind}": _convolution(f"F.conv{n}d") for n in (1, 2, 3) for kind in ("default", "padding")}
    | {
        "aten.linear.default": _linear,
        "aten.layer_norm.default": _norm("F.layer_norm"),
        "aten.rms_norm.default": _norm("F.rms_norm"),
        "aten.group_norm.default": _group_norm,
        "aten.embedding.default": _embedding,
        "aten.cross_entropy_loss.default": _cross_entropy,
        "aten.nll_loss_nd.default": _nll,
        "aten.nll_loss.default": _nll,
        "aten.mse_loss.default": _regression("F.mse_loss"),
        "aten.l1_loss.default": _regression("F.l1_loss"),
        "aten.smooth_l1_loss.default": _regression("F.smooth_l1_loss"),
        "aten.huber_loss.default": _regression("F.huber_loss"),
        "aten.binary_cross_entropy_with_logits.default": _regression("F.binary_cross_entropy_with_logits"),
        "aten._to_copy.default": _to,
        "aten.to.dtype": _to,
        "aten.copy.default": _copy,
        "aten.cat.default": _cat("torch.cat"),
        "aten.stack.default": _cat("torch.stack"),
        "aten.select.int": _select,
        "aten.slice.Tensor": _slice,
        "aten.narrow.default": _narrow,
        "aten.index.Tensor": _advanced_index,
        "aten.split.Tensor": _split,
        "aten.split_with_sizes.default": _split,
        "aten.unbind.int": method(),
        "aten.chunk.default": method(),
        "aten.expand.default": _expand,
        "aten.broadcast_to.default": _expand,
        "aten.repeat.default": _repeat,
        "aten.full.default": _made("torch.full"),
        "aten.zeros.default": _made("torch.zeros"),
        "aten.ones.default": _made("torch.ones"),
        "aten.empty.memory_format": _made("torch.empty"),
        "aten.arange.default": _arange,
        "aten.arange.start": _arange,
        "aten.arange.start_step": _arange,
        "aten.linspace.default": _counted("torch.linspace"),
        "aten.eye.default": _counted("torch.eye"),
        "aten.eye.m": _counted("torch.eye"),
        "aten.scalar_tensor.default": _counted("torch.scalar_tensor"),
    }
    | {f"aten.{name}.default": _new for name in ("new_zeros", "new_ones", "new_full", "new_empty")}
)  # fmt: skip
