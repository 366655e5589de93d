"""Seconds of one operator on one device, forward and backward, as eager kernels run it.

    time = launches * launch overhead + max(arithmetic, traffic)

Matrix multiplications, convolutions and attention count their operations at the device's peak times its
`matmul_efficiency`, with losses for tiles that stick out, processors left idle in the last wave, and short inner dims.
Everything else is bound by the bytes it reads and writes. Views are free. Shapes are the ones the device sees.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autoshard.cluster import Device
from autoshard.program import Operand, Operator, TensorType

VIEWS = frozenset(
    (
        "alias", "as_strided", "broadcast_to", "chunk", "detach", "diagonal", "expand", "flatten", "lift_fresh",
        "movedim", "narrow", "permute", "ravel", "reshape", "select", "slice", "split", "split_with_sizes",
        "squeeze", "swapaxes", "swapdims", "t", "transpose", "unbind", "unflatten", "unfold", "unsafe_chunk",
        "unsafe_split", "unsafe_split_with_sizes", "unsqueeze", "view", "view_as", "_reshape_alias",
        "_unsafe_view",
    )
)  # fmt: skip
"""Free forward: strides change, bytes do not move (a copy that a reshape needs is not known from shapes)."""

_CUTTING_VIEWS = frozenset(
    (
        "chunk", "diagonal", "narrow", "select", "slice", "split", "split_with_sizes", "unbind", "unfold",
    )
)  # fmt: skip
_LINEAR = frozenset(
    (
        "add", "sub", "rsub", "neg", "sum", "mean", "cumsum", "cat", "stack", "to", "_to_copy", "clone",
        "contiguous", "roll", "flip", "repeat", "pad", "constant_pad_nd", "index_select", "index", "gather",
        "tril", "triu", "masked_fill", "avg_pool2d", "upsample_nearest2d", "scatter", "scatter_add",
    )
)  # fmt: skip
"""Backward reads nothing but the gradient (and masks or indices)."""

_GRADIENT_PASSES = frozenset(("add", "sub"))
"""An operand of the result's shape gets the result's gradient itself: no kernel, no bytes."""

_PASSES: Mapping[str, float] = {
    "batch_norm": 1.5, "native_batch_norm": 1.5, "_native_batch_norm_legit_functional": 1.5, "cross_entropy_loss": 2.0,
    "group_norm": 1.5, "native_group_norm": 1.5, "logsumexp": 2.0, "rms_norm": 1.5, "std": 1.5, "var": 1.5,
    "var_mean": 1.5, "sort": 4.0, "topk": 2.0, "repeat_interleave": 1.5,
}  # fmt: skip
"""Times an operator goes over its bytes beyond once."""

_TRANSCENDENTAL = frozenset(
    (
        "exp", "log", "log_softmax", "_log_softmax", "softmax", "_softmax", "gelu", "silu", "sigmoid", "tanh",
        "sin", "cos", "erf", "pow", "softplus", "mish", "cross_entropy_loss", "logsumexp", "elu", "selu",
    )
)  # fmt: skip
_TRANSCENDENTAL_FLOPS = 20.0

_TILES = ((128, 1.0), (64, 0.8), (32, 0.45))  # edge, share of the rate
_CPU_TILES = ((16, 1.0),)
_TILE_RAMP, _CPU_RAMP = 96, 16  # inner steps that filling and draining a tile cost
_SPLIT = 512  # an inner dim is split over idle processors down to this length
_ATTENTION_EFFICIENCY = 0.7  # of matmul_efficiency: softmax between two multiplications
_ATTENTION_BACKWARD = 2.5  # the forward scores again, then four products of the forward's two sizes


@dataclass(frozen=True)
class Product:
    """`batch` matrix multiplications m x k by k x n, and the operands that the two factors are."""

    batch: int
    m: int
    n: int
    k: int
    first: int
    second: int


def base_name(name: str) -> str:
    """ "linear" for "aten.linear.default"."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else name


def operator_seconds(op: Operator, device: Device) -> tuple[float, float]:
    """Forward and backward seconds of `op` (local shapes) on `device`; backward is 0 where no gradient is wanted."""
    name = base_name(op.name)
    if name in VIEWS:
        return 0.0, _view_backward(op, name, device)
    if name in _PRODUCTS:
        return _product_seconds(op, _PRODUCTS[name](op), device)
    if "scaled_dot_product" in name:
        return _attention_seconds(op, device)
    if name.startswith("embedding"):
        return _embedding_seconds(op, device)
    return _streaming_seconds(op, name, device)


