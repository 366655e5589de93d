"""The Python that is written for every operator of the rule table does what the operator does."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from autoshard.passes.emit_expression import ATOM, COMPARISON, TERNARY, Expression
from autoshard.passes.emit_helpers import BATCH_NORM_RESULTS
from autoshard.passes.emit_items import WRITERS, write
from autoshard.passes.emit_tree import Plain
from autoshard.passes.local import Extent, LocalNode, LocalTensor, Ref
from autoshard.program import Frame, Operand
from autoshard.rules import DEFAULT_RULES, oracle
from autoshard.rules.schema import overload
from autoshard.runtime import operators
from tests.rules.samples import c, f, i, make, n, samples, u
from tests.rules.test_oracle import by_values

NAMES = sorted(DEFAULT_RULES.rules)
# Which results the helper returns that stands for an operator.
RETURNED = {"aten._native_batch_norm_legit_functional.default": BATCH_NORM_RESULTS, "aten.native_dropout.default": (0,)}
X, IMAGE = f(4, 6), f(3, 4, 6, 6)

# What the samples leave at its default.
MORE = [
    ("aten.softmax.int", (X, -1, torch.float32)),
    ("aten.log_softmax.int", (X, -1, torch.float32)),
    ("aten.sum.dim_IntList", (X, [1], False, n(dtype=torch.float32))),
    ("aten.mean.dim", (X, [0, 1], True, n(dtype=torch.float32))),
    ("aten.cumsum.default", (X, 1, n(dtype=torch.float32))),
    ("aten.clamp.default", (X, None, 0.5)),
    ("aten.amax.default", (X, [], True)),
    ("aten.argmax.default", (X, None, True)),
    ("aten.var.correction", (X, None, n(correction=2, keepdim=True))),
    ("aten.norm.ScalarOpt_dim", (X, 1, [1], True)),
    ("aten.topk.default", (X, 2, -1, False)),
    ("aten.rsub.Scalar", (X, 2.0, 3)),
    ("aten.rsub.Tensor", (X, X, n(alpha=3))),
    ("aten.add.Tensor", (X, X, n(alpha=-0.5))),
    ("aten.sub.Tensor", (X, X, n(alpha=2))),
    ("aten.elu.default", (X, 2.0)),
    ("aten.elu.default", (X, 1.67, 1.05)),
    ("aten.softplus.default", (X, 2, 10)),
    ("aten.leaky_relu.default", (X, 0.3)),
    ("aten.hardtanh.default", (X, -0.3, 0.4)),
    ("aten.gelu.default", (X, n(approximate="tanh"))),
    ("aten.max_pool2d.default", (IMAGE, [3, 2], [2, 1], [1, 1], [2, 1], True)),
    ("aten.avg_pool2d.default", (IMAGE, [3, 3], [2, 2], [1, 1], True, False, 5)),
    ("aten.conv2d.default", (IMAGE, f(6, 2, 3, 3), f(6), [1, 2], [1, 0], [2, 1], 2)),
    ("aten.scaled_dot_product_attention.default", (IMAGE, IMAGE, IMAGE, None, 0.0, False, n(scale=0.3))),
    ("aten.layer_norm.default", (X, [6], None, None, 1e-3)),
    ("aten.group_norm.default", (IMAGE, 2, None, None, 1e-3, False)),
    ("aten.embedding.default", (f(9, 6), i(9, 4, 5), 3, True)),
    ("aten.cross_entropy_loss.default", (f(8, 6), i(6, 8), c(u(6)), 0, 2, 0.1)),
    ("aten.cross_entropy_loss.default", (f(8, 6), i(6, 8), None, 1, -7)),
    ("aten.nll_loss_nd.default", (f(8, 6), i(6, 8), None, 1, 3)),
    ("aten.smooth_l1_loss.default", (X, f(4, 6), 1, 0.2)),
    ("aten.huber_loss.default", (X, f(4, 6), 1, 0.2)),
    ("aten.binary_cross_entropy_with_logits.default", (X, u(4, 6), c(u(6)), c(u(6)), 0)),
    ("aten.zeros.default", ([4], n(dtype=torch.int64))),
    ("aten.full.default", ([4, 5], 2, n(dtype=torch.float64))),
    ("aten.full.default", ([4], True)),
    ("aten.arange.start_step", (5, 1, -2, n(dtype=torch.float64))),
    ("aten.linspace.default", (0.0, 1.0, 6, n(dtype=torch.float64))),
    ("aten.eye.m", (4, 5, n(dtype=torch.int64))),
    ("aten.new_full.default", (X, [4], 2.0, n(dtype=torch.int64))),
    ("aten.full_like.default", (X, 2.0, n(dtype=torch.int64))),
    ("aten._to_copy.default", (X,)),
    ("aten.slice.Tensor", (X, 1, -4, -1, 2)),
    ("aten.index.Tensor", (IMAGE, [None, None, i(6, 3), i(6, 3)])),
    ("aten.diff.default", (X, 2)),
]


class Around:
    """Tensors by name, none of them split, and what a piece of text asks for."""

    def __init__(self, tensors, level=ATOM, device="cpu"):
        self.tensors, self.level, self.imported, self.on = tensors, level, set(), device

    def ref(self, name):
        return Expression(name if self.level == ATOM else f"{name} if True else None", self.level)

    def tensor(self, name):
        return self.tensors[name]

    def size(self, extent, near=()):
        return Expression(str(extent.size if isinstance(extent, Extent) else extent))

    def group(self, axis):
        raise AssertionError("nothing is split")

    def device(self, near=()):
        return f'"{self.on}"'

    def uses(self, module, name):
        self.imported.add((module, name))
        return name


def local(name, tensor):
    dims = tuple(map(Extent, tensor.shape))
    return LocalTensor(name, dims, tensor.dtype, (), tensor.requires_grad, example=tuple(tensor.shape))


def referring(argument, names):
    if isinstance(argument, Operand):
        return Ref(names[argument.index])
    return tuple(referring(item, names) for item in argument) if isinstance(argument, tuple) else argument


def prepared(name, line, seed, level=ATOM):
    """(node, scope, operands by name, results) of one sample call."""
    args, kwargs = make(line, seed)
    op, tensors = oracle.call(name, args, kwargs)
    torch.manual_seed(0)
    found = overload(name)(*args, **kwargs)
    results = list(found) if isinstance(found, (tuple, list)) else [found]
    operands = {f"x{number}": tensor for number, tensor in enumerate(tensors)}
    made = {f"y{number}": tensor for number, tensor in enumerate(results)}
    arguments = {key: referring(argument, list(operands)) for key, argument in op.arguments.items()}
    scope = Around({key: local(key, tensor) for key, tensor in (operands | made).items()}, level)
    return LocalNode(name, arguments, tuple(made), ()), scope, operands, results


def run(node, scope, operands):
    text = write(Plain(node, Frame("", 0, "")), scope).text
    known = {"torch": torch, "self": SimpleNamespace(training=True), **operands}
    for module, name in scope.imported:
        known[name or module] = F if module == "F" else getattr(operators, name)
    torch.manual_seed(0)
    try:
        found = eval(text, known)
    except Exception as error:
        raise AssertionError(f"{text}: {error}") from error
    return text, list(found) if isinstance(found, (tuple, list)) else [found]


def compare(text, found, expected, values=True):
    assert len(found) == len(expected), text
    for left, right in zip(found, expected, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), text
        if values:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12, msg=lambda m: f"{text}: {m}")


def gradients(leaves, results):
    """Of the sum of the results, each element with a weight of its own."""
    flowing = [result for result in results if result.requires_grad]
    weights = [torch.linspace(-1, 1, result.numel(), dtype=result.dtype).reshape(result.shape) for result in flowing]
    return torch.autograd.grad(flowing, leaves, weights, materialize_grads=True, allow_unused=True, retain_graph=True)


def check(name, line, seed=0, level=ATOM):
    node, scope, operands, expected = prepared(name, line, seed, level)
    text, found = run(node, scope, operands)
    expected = [expected[number] for number in RETURNED.get(name, range(len(expected)))]
    compare(text, found, expected, by_values(name))
    leaves = [tensor for tensor in operands.values() if tensor.requires_grad]
    if by_values(name) and leaves and any(result.requires_grad for result in expected):
        compare(f"the gradient of {text}", gradients(leaves, found), gradients(leaves, expected))


@pytest.mark.parametrize("name", NAMES)
def test_text_does_what_the_operator_does(name):
    for seed, line in enumerate(samples(name)):
        check(name, line, seed)


@pytest.mark.parametrize("name", NAMES)
def test_operands_keep_their_parentheses(name):
    check(name, samples(name)[0], level=TERNARY)


@pytest.mark.parametrize(("name", "line"), MORE, ids=[f"{number}-{name}" for number, (name, _) in enumerate(MORE)])
def test_arguments_that_are_not_at_their_defaults(name, line):
    check(name, line)


def test_what_is_made_is_made_on_the_device():
    for name in NAMES:
        for line in samples(name):
            node, scope, operands, _ = prepared(name, line, 0)
            if not operands:
                scope.on = "meta"
                text, found = run(node, scope, operands)
                assert found[0].is_meta, text


def test_writers_name_operators_that_exist():
    targets = [name for name in WRITERS if name.startswith("aten.")]
    assert [name for name in targets if overload(name) is None] == []


@pytest.mark.parametrize(
    ("name", "given", "text"),
    [
        ("aten.add.Tensor", {"self": "a", "other": "b", "alpha": 1}, "a + b"),
        ("aten.add.Tensor", {"self": "a", "other": "b", "alpha": 2}, "a + 2 * b"),
        ("aten.sub.Tensor", {"self": "a", "other": -1.5, "alpha": 1}, "a - -1.5"),
        ("aten.pow.Tensor_Scalar", {"self": "a", "exponent": -2}, "a ** (-2)"),
        ("aten.pow.Scalar", {"self": -2.0, "exponent": "a"}, "(-2.0) ** a"),
        ("aten.slice.Tensor", {"self": "a", "dim": 1, "start": 0, "end": 2**63 - 1, "step": 1}, "a[:, :]"),
        ("aten.select.int", {"self": "a", "dim": -1, "index": -1}, "a[:, -1]"),
        ("aten.masked_fill.Scalar", {"self": "a", "mask": "b", "value": -math.inf}, 'a.masked_fill(b, float("-inf"))'),
        ("aten.reshape.default", {"self": "a", "shape": (4, 6)}, "a.reshape(4, 6)"),
    ],
)  # fmt: skip
def test_text(name, given, text):
    tensors = {key: local(key, torch.ones(4, 6)) for key in "aby"}
    arguments = {key: Ref(value) if isinstance(value, str) else value for key, value in given.items()}
    written = write(Plain(LocalNode(name, arguments, ("y",), ()), Frame("", 0, "")), Around(tensors))
    assert re.sub(r"\s+", " ", written.text) == text
    assert written.level <= COMPARISON
