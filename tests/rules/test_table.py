"""The strategies that training layouts rest on, operators without a rule, and local arguments."""

import pytest
import torch

from autoshard.errors import BadInput, UnsupportedOperator
from autoshard.placement import I, P, R, S
from autoshard.rules import DEFAULT_RULES, AxisStrategy, axis_strategies, has_rule, local_arguments, oracle
from tests.rules.samples import Line, c, f, i, make, n


def strategies(name: str, line: Line, ranks: int = 2) -> set[tuple]:
    op, _ = oracle.call(name, *make(line))
    return {(s.operands, s.results, s.implementation) for s in axis_strategies(op, ranks)}


def test_megatron_pair() -> None:
    found = strategies("aten.linear.default", (f(2, 4, 8), f(8, 8), f(8)))
    assert ((R, S(0), S(0)), (S(2),), None) in found  # column
    assert ((S(2), S(1), P), (P,), None) in found  # row
    assert ((S(1), R, R), (S(1),), None) in found  # sequence


@pytest.mark.parametrize(
    "line",
    [
        (f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), None, 0.0, True),
        (f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 1, 6, 6)),
        (f(2, 4, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), None, 0.0, True, n(enable_gqa=True)),
        (f(2, 4, 6, 8), f(2, 4, 6, 8), f(2, 4, 6, 8), None, 0.0, False),
    ],
)
def test_attention_splits_batch_and_heads(line: Line) -> None:
    found = {
        (operands[:3], results[0])
        for operands, results, _ in strategies("aten.scaled_dot_product_attention.default", line)
    }
    assert {((S(d),) * 3, S(d)) for d in (0, 1)} <= found
    causal = line[5:6] == (True,)
    assert (((S(2), R, R), S(2)) in found) is not causal


def test_grouped_queries_need_divisible_heads() -> None:
    line = (f(2, 4, 6, 8), f(2, 2, 6, 8), f(2, 2, 6, 8), None, 0.0, True, n(enable_gqa=True))
    found = strategies("aten.scaled_dot_product_attention.default", line, ranks=4)
    assert not any(S(1) in operands for operands, _, _ in found)


def test_reshape_to_heads_needs_divisible_heads() -> None:
    assert ((S(2),), (S(2),), None) in strategies("aten.reshape.default", (f(2, 4, 12), [2, 4, 4, 3]), 4)
    assert ((S(2),), (S(2),), None) not in strategies("aten.reshape.default", (f(2, 4, 12), [2, 4, 3, 4]), 4)
    assert ((S(1),), (S(0),), None) not in strategies("aten.reshape.default", (f(2, 4, 12), [8, 12]))


def test_named_implementations() -> None:
    assert ((S(0), R), (P,), "vocab_embedding") in strategies("aten.embedding.default", (f(8, 4), i(8, 2, 3)))
    assert ((S(1), I), (I,), "vocab_cross_entropy") in strategies(
        "aten.cross_entropy_loss.default", (f(6, 8), i(8, 6), None, 2)
    )
    norm = strategies(
        "aten._native_batch_norm_legit_functional.default",
        (f(4, 6, 3, 3), f(6), f(6), c(f(6)), c(f(6)), True, 0.1, 1e-5),
    )
    assert ((S(0), R, R, R, R), (S(0), I, I, I, I), "batch_norm_synced") in norm
    assert ((S(0),), (P,), "average") in strategies("aten.mean.default", (f(4, 5),))
    assert ((S(1),), (P,), "average") not in strategies("aten.mean.default", (f(4, 5),))


def test_class_split_is_refused_with_weights_and_probabilities() -> None:
    for line in ((f(6, 8), i(8, 6), c(f(8)), 2), (f(6, 8), f(6, 8), None, 2)):
        assert all(name is None for _, _, name in strategies("aten.cross_entropy_loss.default", line))


def test_an_operator_without_rule_runs_redundantly() -> None:
    assert not has_rule("aten.histc.default")
    op, _ = oracle.call("aten.histc.default", (torch.randn(8),))
    assert axis_strategies(op, 2) == (AxisStrategy((I,), (I,)), AxisStrategy((R,), (R,)))


@pytest.mark.parametrize("name", ["aten.add_.Tensor", "aten.randn.default", "mylib.op.default"])
def test_mutating_random_and_unknown_operators_are_refused(name: str) -> None:
    op, _ = oracle.call("aten.histc.default", (torch.randn(8),))
    with pytest.raises(UnsupportedOperator, match=name):
        axis_strategies(type(op)(name, op.operands, op.results, {}), 2)


def test_a_rule_is_added_in_one_line() -> None:
    table = DEFAULT_RULES.with_rule("aten.histc.default", "b! -> c!")
    assert has_rule("aten.histc.default", table)
    assert not has_rule("aten.histc.default")
    with pytest.raises(BadInput, match="'histc' is not an operator's name"):
        DEFAULT_RULES.with_rule("histc", "b! -> c!")


@pytest.mark.parametrize(
    ("name", "line", "operands", "results", "changed"),
    [
        ("aten.reshape.default", (f(4, 8), [4, -1, 2]), [(4, 4)], [(4, 2, 2)], {"shape": (4, 2, 2)}),
        ("aten.expand.default", (f(4, 1), [4, 8]), [(4, 1)], [(4, 4)], {"size": (4, 4)}),
        ("aten.full.default", ([4, 8], 1.0), [], [(2, 8)], {"size": (2, 8)}),
        ("aten.repeat.default", (f(1, 6), [4, 2]), [(1, 6)], [(2, 12)], {"repeats": (2, 2)}),
        (
            "aten.group_norm.default",
            (f(2, 8, 3), 4, f(8), f(8)),
            [(2, 4, 3), (4,), (4,)],
            [(2, 4, 3)],
            {"num_groups": 2},
        ),
        (
            "aten.conv1d.default",
            (f(2, 8, 5), f(8, 2, 3), None, [1], [0], [1], 4),
            [(2, 4, 5), (4, 2, 3)],
            [(2, 4, 3)],
            {"groups": 2},
        ),
        ("aten.softmax.int", (f(4, 8), -1), [(2, 8)], [(2, 8)], {}),
    ],
)
def test_local_arguments(name: str, line: Line, operands, results, changed: dict) -> None:
    op, _ = oracle.call(name, *make(line))
    assert local_arguments(op, operands, results) == {**op.arguments, **changed}