def operator_flops(op: Operator) -> float:
    """Operations of the forward, multiply-adds counted as two; 0 for anything but products and attention."""
    name = base_name(op.name)
    if name in _PRODUCTS:
        product = _PRODUCTS[name](op)
        return 2.0 * product.batch * product.m * product.n * product.k
    return _attention_flops(op) if "scaled_dot_product" in name else 0.0


# --- products ------------------------------------------------------------------------------------------------------


def matmul_seconds(batch: int, m: int, n: int, k: int, dtype: str, itemsize: int, device: Device) -> float:
    """Seconds of `batch` multiplications m x k by k x n, without the launch. Grows with every size."""
    moved = batch * (m * k + k * n + m * n) * itemsize
    return max(_arithmetic_s(batch, m, n, k, dtype, device), _traffic_s(moved, device))


@lru_cache(maxsize=65536)
def _arithmetic_s(batch: int, m: int, n: int, k: int, dtype: str, device: Device) -> float:
    if not batch * m * n * k:
        return 0.0
    tiles, ramp = (_CPU_TILES, _CPU_RAMP) if device.backend == "gloo" else (_TILES, _TILE_RAMP)
    rate = device.flops(dtype) * device.matmul_efficiency / device.processors
    best = math.inf
    for edge, share in tiles:
        count = batch * math.ceil(m / edge) * math.ceil(n / edge)
        waves = math.ceil(count / device.processors)
        # Idle processors take a part of the inner dim.
        inner = k if count >= device.processors else max(min(k, _SPLIT), k * count / device.processors)
        best = min(best, waves * 2 * edge * edge * (inner + ramp) / (rate * share))
    return best


def _product_seconds(op: Operator, product: Product, device: Device) -> tuple[float, float]:
    dtype, size = _dtype(op.results[0]), op.results[0].dtype.itemsize
    batch, m, n, k = product.batch, product.m, product.n, product.k
    launch = device.launch_overhead_s
    forward = launch + matmul_seconds(batch, m, n, k, dtype, size, device)
    backward = 0.0
    if op.operands[product.first].needs_grad:
        backward += launch + matmul_seconds(batch, m, k, n, dtype, size, device)
    if op.operands[product.second].needs_grad:
        backward += launch + matmul_seconds(batch, k, n, m, dtype, size, device)
    for index, operand in enumerate(op.operands):
        if index not in (product.first, product.second) and operand.needs_grad:  # a bias: sums the gradient
            backward += launch + _traffic_s(op.results[0].nbytes, device)
    return forward, backward


def _linear(op: Operator) -> Product:
    x, weight = op.operands[0].shape, op.operands[1].shape
    n, k = (1, weight[0]) if len(weight) == 1 else weight
    return Product(1, math.prod(x[:-1]), n, k, 0, 1)


