import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Device, device_types, parse_cluster
from autoshard.cost.collectives import all_reduce, group_shapes
from autoshard.cost.compute import matmul_seconds, operator_flops, operator_seconds
from autoshard.program import Operand, Operator, TensorType


def device(type: str) -> Device:
    return parse_cluster(f"1x1@{type}").devices[0]


A100, CPU = device("A100-80GB"), device("cpu")


def tensor(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float16) -> TensorType:
    return TensorType(shape, dtype, grad)


def operator(name: str, *operands: TensorType, results: tuple[TensorType, ...] = (), **arguments: object) -> Operator:
    return Operator(f"aten.{name}.default", operands, results or operands[:1], arguments)


def linear(m: int, k: int, n: int, grads: tuple[bool, bool] = (True, True)) -> Operator:
    x, weight = tensor(m, k, grad=grads[0]), tensor(n, k, grad=grads[1])
    return operator("linear", x, weight, results=(tensor(m, n),))


@pytest.mark.parametrize(
    ("op", "flops"),
    [
        (linear(64, 32, 16), 2 * 64 * 32 * 16),
        (operator("linear", tensor(2, 4, 8), tensor(3, 8), results=(tensor(2, 4, 3),)), 2 * 8 * 8 * 3),
        (operator("mm", tensor(4, 5), tensor(5, 6), results=(tensor(4, 6),)), 2 * 4 * 5 * 6),
        (operator("addmm", tensor(6), tensor(4, 5), tensor(5, 6), results=(tensor(4, 6),)), 2 * 4 * 5 * 6),
        (operator("bmm", tensor(3, 4, 5), tensor(3, 5, 6), results=(tensor(3, 4, 6),)), 2 * 3 * 4 * 5 * 6),
        (operator("matmul", tensor(2, 3, 4, 5), tensor(3, 5, 6), results=(tensor(2, 3, 4, 6),)), 2 * 6 * 4 * 5 * 6),
        (operator("matmul", tensor(5), tensor(5), results=(tensor(),)), 2 * 5),
        (
            operator("convolution", tensor(2, 8, 9, 9), tensor(6, 4, 3, 3), results=(tensor(2, 6, 7, 7),), groups=2),
            2 * (2 * 6 * 7 * 7) * 4 * 9,
        ),
        (
            operator(
                "convolution", tensor(2, 8, 7, 7), tensor(8, 6, 3, 3), results=(tensor(2, 6, 9, 9),), transposed=True
            ),
            2 * (2 * 8 * 7 * 7) * 6 * 9,
        ),
        (operator("gelu", tensor(64)), 0),
    ],
)
def test_operations(op: Operator, flops: float) -> None:
    assert operator_flops(op) == flops


def attention(causal: bool, s: int = 64) -> Operator:
    qkv = tensor(2, 4, s, 16)
    return operator("scaled_dot_product_attention", qkv, qkv, qkv, results=(qkv,), is_causal=causal)


def test_a_causal_mask_halves_attention() -> None:
    assert operator_flops(attention(False)) == 2 * 2 * (2 * 4 * 64 * 64 * 16)
    assert operator_flops(attention(True)) / operator_flops(attention(False)) == pytest.approx(65 / 128)
    whole, causal = (operator_seconds(attention(c, 8192), A100) for c in (False, True))
    assert whole[0] / causal[0] == pytest.approx(2, rel=0.05)
    assert whole[1] / whole[0] == pytest.approx(2.5, rel=0.05)


def test_a_large_multiplication_reaches_the_device_s_efficiency() -> None:
    for name in ("A100-80GB", "H100-80GB", "cpu"):
        on = device(name)
        seconds = matmul_seconds(1, 8192, 8192, 8192, "float32", 4, on)
        assert 0.9 < 2 * 8192**3 / seconds / on.flops("float32") / on.matmul_efficiency <= 1


