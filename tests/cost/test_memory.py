import pytest
import torch

from autoshard.cost.memory import SavedValues, optimizer_state_bytes, parameter_memory, saved_values
from autoshard.placement import I, S
from autoshard.program import Operand, Operator, TensorType


def tensor(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType(shape, dtype, grad and dtype.is_floating_point)


def operator(name: str, operands: list[TensorType], results: list[TensorType], **arguments: object) -> Operator:
    return Operator(name, tuple(operands), tuple(results), arguments)


A, B, C = Operand(0), Operand(1), Operand(2)
X, IDS, MASK = tensor(8, 16), tensor(8, dtype=torch.int64), tensor(8, 16, dtype=torch.bool)
W, V = tensor(4, 16), tensor(16)
IMAGE, KERNEL = tensor(2, 4, 8, 8), tensor(4, 4, 3, 3)
NORM = {"input": A, "normalized_shape": (16,), "weight": B, "bias": C, "eps": 1e-5}
LINEAR = {"input": A, "weight": B, "bias": None}
CONV = {"input": A, "weight": B, "bias": None, "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}


@pytest.mark.parametrize(
    ("op", "operands", "results", "extra_bytes"),
    [
        (operator("aten.linear.default", [X, W], [tensor(8, 4)], **LINEAR), (0, 1), (), 0),
        (operator("aten.linear.default", [X, tensor(4, 16, grad=False)], [tensor(8, 4)], **LINEAR), (1,), (), 0),
        (operator("aten.linear.default", [tensor(8, 16, grad=False), W], [tensor(8, 4)], **LINEAR), (0,), (), 0),
        (operator("aten.matmul.default", [tensor(2, 8, 16), tensor(2, 16, 4)], [X], self=A, other=B), (0, 1), (), 0),
        (operator("aten.mul.Tensor", [X, tensor(8, 16, grad=False)], [X], self=A, other=B), (1,), (), 0),
        (operator("aten.mul.Tensor", [X], [X], self=A, other=2.0), (), (), 0),
        (operator("aten.add.Tensor", [X, X], [X], self=A, other=B, alpha=1), (), (), 0),
        (operator("aten.relu.default", [X], [X], self=A), (), (0,), 0),
        (operator("aten.gelu.default", [X], [X], self=A, approximate="none"), (0,), (), 0),
        (operator("aten._softmax.default", [X], [X], self=A, dim=-1, half_to_float=False), (), (0,), 0),
        (operator("aten.native_dropout.default", [X], [X, MASK], input=A, p=0.1, train=True), (), (1,), 0),
        (operator("aten.reshape.default", [X], [tensor(128)], self=A, shape=(128,)), (), (), 0),
        (operator("aten.cat.default", [X, X], [tensor(16, 16)], tensors=(A, B), dim=0), (), (), 0),
        (operator("aten.where.self", [MASK, X, X], [X], condition=A, self=B, other=C), (0,), (), 0),
        (operator("aten.conv2d.default", [IMAGE, KERNEL], [IMAGE], **CONV), (0, 1), (), 0),
        (
            operator("aten.layer_norm.default", [X, V, V], [X], **NORM),
            (0, 1, 2), (), 2 * 8 * 4,  # and mean and deviation of each row
        ),
        (
            operator("aten.embedding.default", [tensor(100, 16), IDS], [X], weight=A, indices=B, padding_idx=-1),
            (1,), (), 0,
        ),
    ],
)  # fmt: skip
def test_what_autograd_keeps(
    op: Operator, operands: tuple[int, ...], results: tuple[int, ...], extra_bytes: int
) -> None:
    assert saved_values(op) == SavedValues(operands, results, extra_bytes)


def test_attention_keeps_its_fused_form() -> None:
    qkv = tensor(2, 4, 32, 8)
    op = operator("aten.scaled_dot_product_attention.default", [qkv] * 3, [qkv], query=A, key=B, value=C)
    saved = saved_values(op)
    assert (saved.operands, saved.results, saved.extra_bytes) == ((0, 1, 2), (0,), 2 * 4 * 32 * 4)


def test_cross_entropy_keeps_the_log_probabilities() -> None:
    logits = tensor(8, 100)
    op = operator(
        "aten.cross_entropy_loss.default", [logits, IDS], [tensor()], self=A, target=B, weight=None, reduction=2
    )
    saved = saved_values(op)
    assert saved.operands == (1,) and saved.extra_bytes == pytest.approx(logits.nbytes, abs=64)


def test_nothing_is_kept_where_no_gradient_flows() -> None:
    frozen = tensor(8, 16, grad=False)
    assert saved_values(operator("aten.gelu.default", [frozen], [frozen], self=A)).operands == ()


def test_an_operator_that_cannot_run_keeps_everything() -> None:
    saved = saved_values(operator("nobody.knows.default", [X, IDS], [X], self=A))
    assert (saved.operands, saved.results, saved.observed) == ((0,), (0,), False)


@pytest.mark.parametrize(("name", "states"), [("sgd", 0), ("momentum", 1), ("adamw", 2), ("adam", 2)])
def test_optimizer_state(name: str, states: int) -> None:
    weight = tensor(6, 10)
    assert optimizer_state_bytes(weight.nbytes, name) == states * weight.nbytes
    memory = parameter_memory(weight, (S(0), I), (4, 2), name)
    own = 2 * 10 * 4  # six rows over four ranks: two at most
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (own, own, states * own)
    assert memory.total_bytes == (2 + states) * own
    assert parameter_memory(weight, (I, I), (4, 2), name, trainable=False).total_bytes == weight.nbytes
