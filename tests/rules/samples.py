"""Example arguments of every operator in the rule table, one line an operator.

`f(4, 6)` stands for a float64 tensor of that shape, `u` for one inside (0.1, 0.9), `i(9, 4)` for integers below 9,
`m` for booleans, `w` for distinct values. `n(name=...)` passes keyword-only arguments. Sizes mix even, uneven and empty
shards for 2, 3 and 4 ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Spec = Callable[[torch.Generator], Tensor]


def f(*shape: int) -> Spec:
    return lambda generator: torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def u(*shape: int) -> Spec:
    return lambda generator: (0.1 + 0.8 * torch.rand(shape, dtype=torch.float64, generator=generator)).requires_grad_()


def more_than_one(*shape: int) -> Spec:
    return lambda generator: (1.1 + torch.rand(shape, dtype=torch.float64, generator=generator)).requires_grad_()


def w(*shape: int) -> Spec:
    return lambda generator: (
        torch.randperm(torch.Size(shape).numel(), generator=generator)
        .reshape(shape)
        .double()
        .div(7)
        .sub(1)
        .requires_grad_()
    )


def i(high: int, *shape: int) -> Spec:
    return lambda generator: torch.randint(0, high, shape, generator=generator)


def m(*shape: int) -> Spec:
    return lambda generator: torch.rand(shape, generator=generator) > 0.4


def c(spec: Spec) -> Spec:
    """The same tensor without a gradient, for operands in which torch has none."""
    return lambda generator: spec(generator).detach()


class n(dict[str, Any]):
    """Keyword-only arguments."""


Line = tuple[Any, ...]
X, Y = f(4, 6), f(5, 4, 7)

_DOMAINS = {
    "acos": u,
    "asin": u,
    "atanh": u,
    "erfinv": u,
    "logit": u,
    "log": u,
    "log10": u,
    "log1p": u,
    "log2": u,
    "rsqrt": u,
    "sqrt": u,
    "lgamma": u,
    "digamma": u,
    "reciprocal": u,
    "acosh": more_than_one,
}
_ARGUMENTS: dict[str, Line] = {"threshold": (0.1, 0.5), "clamp": (-0.5, 0.5), "clamp_min": (0.0,), "clamp_max": (0.0,)}
_INTEGER = ("bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "__and__", "__or__", "__xor__")


def elementwise(name: str) -> list[Line] | None:
    """Arguments of the plain elementwise operators, by the operands that the schema names."""
    base, overload = name.split(".")[1:]
    target = getattr(getattr(torch.ops.aten, base), overload)
    arguments = [argument for argument in target._schema.arguments if not argument.has_default_value()]
    make = (lambda *shape: i(9, *shape)) if base in _INTEGER else _DOMAINS.get(base, f)
    kinds = [str(argument.type) for argument in arguments]
    if kinds == ["Tensor"] or (base in _ARGUMENTS and kinds[0] == "Tensor" and "Tensor" not in kinds[1:]):
        return [(make(5, 6), *_ARGUMENTS.get(base, ())), (make(4, 3, 2), *_ARGUMENTS.get(base, ()))]
    if kinds == ["Tensor", "Tensor"]:
        return [(make(4, 6), make(4, 6)), (make(5, 4, 7), make(4, 1)), (make(3), make(4, 3))]
    if kinds in (["Tensor", "number"], ["Tensor", "Scalar"]):
        return [(make(5, 6), 2)]
    return None


SAMPLES: dict[str, list[Line]] = {
    # elementwise, beyond those of `elementwise`
    "aten.add.Tensor": [(X, X), (Y, f(7)), (Y, f(4, 1)), (X, 1.5), (i(9, 4, 6), i(9, 6)), (f(), f())],
    "aten.sub.Tensor": [(X, X), (f(7), Y), (X, 1.5)],
    "aten.mul.Tensor": [(X, X), (Y, f(4, 1)), (X, 1.5), (X, m(4, 6)), (X, f())],
    "aten.div.Tensor": [(X, u(4, 6)), (Y, u(4, 1)), (X, 1.5)],
    "aten.div.Tensor_mode": [(i(9, 4, 6), 2, n(rounding_mode="floor")), (X, u(6), n(rounding_mode=None))],
    "aten.pow.Tensor_Scalar": [(X, 2), (X, 3)],
    "aten.pow.Tensor_Tensor": [(u(4, 6), X), (u(4, 6), f(6))],
    "aten.pow.Scalar": [(2.0, X)],
    "aten.remainder.Tensor": [(i(9, 4, 6), i(3, 1, 1)), (X, u(6))],
    "aten.floor_divide.default": [(i(9, 4, 6), 2), (c(w(4, 6)), c(u(6)))],
    "aten.floor_divide.Scalar": [(i(9, 4, 6), 2)],
    "aten.clamp.Tensor": [(Y, f(7), f(4, 1))],
    "aten.round.decimals": [(X, n(decimals=1))],
    "aten.prelu.default": [(Y, f(4)), (Y, f(1))],
    "aten.lerp.Scalar": [(X, X, 0.3)],
    "aten.lerp.Tensor": [(X, X, f(6)), (Y, f(7), Y)],
    "aten.addcmul.default": [(X, X, f(6)), (f(6), X, X, n(value=2.0))],
    "aten.addcdiv.default": [(X, X, u(6))],
    "aten.where.self": [(m(4, 6), X, X), (m(4, 1), Y, f(7)), (m(5, 1, 7), f(), Y)],
    "aten.where.ScalarOther": [(m(4, 6), X, 0.0), (m(6), X, 2.0)],
    "aten.where.ScalarSelf": [(m(4, 6), 0.0, X), (m(6), 2.0, X)],
    "aten.where.Scalar": [(m(4, 6), 1.0, 0.0)],
    "aten.masked_fill.Scalar": [(X, m(4, 6), 0), (Y, m(4, 1), -1.5)],
    "aten.masked_fill.Tensor": [(X, m(4, 6), f()), (Y, m(4, 1), f())],
    "aten.copy.default": [(c(X), c(X)), (c(Y), c(f(4, 1)))],
    "aten._to_copy.default": [
        (X, n(dtype=torch.float64)),
        (i(9, 4, 6), n(dtype=torch.float64)),
        (m(5, 6), n(dtype=torch.int64)),
        (X, n(dtype=torch.int64)),
        (i(3, 4), n(dtype=torch.bool)),
    ],
    "aten.to.dtype": [(X, torch.float64), (m(5, 6), torch.float64)],
    "aten.type_as.default": [(X, f(3)), (i(9, 4, 6), X), (X, i(9, 4, 6))],
    "aten.fill.Scalar": [(X, 2.0)],
    "aten.fill.Tensor": [(X, f())],
    "aten.rsub.Scalar": [(X, 2.0)],
    "aten.bitwise_left_shift.Tensor": [(i(9, 4, 6), i(3, 6))],
    "aten.bitwise_right_shift.Tensor": [(i(9, 4, 6), i(3, 6))],
    "aten.__lshift__.Tensor": [(i(9, 4, 6), i(3, 6))],
    "aten.__rshift__.Tensor": [(i(9, 4, 6), i(3, 6))],
    "aten.xlogy.Tensor": [(u(4, 6), u(6))],
    "aten.hypot.default": [(X, f(6))],
    # matrix products
    "aten.linear.default": [(f(4, 5, 8), f(12, 8), f(12)), (f(3, 7), f(6, 7)), (f(8), f(6, 8), f(6))],
    "aten.matmul.default": [
        (f(4), f(4)),
        (f(4, 6), f(6)),
        (f(6), f(5, 6, 4)),
        (f(4, 6), f(6, 5)),
        (f(3, 4, 6), f(6, 5)),
        (f(2, 4, 3, 6), f(4, 6, 5)),
        (f(4, 1, 3, 2), f(5, 2, 4)),
    ],
    "aten.mm.default": [(f(4, 6), f(6, 5))],
    "aten.bmm.default": [(f(4, 5, 6), f(4, 6, 3))],
    "aten.mv.default": [(f(4, 6), f(6))],
    "aten.dot.default": [(f(6), f(6))],
    "aten.outer.default": [(f(4), f(6))],
    "aten.addmm.default": [
        (f(5), f(4, 6), f(6, 5)),
        (f(4, 5), f(4, 6), f(6, 5)),
        (f(4, 1), f(4, 6), f(6, 5), n(beta=2.0, alpha=0.5)),
    ],
    "aten.baddbmm.default": [(f(4, 5, 3), f(4, 5, 6), f(4, 6, 3)), (f(5, 1), f(4, 5, 6), f(4, 6, 3))],
    "aten.einsum.default": [
        ("bij,bjk->bik", [f(4, 5, 6), f(4, 6, 3)]),
        ("...d,hd->...h", [f(2, 4, 6), f(5, 6)]),
        ("bhq,bkh,bqk->b", [f(3, 4, 5), f(3, 2, 4), f(3, 5, 2)]),
        ("ij->ji", [X]),
    ],
    "aten.bilinear.default": [(f(3, 4), f(3, 5), f(6, 4, 5), f(6))],
    # views
    "aten.reshape.default": [
        (f(4, 6, 8), [4, 6, 2, 4]),
        (f(4, 6, 8), [24, 8]),
        (f(12, 8), [3, 4, 8]),
        (f(4, 6), [6, 4]),
        (f(4, 5, 6), [4, -1]),
        (f(1, 4, 6), [4, 1, 2, 3]),
        (f(2, 3, 4), [3, 8]),
        (m(4, 6), [24]),
        (f(4, 3, 5), [-1, 3, 5]),
        (f(6), [1, 6, 1]),
        (f(), [1]),
    ],
    "aten.view.default": [(f(4, 6, 8), [4, 6, 2, 4]), (f(4, 6, 8), [24, 8])],
    "aten._unsafe_view.default": [(f(4, 6, 8), [4, 6, 2, 4])],
    "aten.view_copy.default": [(f(4, 6, 8), [4, 6, 2, 4])],
    "aten.flatten.using_ints": [(f(4, 3, 4, 2), 1, 2), (f(4, 3, 4, 2), 0, -1)],
    "aten.unflatten.int": [(f(4, 12, 2), 1, [4, 3]), (f(4, 12), -1, [4, -1])],
    "aten.unsqueeze.default": [(Y, 1), (Y, -1), (m(4), 0)],
    "aten.ravel.default": [(f(4, 6),)],
    "aten.squeeze.default": [(f(4, 1, 6),)],
    "aten.squeeze.dim": [(f(4, 1, 6), 1), (f(4, 2, 6), 1)],
    "aten.squeeze.dims": [(f(4, 1, 6, 1), [1, 3])],
    "aten.expand.default": [(f(4, 1, 6), [4, 5, 6]), (f(6), [4, -1]), (f(3, 1), [2, -1, 4]), (m(1, 4), [4, 4])],
    "aten.expand_as.default": [(f(4, 1), X)],
    "aten.broadcast_to.default": [(f(4, 1, 6), [4, 5, 6])],
    "aten.permute.default": [(Y, [2, 0, 1]), (Y, [0, -1, 1])],
    "aten.transpose.int": [(Y, 1, 2), (Y, 0, -1), (i(9, 4, 6), 0, 1)],
    "aten.swapaxes.default": [(Y, 1, 2)],
    "aten.t.default": [(X,), (f(4),)],
    "aten.numpy_T.default": [(X,)],
    "aten.mT.default": [(Y,)],
    "aten.movedim.int": [(Y, 0, 2), (Y, -1, 0)],
    "aten.movedim.intlist": [(f(4, 3, 5, 6), [0, 1], [2, 0])],
    "aten.select.int": [(Y, 1, 2), (Y, -1, 0)],
    "aten.slice.Tensor": [(Y, 2, 1, 5), (Y, 0, 0, 9223372036854775807), (Y, 1, 0, 4), (Y, 2, 0, 7, 2), (Y, 1, -2)],
    "aten.narrow.default": [(Y, 2, 1, 3), (Y, 2, 0, 7)],
    "aten.pad.default": [
        (Y, [1, 2]),
        (Y, [0, 0, 1, -1], "constant", 3.0),
        (Y, [1, 1], "reflect"),
        (Y, [0, 1], "replicate"),
    ],
    "aten.constant_pad_nd.default": [(Y, [1, 2]), (Y, [0, 1], 2.0)],
    "aten.roll.default": [(Y, [1, 2], [1, 2]), (Y, [3])],
    "aten.flip.default": [(Y, [1]), (Y, [0, 2])],
    "aten.tril.default": [(Y,), (f(4, 4), 1)],
    "aten.triu.default": [(Y, 1)],
    "aten.diagonal.default": [(Y,), (Y, 1, -1, -2)],
    "aten.unfold.default": [(Y, 2, 3, 2)],
    "aten.repeat.default": [(f(4, 1, 6), [1, 3, 1]), (X, [4, 2, 1]), (f(4), [3, 1]), (f(1, 6), [4, 1])],
    "aten.repeat_interleave.self_int": [(Y, 2, 1), (Y, 3, 0), (X, 2)],
    "aten.cat.default": [([X, X], 0), ([f(4, 3), f(4, 5), f(4, 1)], -1), ([i(9, 4, 2), i(9, 4, 2)], 1)],
    "aten.concat.default": [([X, X], 0)],
    "aten.stack.default": [([X, X], 0), ([X, X, X], -1)],
    "aten.split.Tensor": [(f(4, 6), 2, 1), (f(4, 7), 4, -1)],
    "aten.split_with_sizes.default": [(f(4, 6), [1, 5], 1)],
    "aten.chunk.default": [(f(4, 6), 3, -1)],
    "aten.unbind.int": [(f(3, 4, 5),), (f(4, 3), 1)],
    "aten.select_scatter.default": [(Y, f(5, 7), 1, 2)],
    "aten.slice_scatter.default": [(Y, f(5, 4, 3), 2, 1, 4)],
    "aten.diff.default": [(f(4, 6),), (f(4, 6), 1, 0), (f(4, 6), 1, -1, f(4, 1), f(4, 2))],
    "aten.broadcast_tensors.default": [([f(4, 1), f(6)],), ([X, X],)],
    "aten.pixel_shuffle.default": [(f(2, 16, 3, 2), 2)],
    "aten.pixel_unshuffle.default": [(f(2, 4, 4, 6), 2)],
    # reductions
    "aten.sum.default": [(Y,), (i(9, 4, 6),), (m(4, 6),)],
    "aten.sum.dim_IntList": [(Y, [1]), (Y, [-1], True), (Y, [0, 2]), (Y, None), (i(9, 4, 6), [1]), (m(4, 6), [0])],
    "aten.count_nonzero.dim_IntList": [(m(4, 6), [1])],
    "aten.count_nonzero.default": [(m(4, 6),)],
    "aten.mean.default": [(Y,), (X,)],
    "aten.mean.dim": [(f(4, 6, 5), [1]), (f(4, 6, 5), [-1], True), (f(4, 6, 2), [0, 1]), (X, None)],
    "aten.cumsum.default": [(X, 1), (Y, 0), (i(9, 4, 6), -1)],
    "aten.cumprod.default": [(X, 1)],
    "aten.logcumsumexp.default": [(X, 1)],
    "aten.cummax.default": [(w(4, 6), 1)],
    "aten.cummin.default": [(w(4, 6), 1)],
    "aten.amax.default": [(w(4, 6), [1]), (w(4, 6), [0], True), (w(4, 6),)],
    "aten.amin.default": [(w(4, 6), [1])],
    "aten.max.default": [(w(4, 6),)],
    "aten.min.default": [(w(4, 6),)],
    "aten.max.dim": [(w(4, 6), 1), (w(4, 6), 0, True)],
    "aten.min.dim": [(w(4, 6), 1)],
    "aten.median.dim": [(w(4, 6), 1)],
    "aten.argmax.default": [(w(4, 6), -1), (w(4, 6), 0, True), (w(4, 6),)],
    "aten.argmin.default": [(w(4, 6), 1)],
    "aten.any.default": [(m(4, 6),)],
    "aten.any.dim": [(m(4, 6), 1)],
    "aten.any.dims": [(m(4, 6), [1])],
    "aten.all.default": [(m(4, 6),)],
    "aten.all.dim": [(m(4, 6), 1, True)],
    "aten.all.dims": [(m(4, 6), [0])],
    "aten.prod.default": [(X,)],
    "aten.prod.dim_int": [(X, 1)],
    "aten.var.default": [(X,)],
    "aten.var.dim": [(X, [1])],
    "aten.var.correction": [(X, [1], n(correction=0)), (X, [1], n(keepdim=True))],
    "aten.std.default": [(X,)],
    "aten.std.dim": [(X, [1])],
    "aten.std.correction": [(X, [1], n(correction=0))],
    "aten.var_mean.dim": [(X, [1])],
    "aten.var_mean.correction": [(X, [1], n(correction=0, keepdim=True))],
    "aten.std_mean.correction": [(X, [1], n(correction=0))],
    "aten.logsumexp.default": [(X, [1]), (X, [0], True)],
    "aten.linalg_vector_norm.default": [(X, 2, [1]), (X,), (X, 2, [-1], True)],
    "aten.norm.Scalar": [(X,)],
    "aten.norm.ScalarOpt_dim": [(X, 2, [1])],
    "aten.nansum.default": [(X,)],
    "aten.softmax.int": [(Y, -1), (Y, 0)],
    "aten._softmax.default": [(Y, 1, False)],
    "aten.log_softmax.int": [(Y, -1)],
    "aten._log_softmax.default": [(Y, 1, False)],
    "aten.sort.default": [(w(4, 6),), (w(4, 6), 0, True)],
    "aten.sort.stable": [(w(4, 6), n(stable=True, dim=0))],
    "aten.argsort.default": [(w(4, 6), 1)],
    "aten.topk.default": [(w(4, 6), 2), (w(4, 6), 2, 0)],
    "aten.glu.default": [(f(4, 6), -1), (f(4, 6), 0)],
    "aten.kthvalue.default": [(w(4, 6), 2, 1)],
    # norms
    "aten.layer_norm.default": [(Y, [7], f(7), f(7)), (Y, [4, 7], f(4, 7), f(4, 7)), (Y, [7]), (Y, [7], None, f(7))],
    "aten.native_layer_norm.default": [(Y, [7], f(7), f(7), 1e-5)],
    "aten.rms_norm.default": [(Y, [7], f(7), 1e-5), (Y, [7])],
    "aten._fused_rms_norm.default": [(Y, [7], f(7), 1e-5)],
    "aten.group_norm.default": [(f(4, 12, 3), 4, f(12), f(12)), (f(4, 12, 3), 6), (f(3, 8, 2, 2), 2, f(8), f(8))],
    "aten._native_batch_norm_legit_functional.default": [
        (f(4, 6, 3, 2), f(6), f(6), c(f(6)), c(u(6)), True, 0.1, 1e-5),
        (f(4, 6), None, None, c(f(6)), c(u(6)), True, 0.1, 1e-5),
    ],
    "aten._native_batch_norm_legit_no_training.default": [(f(4, 6, 3, 2), f(6), f(6), c(f(6)), c(u(6)), 0.1, 1e-5)],
    "aten.instance_norm.default": [(f(4, 6, 5), f(6), f(6), None, None, True, 0.1, 1e-5, False)],
    # losses
    "aten.cross_entropy_loss.default": [
        (f(8, 6), i(6, 8), None, 2),
        (f(8, 6), i(6, 8), None, 0, 2, 0.1),
        (f(8, 6), i(6, 8), c(u(6)), 2),
        (f(4, 6, 5), i(6, 4, 5), None, 2),
        (f(4, 6), u(4, 6), None, 2),
        (f(8, 6), i(6, 8)),
        (f(6), i(6), None, 2),
    ],
    "aten.nll_loss.default": [(f(8, 6), i(6, 8), None, 2, 1)],
    "aten.nll_loss_nd.default": [(f(8, 6), i(6, 8), c(u(6)), 2), (f(4, 6, 5), i(6, 4, 5), None, 0)],
    "aten.nll_loss2d.default": [(f(4, 6, 3, 2), i(6, 4, 3, 2), None, 2)],
    "aten.mse_loss.default": [(Y, Y), (X, X, 2), (X, X, 0), (f(4, 6, 8), f(4, 6, 8))],
    "aten.l1_loss.default": [(X, X), (X, X, 2)],
    "aten.smooth_l1_loss.default": [(X, X), (X, X, 0)],
    "aten.huber_loss.default": [(X, X), (X, X, 2)],
    "aten.binary_cross_entropy.default": [
        (u(4, 6), u(4, 6)),
        (u(4, 6), u(4, 6), c(u(6)), 2),
        (u(4, 6), u(4, 6), c(u(6))),
    ],
    "aten.binary_cross_entropy_with_logits.default": [
        (X, u(4, 6)),
        (X, u(4, 6), c(u(6)), c(u(6)), 2),
        (X, u(4, 6), None, c(u(6))),
    ],
    "aten.soft_margin_loss.default": [(X, c(X))],
    "aten.kl_div.default": [(X, u(4, 6)), (X, u(4, 6), 2)],
    # attention
    "aten.scaled_dot_product_attention.default": [
        (f(3, 4, 5, 6), f(3, 4, 7, 6), f(3, 4, 7, 2)),
        (f(3, 4, 5, 6), f(3, 4, 5, 6), f(3, 4, 5, 6), None, 0.0, True),
        (f(3, 4, 5, 6), f(3, 4, 7, 6), f(3, 4, 7, 6), f(3, 1, 5, 7)),
        (f(3, 4, 5, 6), f(3, 4, 7, 6), f(3, 4, 7, 6), f(4, 5, 7)),
        (f(3, 4, 5, 6), f(3, 4, 7, 6), f(3, 4, 7, 6), m(5, 7)),
        (f(2, 8, 5, 6), f(2, 4, 5, 6), f(2, 4, 5, 6), None, 0.0, True, n(enable_gqa=True)),
        (f(2, 6, 5, 4), f(2, 1, 5, 4), f(2, 1, 5, 4), f(2, 1, 5, 5), n(enable_gqa=True)),
        (f(4, 5, 6), f(4, 7, 6), f(4, 7, 6)),
        (f(2, 3, 4, 5, 6), f(2, 3, 4, 7, 6), f(2, 3, 4, 7, 6)),
    ],
    # convolutions and pooling
    "aten.convolution.default": [
        (f(3, 4, 5, 5), f(6, 4, 3, 3), f(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        (f(3, 4, 5), f(4, 6, 3), f(6), [2], [1], [1], True, [0], 1),
    ],
    "aten.conv1d.default": [
        (f(3, 4, 9), f(6, 4, 3), f(6), [2], [1]),
        (f(4, 9), f(6, 4, 3), f(6)),
        (f(3, 4, 9), f(4, 1, 3), f(4), [1], [0], [1], 4),
    ],
    "aten.conv2d.default": [
        (f(4, 4, 5, 5), f(6, 4, 3, 3), f(6)),
        (f(3, 8, 5, 5), f(8, 2, 3, 3), f(8), [1, 1], [1, 1], [1, 1], 4),
        (f(3, 4, 4, 4), f(8, 4, 2, 2), None, [2, 2]),
    ],
    "aten.conv3d.default": [(f(2, 4, 3, 3, 3), f(4, 4, 2, 2, 2), f(4))],
    "aten.conv1d.padding": [(f(3, 4, 9), f(6, 4, 3), f(6), [1], "same")],
    "aten.conv2d.padding": [(f(3, 4, 5, 5), f(6, 4, 3, 3), f(6), [1, 1], "same")],
    "aten.conv3d.padding": [(f(2, 4, 3, 3, 3), f(4, 4, 2, 2, 2), f(4), [1, 1, 1], "valid")],
    "aten.conv_transpose1d.default": [(f(3, 4, 5), f(4, 6, 3), f(6), [2])],
    "aten.conv_transpose2d.input": [
        (f(3, 4, 3, 3), f(4, 6, 2, 2), f(6), [2, 2]),
        (f(3, 4, 3, 3), f(4, 2, 2, 2), f(8), [2, 2], [0, 0], [0, 0], 4),
    ],
    "aten.conv_transpose3d.input": [(f(2, 4, 2, 2, 2), f(4, 4, 2, 2, 2), f(4))],
    "aten.max_pool1d.default": [(f(3, 4, 9), [3], [2])],
    "aten.max_pool2d.default": [(f(3, 4, 6, 6), [3, 3], [2, 2], [1, 1])],
    "aten.max_pool3d.default": [(f(2, 4, 4, 4, 4), [2, 2, 2])],
    "aten.max_pool2d_with_indices.default": [(f(3, 4, 6, 6), [3, 3], [2, 2], [1, 1])],
    "aten.max_pool3d_with_indices.default": [(f(2, 4, 4, 4, 4), [2, 2, 2])],
    "aten.avg_pool1d.default": [(f(3, 4, 9), [3], [2])],
    "aten.avg_pool2d.default": [(f(3, 4, 6, 6), [3, 3], [2, 2], [1, 1])],
    "aten.avg_pool3d.default": [(f(2, 4, 4, 4, 4), [2, 2, 2])],
    "aten.adaptive_avg_pool1d.default": [(f(3, 4, 6), [1]), (f(3, 4, 6), [2])],
    "aten.adaptive_avg_pool2d.default": [(f(3, 4, 6, 6), [1, 1]), (f(3, 4, 6, 6), [2, 3])],
    "aten.adaptive_avg_pool3d.default": [(f(2, 4, 4, 4, 4), [1, 1, 1])],
    "aten._adaptive_avg_pool2d.default": [(f(3, 4, 6, 6), [2, 2])],
    "aten._adaptive_avg_pool3d.default": [(f(2, 4, 4, 4, 4), [2, 2, 2])],
    "aten.adaptive_max_pool1d.default": [(f(3, 4, 6), [2])],
    "aten.adaptive_max_pool2d.default": [(f(3, 4, 6, 6), [2, 2])],
    "aten.adaptive_max_pool3d.default": [(f(2, 4, 4, 4, 4), [2, 2, 2])],
    "aten.upsample_nearest1d.vec": [(f(3, 4, 5), None, [2.0])],
    "aten.upsample_nearest2d.vec": [(f(3, 4, 3, 3), [6, 6], None)],
    "aten.upsample_nearest3d.vec": [(f(2, 4, 2, 2, 2), None, [2.0, 2.0, 2.0])],
    "aten.upsample_nearest1d.default": [(f(3, 4, 5), [10])],
    "aten.upsample_nearest2d.default": [(f(3, 4, 3, 3), [6, 6])],
    "aten.upsample_nearest3d.default": [(f(2, 4, 2, 2, 2), [4, 4, 4])],
    "aten.upsample_linear1d.vec": [(f(3, 4, 5), [10], False, None)],
    "aten.upsample_linear1d.default": [(f(3, 4, 5), [10], True)],
    "aten.upsample_bilinear2d.vec": [(f(3, 4, 3, 3), [6, 6], False, None)],
    "aten.upsample_bilinear2d.default": [(f(3, 4, 3, 3), [6, 6], False)],
    "aten.upsample_bicubic2d.vec": [(f(3, 4, 3, 3), [6, 6], False, None)],
    "aten.upsample_bicubic2d.default": [(f(3, 4, 3, 3), [6, 6], False)],
    "aten.upsample_trilinear3d.vec": [(f(2, 4, 2, 2, 2), [4, 4, 4], False, None)],
    "aten.upsample_trilinear3d.default": [(f(2, 4, 2, 2, 2), [4, 4, 4], False)],
    # lookups
    "aten.embedding.default": [(f(9, 6), i(9, 4, 5)), (f(9, 4), i(9, 5), 3), (f(5, 4), i(5, 4, 3), -1, True)],
    "aten.index.Tensor": [
        (Y, [i(5, 4)]),
        (Y, [None, i(4, 3, 2)]),
        (Y, [i(5, 3, 1), None, i(7, 4)]),
        (f(4, 6), [i(4, 3, 1), i(6, 5)]),
        (f(4, 6), [m(4)]),
    ],
    "aten.index_put.default": [(Y, [i(5, 3)], f(3, 4, 7)), (Y, [None, i(4, 3)], f(1), True)],
    "aten.index_select.default": [(Y, 1, i(4, 6))],
    "aten.gather.default": [(f(4, 6), 1, i(6, 4, 3)), (f(4, 6), 1, i(6, 2, 4)), (Y, 0, i(5, 3, 4, 7))],
    "aten.take_along_dim.default": [(f(4, 6), i(6, 4, 3), 1)],
    "aten.scatter.src": [(f(4, 6), 1, i(6, 4, 1), f(4, 1))],
    "aten.scatter.value": [(f(4, 6), 1, i(6, 4, 2), 2.0)],
    "aten.scatter_add.default": [(f(4, 6), 1, i(6, 4, 5), f(4, 5)), (f(4, 6), 0, i(4, 3, 6), f(3, 6))],
    "aten.index_add.default": [(f(4, 6), 1, i(6, 5), f(4, 5))],
    "aten.one_hot.default": [(i(5, 4, 3), 5)],
    # constructors
    "aten.full.default": [([4, 6], 2.0), ([], 1.0)],
    "aten.zeros.default": [([4, 5],)],
    "aten.ones.default": [([4, 5],)],
    "aten.empty.memory_format": [([4, 5],)],
    "aten.arange.default": [(6,)],
    "aten.arange.start": [(1, 6)],
    "aten.arange.start_step": [(1, 9, 2)],
    "aten.linspace.default": [(0.0, 1.0, 6)],
    "aten.scalar_tensor.default": [(2.0,)],
    "aten.eye.default": [(4,)],
    "aten.eye.m": [(4, 5)],
    "aten.tril_indices.default": [(4, 4)],
    "aten.triu_indices.default": [(4, 4)],
    "aten.new_zeros.default": [(X, [4, 5]), (i(9, 3), [])],
    "aten.new_ones.default": [(X, [4, 5])],
    "aten.new_full.default": [(X, [4, 5], 2.0)],
    "aten.new_empty.default": [(X, [4, 5])],
    "aten.zeros_like.default": [(Y,)],
    "aten.ones_like.default": [(Y,)],
    "aten.full_like.default": [(Y, 2.0)],
    "aten.empty_like.default": [(Y,)],
    # random numbers: rates at which nothing is left to chance
    "aten.native_dropout.default": [(Y, 0.0, True)],
    "aten.dropout.default": [(Y, 0.0, True)],
    "aten.bernoulli.default": [(lambda generator: torch.randint(0, 2, (4, 6), generator=generator).double(),)],
    "aten.bernoulli.p": [(c(X), 1.0)],
    "aten.rand_like.default": [(Y,)],
    "aten.randn_like.default": [(Y,)],
}


def samples(name: str) -> list[Line]:
    """The sample lines of an operator; none for one without."""
    return SAMPLES.get(name) or elementwise(name) or []


def make(line: Line, seed: int = 0) -> tuple[list[Any], dict[str, Any]]:
    """(args, kwargs) of a sample line."""
    generator = torch.Generator().manual_seed(seed)

    def real(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [real(item) for item in value]
        return value(generator) if callable(value) else value

    keywords = line[-1] if line and isinstance(line[-1], n) else {}
    return [real(value) for value in line if not isinstance(value, n)], {
        key: real(value) for key, value in keywords.items()
    }
