"""Every rule of the table by execution, and rules made wrong on purpose, which the oracle must reject."""

import random

import pytest

from autoshard.errors import NotEqual
from autoshard.placement import I, R
from autoshard.program import Operator
from autoshard.rules import DEFAULT_RULES, Rule, RuleTable, axis_strategies, local_operator, oracle
from autoshard.rules.schema import overload
from autoshard.rules.strategy import AxisStrategy
from tests.rules.samples import SAMPLES, Line, f, i, m, make, samples, u, w

NAMES = sorted(DEFAULT_RULES.rules)
NO_VALUES = ("empty", "rand_like", "randn_like")
REDUNDANT = 2  # all I and all R come first


def by_values(name: str) -> bool:
    return not any(word in name for word in NO_VALUES)


def test_every_operator_exists_and_has_a_sample() -> None:
    assert [name for name in NAMES if overload(name) is None] == []
    assert [name for name in NAMES if not samples(name)] == []
    assert sorted(set(SAMPLES) - set(NAMES)) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_equals_the_whole_operator(name: str) -> None:
    for seed, line in enumerate(samples(name)):
        op, tensors = oracle.call(name, *make(line, seed))
        for ranks in (2, 3, 4):
            strategies = axis_strategies(op, ranks)
            assert {strategies[0].results[:1], strategies[1].results[:1]} == {(I,), (R,)}
            assert len(set(strategies)) == len(strategies)
            for strategy in filter(oracle.is_local, strategies):
                oracle.prove(op, tensors, (strategy,), (ranks,), seed, by_values(name))


@pytest.mark.parametrize("name", NAMES)
def test_two_axes_multiply(name: str) -> None:
    generator = random.Random(name)
    op, tensors = oracle.call(name, *make(generator.choice(samples(name))))
    sizes = generator.choice(((2, 2), (2, 3), (3, 2)))
    for _ in range(6):
        first = generator.choice([s for s in axis_strategies(op, sizes[0]) if is_plain(s) and is_even(op, s, sizes[0])])
        left = local_operator(op, [(p,) for p in first.operands], [(p,) for p in first.results], sizes[:1])
        second = generator.choice([s for s in axis_strategies(left, sizes[1]) if is_plain(s)])
        oracle.prove(op, tensors, (first, second), sizes, values=by_values(name))


def is_plain(strategy: AxisStrategy) -> bool:
    return strategy.implementation in (None, "average")


def is_even(op: Operator, strategy: AxisStrategy, ranks: int) -> bool:
    placed = zip((*op.operands, *op.results), (*strategy.operands, *strategy.results), strict=True)
    return all(placement.dim is None or type_.shape[placement.dim] % ranks == 0 for type_, placement in placed)


WRONG = [
    ("aten.softmax.int", "b... d -> b... d", (f(4, 6), -1)),
    ("aten.linear.default", "b... k, n k, n -> b... n", (f(4, 8), f(6, 8), f(6))),
    ("aten.addmm.default", "n, m k, k n -> m n", (f(5), f(4, 6), f(6, 5))),
    ("aten.mean.dim", "b d -> b", (f(4, 6), [1])),
    ("aten.amax.default", "b d -> b", (w(4, 6), [1])),
    ("aten.max_pool2d.default", Rule("b c x! y! -> b c p! q!", linear=True), (f(2, 4, 4, 4), [2, 2])),
    ("aten.max_pool2d.default", "b c x y -> b c x y", (f(2, 4, 4, 4), [3, 3], [1, 1], [1, 1])),
    ("aten.embedding.default", "v d, b... -> b... d", (f(9, 6), i(9, 4))),
    ("aten.gelu.default", Rule("b... -> b...", linear=True), (f(4, 6),)),
    ("aten.add.Tensor", Rule("b..., b... -> b...", linear=((0,),)), (f(4, 6), f(6))),
    ("aten.mul.Tensor", Rule("b..., b... -> b...", linear=True), (f(4, 6), f(4, 6))),
    ("aten.layer_norm.default", "b... d, d, d -> b... d", (f(4, 6), [6], f(6), f(6))),
    ("aten.group_norm.default", "b c x!..., c, c -> b c x!...", (f(2, 12, 3), 4, f(12), f(12))),
    ("aten.cumsum.default", "b d -> b d", (f(4, 6), 1)),
    ("aten.reshape.default", "a~ b! -> c! a~", (f(4, 6), [6, 4])),
    ("aten.transpose.int", "a b -> a b", (f(4, 4), 0, 1)),
    ("aten.cross_entropy_loss.default", "b c!, b -> ", (f(8, 6), i(6, 8))),
    ("aten.prod.default", "b... -> ", (f(6),)),
    (
        "aten.scaled_dot_product_attention.default",
        "b h s k!, b h t! k!, b h t! k! -> b h s k!",
        (f(2, 2, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2), None, 0.0, True),
    ),
    (
        "aten.scaled_dot_product_attention.default",
        "b h s! k!, b h t k!, b h t k! -> b h s! k!",
        (f(2, 2, 4, 2), f(2, 2, 4, 2), f(2, 2, 4, 2)),
    ),
    ("aten.roll.default", "a b -> a b", (f(4, 6), [1], [1])),
    ("aten.gather.default", "a b, a i -> a i", (f(4, 6), 1, i(6, 4, 3))),
    ("aten.var.correction", "b d -> b", (f(4, 6), [1])),
    ("aten.logsumexp.default", "b d -> b", (f(4, 6), [1])),
    ("aten.div.Tensor", Rule("b..., b... -> b...", linear=((1,),)), (f(4, 6), u(4, 6))),
    ("aten.conv2d.default", "b c x!..., o c k!..., o -> b o y!...", (f(2, 4, 3, 3), f(6, 4, 2, 2), f(6))),
    (
        "aten.conv2d.default",
        "b c x!..., c i! k!..., c -> b c y!...",
        (f(2, 6, 3, 3), f(6, 2, 2, 2), f(6), [1, 1], [0, 0], [1, 1], 3),
    ),
    ("aten.pow.Tensor_Scalar", Rule("b... -> b...", linear=True), (f(4, 6), 2)),
    ("aten.index_select.default", "a v, i -> a i", (f(4, 6), 1, i(6, 6))),
    ("aten.sort.default", "a b -> a b, a b", (w(4, 6),)),
    ("aten.where.self", Rule("b..., b..., b... -> b...", linear=((1,),)), (m(4, 6), f(4, 6), f(4, 6))),
]


@pytest.mark.parametrize(
    ("name", "rule", "line"), WRONG, ids=[f"{entry[0].split('.')[1]}-{at}" for at, entry in enumerate(WRONG)]
)
def test_wrong_rules_are_rejected(name: str, rule: Rule | str, line: Line) -> None:
    table = DEFAULT_RULES.with_rule(name, rule)
    args, kwargs = make(line)
    assert not kwargs
    with pytest.raises(NotEqual, match=r"differs|fails|shape"):
        oracle.check(name, args, rules=table)


def test_check_counts_what_it_ran() -> None:
    table = RuleTable({}).with_rule("aten.linear.default", "b... k, n k, +n -> b... n")
    args, _ = make((f(4, 8), f(6, 8), f(6)))
    assert oracle.check("aten.linear.default", args, rules=table, ranks=(2,)) == REDUNDANT + 3