def test_small_and_thin_multiplications_waste_the_device() -> None:
    def rate(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / matmul_seconds(1, m, n, k, "float16", 2, A100)

    assert rate(64, 64, 64) < 0.05 * rate(8192, 8192, 8192)
    assert rate(8, 8192, 8192) < 0.2 * rate(8192, 8192, 8192)
    # One tile beyond a full wave of 108 tiles takes a wave more, or smaller tiles.
    assert rate(128 * 109, 128, 4096) < 0.85 * rate(128 * 108, 128, 4096)


edges = st.integers(1, 3000)


@given(edges, edges, edges, st.integers(1, 4), st.sampled_from(["A100-80GB", "cpu", "L4"]), st.integers(0, 3))
def test_a_larger_multiplication_never_takes_less(m: int, n: int, k: int, batch: int, name: str, which: int) -> None:
    sizes = [batch, m, n, k]
    before = matmul_seconds(*sizes, "float32", 4, device(name))
    sizes[which] += 7
    assert matmul_seconds(*sizes, "float32", 4, device(name)) >= before * (1 - 1e-12)


def test_the_backward_of_a_multiplication_is_one_a_wanted_gradient() -> None:
    launch = A100.launch_overhead_s
    forward, both = operator_seconds(linear(4096, 4096, 4096), A100)
    one = operator_seconds(linear(4096, 4096, 4096, (False, True)), A100)[1]
    assert both == pytest.approx(2 * forward, rel=1e-6) and one == pytest.approx(forward, rel=1e-6)
    assert operator_seconds(linear(4096, 4096, 4096, (False, False)), A100)[1] == 0.0
    assert forward > launch


def test_dtype_decides_the_rate() -> None:
    sizes = (1, 4096, 4096, 4096)
    half, single = (matmul_seconds(*sizes, dtype, 2, A100) for dtype in ("bfloat16", "float32"))
    assert single / half == pytest.approx(16)
    assert matmul_seconds(*sizes, "float64", 8, CPU) == pytest.approx(2 * matmul_seconds(*sizes, "float32", 4, CPU))


def test_views_are_free_and_copies_are_not() -> None:
    x = tensor(1024, 1024)
    for name in ("reshape", "transpose", "permute", "unsqueeze", "view"):
        assert operator_seconds(operator(name, x), A100) == (0.0, 0.0)
    assert operator_seconds(operator("contiguous", x), A100)[0] > 0
    assert operator_seconds(operator("clone", x), A100)[0] > 0
    expanded = operator("expand", tensor(1, 1024), results=(x,))
    forward, backward = operator_seconds(expanded, A100)
    assert forward == 0.0 and backward > 0.0


def test_elementwise_operators_cost_their_bytes() -> None:
    x = tensor(4096, 4096)
    bandwidth = A100.memory_bandwidth_bytes_per_s * A100.memory_efficiency
    forward, backward = operator_seconds(operator("mul", x, x, self=Operand(0), other=Operand(1)), A100)
    assert forward == pytest.approx(A100.launch_overhead_s + 3 * x.nbytes / bandwidth)
    assert backward > forward
    assert operator_seconds(operator("add", x, x), A100)[1] == 0.0
    assert operator_seconds(operator("add", x, tensor(4096)), A100)[1] > 0.0


def test_an_embedding_reads_rows_and_its_gradient_the_table() -> None:
    weight, ids = tensor(50000, 1024), TensorType((8,), torch.int64)
    forward, backward = operator_seconds(operator("embedding", weight, ids, results=(tensor(8, 1024),)), A100)
    bandwidth = A100.memory_bandwidth_bytes_per_s * A100.memory_efficiency
    assert forward < 2 * A100.launch_overhead_s
    assert backward > weight.nbytes / bandwidth


@pytest.mark.parametrize("type", device_types())
def test_every_device_prices_every_kind_of_operator(type: str) -> None:
    ops = [
        linear(0, 16, 16),
        linear(16, 16, 16),
        attention(True),
        operator("gelu", tensor(0)),
        operator("dropout", tensor(8)),
    ]
    for op in ops:
        assert all(math.isfinite(seconds) and seconds >= 0 for seconds in operator_seconds(op, device(type)))


def layer(s: int, b: int, width: int, heads: int, ranks: int) -> list[Operator]:
    """A transformer layer of one tensor-parallel rank, as measured: unfused attention, three dropouts."""
    x, hidden = tensor(s, b, width), 4 * width // ranks
    local, head = b * heads // ranks, width // heads
    scores = tensor(local, s, s)

    def dropout(x: TensorType) -> Operator:
        mask = TensorType(x.shape, torch.bool)
        return operator("native_dropout", x, results=(x, mask))

    def projection(inner: int, outer: int) -> Operator:
        tokens = s * b
        return operator(
            "linear", tensor(tokens, inner), tensor(outer, inner), tensor(outer), results=(tensor(tokens, outer),)
        )

    def product(first: tuple[int, int], second: tuple[int, int]) -> Operator:
        result = tensor(local, first[0], second[1])
        return operator("bmm", tensor(local, *first), tensor(local, *second), results=(result,))

    norm = operator("layer_norm", x, tensor(width), tensor(width))
    return [
        norm, projection(width, 3 * width // ranks), product((s, head), (head, s)), operator("softmax", scores),
        dropout(scores), product((s, s), (s, head)), projection(width // ranks, width), dropout(x),
        operator("add", x, x), norm, projection(width, hidden), operator("gelu", tensor(s, b, hidden)),
        projection(hidden, width), dropout(x), operator("add", x, x),
    ]  # fmt: skip


def test_a_published_transformer_layer_is_met() -> None:
    """One layer of the 22B model on eight A100 (Korthikanti et al. 2022, table 4): 7.7 ms forward, 11.9 backward."""
    ops = layer(2048, 4, 6144, 64, 8)
    forward, backward = (sum(times) for times in zip(*(operator_seconds(op, A100) for op in ops), strict=True))
    (shape,) = group_shapes(parse_cluster("1x8@A100-80GB"), [range(8)])
    reductions = 2 * all_reduce(shape, 2048.0 * 4 * 6144 * 2)
    assert forward + reductions == pytest.approx(7.7e-3, rel=0.1)
    assert backward + reductions == pytest.approx(11.9e-3, rel=0.1)


@given(st.sampled_from(["softmax", "layer_norm", "gelu", "mul", "sum", "cat"]), st.integers(1, 64), st.integers(1, 64))
def test_larger_tensors_never_take_less(name: str, rows: int, columns: int) -> None:
    for on, (small, large) in itertools.product(
        (A100, CPU), [((rows, columns), (rows + 1, columns)), ((rows, columns), (rows, columns + 3))]
    ):
        before, after = (operator_seconds(operator(name, tensor(*shape)), on) for shape in (small, large))
        assert before[0] <= after[0] and before[1] <= after[1]
