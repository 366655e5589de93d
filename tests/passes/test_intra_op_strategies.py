"""Strategies on several axes: what is cut, evenly or not, and what is never cut."""

from dataclasses import replace

import pytest
import torch

from autoshard.cluster import parse_cluster
from autoshard.cost.prices import Prices
from autoshard.passes.intra_strategies import EvenRule, StrategyMaker, Uneven
from autoshard.placement import I, P, R, S, local_shape
from autoshard.plan import Mesh
from autoshard.program import Operand, Operator, TensorType


def maker(
    sizes: tuple[int, ...], uneven: Uneven = "weights", weights: frozenset[int] = frozenset({50257})
) -> StrategyMaker:
    axes, count = ("a", "b", "c")[: len(sizes)], 1
    for size in sizes:
        count *= size
    prices = Prices(parse_cluster(f"1x{count}@A100-80GB"), Mesh(axes, sizes, tuple(range(count))))
    return StrategyMaker(sizes, prices, EvenRule(uneven, weights), "adamw")


def linear(batch: int, inner: int, outer: int) -> Operator:
    types = [TensorType(shape, torch.float32, True) for shape in ((batch, inner), (outer, inner), (batch, outer))]
    return Operator(
        "aten.linear.default",
        tuple(types[:2]),
        (types[2],),
        {"input": Operand(0), "weight": Operand(1), "bias": None},
    )


NO_SYMBOLS = [frozenset[int]()] * 3


def test_products_of_axes_hold_tensor_and_data_parallelism() -> None:
    made = maker((2, 2)).operator(linear(8, 16, 32), NO_SYMBOLS)
    layouts = {(strategy.operands, strategy.results) for strategy in made}
    assert (((S(0), R), (R, S(0))), ((S(0), S(1)),)) in layouts
    assert (((S(1), S(1)), (S(1), S(1))), ((P, P),)) in layouts
    assert len(layouts) == len(made)


def test_the_share_of_the_work_is_the_price() -> None:
    made = {strategy.operands: strategy for strategy in maker((4,)).operator(linear(4096, 4096, 4096), NO_SYMBOLS)}
    whole, split = made[(I,), (I,)], made[(S(0),), (R,)]
    assert 3 < whole.forward_s / split.forward_s < 5


def test_a_dim_is_cut_by_two_axes_only_while_both_divide_it() -> None:
    cut = {strategy.operands[0] for strategy in maker((2, 4)).operator(linear(4, 64, 64), NO_SYMBOLS)}
    assert (S(0), R) in cut and (S(0), S(0)) not in cut


def test_axes_of_one_rank_are_left_alone() -> None:
    assert all(s.operands[0][0] == I for s in maker((1, 2)).operator(linear(8, 16, 32), NO_SYMBOLS))


@pytest.mark.parametrize(
    ("size", "uneven", "symbol", "expected"),
    [
        (50257, "weights", False, True),
        (50257, "weights", True, False),
        (50257, "never", False, False),
        (197, "weights", False, False),
        (197, "always", False, True),
        (5, "always", False, False),
        (3, "always", False, False),
    ],
)
def test_uneven_cuts_are_for_large_fixed_weights(size: int, uneven: Uneven, symbol: bool, expected: bool) -> None:
    symbols = [frozenset[int](), frozenset[int](), frozenset({1} if symbol else ())]
    made = maker((4,), uneven).operator(linear(8, 16, size), symbols)
    assert any(strategy.results[0] == (S(1),) for strategy in made) is expected


def test_values_without_gradient_have_no_strategies_that_differ_in_name_only() -> None:
    op = linear(8, 16, 32)
    frozen = replace(
        op,
        operands=tuple(replace(t, needs_grad=False) for t in op.operands),
        results=(replace(op.results[0], needs_grad=False),),
    )
    made = maker((2,)).operator(frozen, NO_SYMBOLS)
    assert ((R,), (R,)) not in {strategy.operands for strategy in made}
    assert ((S(0),), (R,)) in {strategy.operands for strategy in made}


def test_parameters_are_stored_whole_or_cut() -> None:
    made = maker((2, 2)).parameter(TensorType((6, 8), torch.float32, True), trainable=True)
    assert {strategy.results[0] for strategy in made} == {
        (I, I), (I, S(0)), (I, S(1)), (S(0), I), (S(0), S(1)), (S(1), I), (S(1), S(0)), (S(1), S(1)),
    }  # fmt: skip
    whole, cut = made[0], made[-1]
    assert whole.parameter_bytes == 6 * 8 * 4 and whole.optimizer_bytes == 2 * whole.parameter_bytes
    assert (
        cut.gradient_bytes
        == 4 * local_shape((6, 8), cut.results[0], (2, 2))[0] * local_shape((6, 8), cut.results[0], (2, 2))[1]
    )
