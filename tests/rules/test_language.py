"""Lines of the rule language: what they expand to, and what is said of wrong ones."""

import pytest
import torch

from autoshard.errors import BadInput
from autoshard.program import Operator, TensorType
from autoshard.rules import AxisStrategy, Rule
from autoshard.rules.language import parse


def operator(
    operands: list[tuple[int, ...]], results: list[tuple[int, ...]], dtype: torch.dtype = torch.float64
) -> Operator:
    types = [tuple(TensorType(shape, dtype) for shape in shapes) for shapes in (operands, results)]
    return Operator("mylib.op.default", *types)


def expand(
    line: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], ranks: int = 2, **options
) -> list[str]:
    strategies = Rule(line, **options).expand(operator(operands, results), ranks)
    assert [text(strategy) for strategy in strategies[:2]] == [text(redundant(kind, strategies[0])) for kind in "IR"]
    return [text(strategy) for strategy in strategies[2:]]


def redundant(kind: str, like: AxisStrategy) -> AxisStrategy:
    return AxisStrategy((kind,) * len(like.operands), (kind,) * len(like.results))  # type: ignore[arg-type]


def text(strategy: AxisStrategy) -> str:
    sides = " ".join(map(str, strategy.operands)), " ".join(map(str, strategy.results))
    return f"{sides[0]} -> {sides[1]}" + (f" by {strategy.implementation}" if strategy.implementation else "")


EXPANSIONS = [
    ("k, n k, +n -> n", [(8,), (6, 8), (6,)], [(6,)], ["S(0) S(1) P -> P", "R S(0) S(0) -> S(0)"]),
    ("b... d! -> b... d!", [(4, 6)], [(4, 6)], ["S(0) -> S(0)"]),
    ("b..., b... -> b...", [(4, 6), (4, 1)], [(4, 6)], ["S(0) S(0) -> S(0)", "S(1) R -> S(1)"]),
    ("b..., b... -> b...", [(6,), (4, 6)], [(4, 6)], ["S(0) S(1) -> S(1)", "R S(0) -> S(0)"]),
    ("v@vocab_embedding d!, b -> b d!", [(8, 4), (3,)], [(3, 4)], ["S(0) R -> P by vocab_embedding", "R S(0) -> S(0)"]),
    ("b c@vocab_cross_entropy, b -> ", [(4, 6), (4,)], [()], ["S(0) S(0) -> P", "S(1) I -> I by vocab_cross_entropy"]),
    ("k@average b -> b", [(4, 3)], [(3,)], ["S(0) -> P by average", "S(1) -> S(0)"]),
    ("k@average b -> b", [(5, 3)], [(3,)], ["S(1) -> S(0)"]),  # shares of a mean must be equal
    ("b (h k) -> b h k", [(3, 8)], [(3, 4, 2)], ["S(0) -> S(0)", "S(1) -> S(1)"]),
    ("b (h k) -> b h k", [(3, 6)], [(3, 3, 2)], ["S(0) -> S(0)"]),  # three heads do not divide
    ("h~ k!, g! k! -> h~", [(6, 2), (3, 2)], [(4,)], ["S(0) R -> S(0)"]),
    ("-> a b", [], [(4, 6)], [" -> S(0)", " -> S(1)"]),
    ("a -> a 1", [(4,)], [(4, 1)], ["S(0) -> S(0)"]),
    ("(), a -> a", [(), (4,)], [(4,)], ["R S(0) -> S(0)"]),
]  # fmt: skip


@pytest.mark.parametrize(("line", "operands", "results", "expected"), EXPANSIONS)
def test_a_line_expands(line: str, operands, results, expected: list[str]) -> None:
    assert expand(line, operands, results) == expected


def test_partial_sums_pass_where_linear() -> None:
    shapes = [(4, 1), (4, 1)], [(4, 1)]
    assert expand("b..., b... -> b...", *shapes, linear=True) == ["S(0) S(0) -> S(0)", "P P -> P"]
    assert expand("b..., b... -> b...", *shapes, linear=((0,), (1,))) == ["S(0) S(0) -> S(0)", "P R -> P", "R P -> P"]
    assert expand("b..., +b... -> b...", *shapes, linear=((0,),)) == ["S(0) S(0) -> S(0)", "P P -> P"]


def test_booleans_are_never_partial() -> None:
    strategies = Rule("a b -> a", linear=True).expand(operator([(4, 6)], [(4,)], torch.bool), 2)
    assert [text(strategy) for strategy in strategies] == ["I -> I", "R -> R", "S(0) -> S(0)"]


def test_shards_may_be_uneven_or_empty_unless_forbidden() -> None:
    assert expand("a b -> a b", [(3, 1)], [(3, 1)], ranks=4) == ["S(0) -> S(0)"]
    assert expand("a b -> a b", [(3, 1)], [(3, 1)], ranks=4, nonempty=True) == []
    assert expand("c~ -> c~", [(8,)], [(8,)], divides=(("c", 6),), ranks=4) == []


UNREADABLE = [
    ("a b", "a rule has exactly one '->'"),
    ("A -> A", "'A' is not a dim of a rule"),
    ("a a -> a", "letter 'a' stands twice in 'a a'"),
    ("a... b... -> a", "'a... b...' has more than one '...'"),
    ("a -> +a", "'+' marks operands, not results"),
    ("a -> a...", "'a' stands both with and without '...'"),
    ("a@ring -> a", "there is no implementation 'ring'"),
]


@pytest.mark.parametrize(("line", "message"), UNREADABLE)
def test_unreadable_lines(line: str, message: str) -> None:
    with pytest.raises(BadInput) as error:
        parse(line)
    assert error.value.what == message
    assert error.value.where == f"rule '{line}'"


UNFITTING = [
    ("a b -> a", [(4,)], "operand 0 has 1 dims, its pattern 2"),
    ("a, a -> a", [(4,), (5,)], "letter 'a' is 5 elsewhere and 4 in operand 0"),
    ("a -> a, a", [(4,)], "the operator has 1 results, the rule 2"),
    ("a -> a", [(4,), (4,)], "the operator has 2 tensor operands, the rule 1"),
    ("1 -> a", [(4,)], "operand 0 has size 4 where the rule says 1"),
    ("(a b) -> a!", [(5,)], "(a b) is 4 by its letters and 5 in operand 0"),
    ("(b c) -> a!", [(5,)], "sizes of b, c in (b c) cannot be known: at most one may stand there alone"),
]


@pytest.mark.parametrize(("line", "operands", "message"), UNFITTING)
def test_lines_that_do_not_fit(line: str, operands, message: str) -> None:
    with pytest.raises(BadInput) as error:
        Rule(line).expand(operator(operands, [(4,)]), 2)
    assert error.value.what == message
    shapes = ", ".join(str(list(shape)) for shape in operands)
    assert error.value.where == f"rule '{line}' for mylib.op.default: {shapes} -> [4]"