def _matmul(op: Operator, first: int = 0) -> Product:
    a, b = op.operands[first].shape, op.operands[first + 1].shape
    k = a[-1]
    n = b[-1] if len(b) > 1 else 1
    if len(b) <= 2:  # the leading dims of the first factor are rows
        return Product(1, math.prod(a[:-1]), n, k, first, first + 1)
    m = a[-2] if len(a) > 1 else 1
    return Product(op.results[0].numel // max(1, m * n), m, n, k, first, first + 1)


def _added(op: Operator) -> Product:
    return _matmul(op, 1)


def _outer(op: Operator) -> Product:
    return Product(1, op.operands[0].numel, op.operands[1].numel, 1, 0, 1)


def _convolution(op: Operator) -> Product:
    x, weight, out = op.operands[0], op.operands[1], op.results[0]
    groups = int(op.arguments.get("groups", 1) or 1)
    transposed = bool(op.arguments.get("transposed", "transpose" in op.name))
    wide, inner = (x, weight.shape[1]) if transposed else (out, weight.shape[1])
    kernel = math.prod(weight.shape[2:])
    places = wide.numel // max(1, wide.shape[-len(weight.shape) + 1])
    channels = weight.shape[0] // groups
    if transposed:  # every input element meets (out channels / groups) * kernel weights
        return Product(groups, places, inner * kernel, channels, 0, 1)
    return Product(groups, places, channels, inner * kernel, 0, 1)


_PRODUCTS: Mapping[str, Callable[[Operator], Product]] = {
    "linear": _linear, "mm": _matmul, "bmm": _matmul, "matmul": _matmul, "mv": _matmul, "dot": _matmul, "vdot": _matmul,
    "addmm": _added, "baddbmm": _added, "addmv": _added, "addbmm": _added, "outer": _outer, "ger": _outer,
    "convolution": _convolution, "conv1d": _convolution, "conv2d": _convolution, "conv3d": _convolution,
    "conv_transpose1d": _convolution, "conv_transpose2d": _convolution, "conv_transpose3d": _convolution,
}  # fmt: skip


# --- attention, embedding ------------------------------------------------------------------------------------------


def _attention_flops(op: Operator) -> float:
    query, key, value = (operand.shape for operand in op.operands[:3])
    rows, columns = query[-2], key[-2]
    pairs = float(rows * columns)
    if op.arguments.get("is_causal"):  # row i sees i + 1 columns
        seen = min(rows, columns)
        pairs = seen * (seen + 1) / 2 + (rows - seen) * columns
    return 2.0 * math.prod(query[:-2]) * pairs * (query[-1] + value[-1])


def _attention_seconds(op: Operator, device: Device) -> tuple[float, float]:
    rate = device.flops(_dtype(op.operands[0])) * device.matmul_efficiency * _ATTENTION_EFFICIENCY
    arithmetic = _attention_flops(op) / rate
    moved = _bytes(op.operands) + op.results[0].nbytes
    forward = device.launch_overhead_s + max(arithmetic, _traffic_s(moved, device))
    if not any(operand.needs_grad for operand in op.operands):
        return forward, 0.0
    backward = max(_ATTENTION_BACKWARD * arithmetic, _traffic_s(2 * moved + op.results[0].nbytes, device))
    return forward, 2 * device.launch_overhead_s + backward


def _embedding_seconds(op: Operator, device: Device) -> tuple[float, float]:
    weight, rows, out = op.operands[0], op.operands[1:], op.results[0]
    forward = device.launch_overhead_s + _traffic_s(_bytes(rows) + 2 * out.nbytes, device)
    if not weight.needs_grad:
        return forward, 0.0
    # A dense gradient: zeroed whole, then the rows are read, added and written.
    return forward, 2 * device.launch_overhead_s + _traffic_s(weight.nbytes + 3 * out.nbytes, device)


# --- everything bound by traffic -----------------------------------------------------------------------------------


def _streaming_seconds(op: Operator, name: str, device: Device) -> tuple[float, float]:
    passes = _PASSES.get(name, 1.0)
    read, written = _bytes(op.operands), _bytes(op.results)
    if name.startswith("index") or name == "gather":
        read = min(read, written + _bytes(op.operands[1:]))  # only the rows that are asked for
    elements = max((t.numel for t in (*op.operands, *op.results)), default=0)
    flops = elements * (_TRANSCENDENTAL_FLOPS if name in _TRANSCENDENTAL else 1.0)
    rate = device.flops("float32")
    forward = device.launch_overhead_s + max(flops / rate, _traffic_s(passes * (read + written), device))
    wanting = [operand for operand in op.operands if operand.needs_grad]
    if name in _GRADIENT_PASSES:
        wanting = [operand for operand in wanting if operand.shape != op.results[0].shape]
    if not wanting:
        return forward, 0.0
    moved = _bytes(tuple(result for result in op.results if result.dtype.is_floating_point)) + _bytes(tuple(wanting))
    if name not in _LINEAR and not _scaled(op, name):
        moved += read
    return forward, device.launch_overhead_s * len(wanting) + max(flops / rate, _traffic_s(passes * moved, device))


def _view_backward(op: Operator, name: str, device: Device) -> float:
    source = op.operands[0]
    if not source.needs_grad:
        return 0.0
    if name in ("expand", "broadcast_to") and source.numel != op.results[0].numel:  # sums what was repeated
        return device.launch_overhead_s + _traffic_s(op.results[0].nbytes + source.nbytes, device)
    if name in _CUTTING_VIEWS and sum(result.numel for result in op.results) <= source.numel:  # zeros, or joins
        whole = len(op.results) == 1 and op.results[0].numel == source.numel
        return 0.0 if whole else device.launch_overhead_s + _traffic_s(source.nbytes + _bytes(op.results), device)
    return 0.0


def _scaled(op: Operator, name: str) -> bool:
    """Whether the operator multiplies one tensor by a number."""
    return name in ("mul", "div") and not isinstance(op.arguments.get("other"), Operand)


def _traffic_s(moved_bytes: float, device: Device) -> float:
    return moved_bytes / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)


def _bytes(types: tuple[TensorType, ...]) -> int:
    return sum(type.nbytes for type in types)


def _dtype(type: TensorType) -> str:
    return str(type.dtype).removeprefix("torch.")
