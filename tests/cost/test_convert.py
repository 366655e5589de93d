"""Conversions: every step is run on a tiny simulator of ranks, prices are compared with exhaustive search."""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autoshard.cluster import parse_cluster
from autoshard.cost.collectives import collective
from autoshard.cost.convert import is_legal, steps
from autoshard.cost.prices import Prices
from autoshard.placement import I, Layout, P, Placement, R, S, conversion, local_shape, shard_sizes
from autoshard.plan import Mesh
from autoshard.program import TensorType

Array = NDArray[np.float64]
Ranks = dict[tuple[int, ...], Array]


def prices(sizes: tuple[int, ...], spec: str = "4x8@A100-80GB") -> Prices:
    axes = ("dp", "cp", "tp")[: len(sizes)]
    return Prices(parse_cluster(spec), Mesh(axes, sizes, tuple(range(math.prod(sizes)))))


def layouts(dims: int, axes: int) -> list[Layout]:
    return list(itertools.product([I, R, P, *map(S, range(dims))], repeat=axes))


# --- a simulator of ranks


def cut(value: Array, dim: int, ranks: int, rank: int) -> Array:
    sizes = shard_sizes(value.shape[dim], ranks)
    return np.take(value, range(sum(sizes[:rank]), sum(sizes[: rank + 1])), axis=dim)


def spread(value: Array, layout: Layout, sizes: Sequence[int], random: np.random.Generator) -> Ranks:
    """What each rank holds of `value`: the definition of a layout, outermost axis first."""
    held: Ranks = {(): value}
    for placement, ranks in zip(layout, sizes, strict=True):
        parts: Ranks = {}
        for place, whole in held.items():
            terms = [random.integers(-9, 9, whole.shape).astype(float) for _ in range(ranks - 1)]
            terms.append(whole - sum(terms))
            for rank in range(ranks):
                if placement.kind == "S":
                    parts[(*place, rank)] = cut(whole, placement.dim or 0, ranks, rank)
                else:
                    parts[(*place, rank)] = terms[rank] if placement == P else whole
        held = parts
    return held


def joined(held: Ranks, layout: Layout, sizes: Sequence[int]) -> Array:
    """The whole value that the ranks hold, innermost axis first; copies must agree."""
    for placement, ranks in reversed(list(zip(layout, sizes, strict=True))):
        outer: Ranks = {}
        for place in sorted({place[:-1] for place in held}):
            parts = [held[(*place, rank)] for rank in range(ranks)]
            if placement.kind == "S":
                outer[place] = np.concatenate(parts, axis=placement.dim)
            elif placement == P:
                outer[place] = sum(parts[1:], parts[0])
            else:
                assert all(np.array_equal(part, parts[0]) for part in parts)
                outer[place] = parts[0]
        held = outer
    return held[()]


def run(held: Ranks, axis: int, ranks: int, source: Placement, target: Placement) -> Ranks:
    """One conversion, done by the process groups of `axis` alone."""
    result: Ranks = {}
    for place in held:
        group = [held[(*place[:axis], rank, *place[axis + 1 :])] for rank in range(ranks)]
        mine, rank = held[place], place[axis]
        name = conversion(source, target).forward
        if name == "all_gather":
            result[place] = np.concatenate(group, axis=source.dim)
        elif name == "all_reduce":
            result[place] = sum(group[1:], group[0])
        elif name == "reduce_scatter":
            result[place] = cut(sum(group[1:], group[0]), target.dim or 0, ranks, rank)
        elif name == "all_to_all":
            result[place] = cut(np.concatenate(group, axis=source.dim), target.dim or 0, ranks, rank)
        elif name == "slice":
            result[place] = cut(mine, target.dim or 0, ranks, rank)
        elif name == "mask":
            result[place] = mine if rank == 0 else np.zeros_like(mine)
        elif name == "pad":
            before = [part if index == rank else np.zeros_like(part) for index, part in enumerate(group)]
            result[place] = np.concatenate(before, axis=source.dim)
        else:
            result[place] = mine
    return result


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
@pytest.mark.parametrize("shape", [(12, 6), (5, 7)])
def test_sequences_turn_every_layout_into_every_other(sizes: tuple[int, int], shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    value = random.integers(-9, 9, shape).astype(float)
    graph = prices(sizes).graph(TensorType(shape, torch.float32, True))
    for source, target in itertools.product(layouts(2, 2), repeat=2):
        held = spread(value, source, sizes, random)
        here = source
        for step in steps(graph, source, target):
            assert step.before == here and step.before[step.axis] == step.source
            assert is_legal(here, step.axis, step.target)
            held, here = run(held, step.axis, sizes[step.axis], step.source, step.target), step.after
            assert all(part.shape == local_shape(shape, here, sizes, place) for place, part in held.items())
            np.testing.assert_array_equal(joined(held, here, sizes), value)
        assert here == target


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_illegal_steps_would_break_the_tensor(sizes: tuple[int, int]) -> None:
    """A cut of a dim that an inner axis cuts already leaves shards in another order, or of other sizes."""
    random = np.random.default_rng(0)
    value = np.arange(60.0).reshape(12, 5)
    illegal = 0
    for layout in layouts(2, 2):
        for axis, target in itertools.product(range(2), [I, R, P, S(0), S(1)]):
            if target == layout[axis] or is_legal(layout, axis, target):
                continue
            illegal += 1
            after = (*layout[:axis], target, *layout[axis + 1 :])
            held = run(spread(value, layout, sizes, random), axis, sizes[axis], layout[axis], target)
            try:
                survives = np.array_equal(joined(held, after, sizes), value)
            except (AssertionError, ValueError):  # copies that differ, pieces that do not fit together
                survives = False
            assert not survives, (layout, after)
    assert illegal == 16  # 2 dims x (3 others into S, S into 3 others, S into and from the other S)


# --- prices


def priced_steps(of: Prices, type: TensorType, layout: Layout) -> Iterator[tuple[Layout, float]]:
    """Every legal next layout and what the step costs, written down a second time from the table of conversions."""
    sizes = of.mesh.sizes

    def size(layout: Layout) -> float:
        return math.prod(local_shape(type.shape, layout, sizes)) * type.dtype.itemsize

    def seconds(name: str, axis: int, before: float, after: float) -> float:
        if name == "none":
            return 0.0
        if name in ("slice", "pad", "mask"):
            device = of.devices[0]
            return device.launch_overhead_s + 2 * after / device.memory_bandwidth_bytes_per_s / device.memory_efficiency
        return float(collective(name, of.shapes[axis], max(before, after)))

    for axis, target in itertools.product(range(len(layout)), [I, R, P, *map(S, range(len(type.shape)))]):
        if is_legal(layout, axis, target):
            after = (*layout[:axis], target, *layout[axis + 1 :])
            does = conversion(layout[axis], target)
            price = seconds(does.forward, axis, size(layout), size(after))
            if type.needs_grad:
                price += seconds(does.backward, axis, size(after), size(layout))
            yield after, price


def exhaustive(of: Prices, type: TensorType, source: Layout, length: int) -> dict[Layout, float]:
    """Least price of every layout over all sequences of at most `length` steps."""
    best: dict[Layout, float] = {}

    def visit(layout: Layout, price: float, left: int, seen: frozenset[Layout]) -> None:
        best[layout] = min(price, best.get(layout, math.inf))
        if left:
            for after, more in priced_steps(of, type, layout):
                if after not in seen:
                    visit(after, price + more, left - 1, seen | {after})

    visit(source, 0.0, length, frozenset({source}))
    return best


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("spec", ["4x2@A100-80GB", "1x4@cpu"])
def test_the_sequence_is_the_cheapest_of_all(needs_grad: bool, spec: str) -> None:
    of = prices((2, 2), spec)
    type = TensorType((4096, 4096), torch.float32, needs_grad)
    everything = layouts(2, 2)
    for source in everything[:: 3 if needs_grad else 6]:
        found = of.conversion_table(type, [source], everything)[0]
        best = exhaustive(of, type, source, 4)
        np.testing.assert_allclose(found, [best[target] for target in everything], rtol=1e-9, atol=1e-10)


def test_tables_and_single_conversions_agree() -> None:
    of = prices((2, 2, 4))
    type = TensorType((8, 6, 5), torch.bfloat16, True)
    some = layouts(3, 3)[::7]
    tables = of.conversion_tables(type, some, some)
    for (q, source), (p, target) in itertools.product(enumerate(some), repeat=2):
        one = of.conversion(type, source, target)
        assert tables.forward_s[q, p] == pytest.approx(one.forward_s, rel=1e-12)
        assert tables.backward_s[q, p] == pytest.approx(one.backward_s, rel=1e-12)
        assert int(tables.transient_bytes[q, p]) == one.transient_bytes
        assert bool(one.steps) == (source != target)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_prices_obey_the_triangle_inequality_and_grow_with_the_tensor(data: st.DataObject) -> None:
    of = prices((2, 4))
    rows = data.draw(st.integers(1, 8)) * 8
    small, large = TensorType((rows, 16), torch.float32, True), TensorType((2 * rows, 32), torch.float32, True)
    a, b, c = (data.draw(st.sampled_from(layouts(2, 2))) for _ in range(3))
    ab, bc, ac = (of.conversion(small, x, y).total_s for x, y in ((a, b), (b, c), (a, c)))
    assert ac <= ab + bc + 1e-9
    assert of.conversion(large, a, b).total_s >= ab - 1e-9


def test_axes_of_one_rank_are_free_and_take_no_steps() -> None:
    of = prices((1, 4, 1))
    type = TensorType((8, 8), torch.float32, True)
    free = of.conversion(type, (P, I, S(0)), (R, I, I))
    assert (free.steps, free.total_s) == ((), 0.0)
    (step,) = of.conversion(type, (P, P, S(0)), (R, S(1), I)).steps
    assert (step.axis, step.before, step.after) == (1, (R, P, I), (R, S(1), I))
    assert prices((1, 1)).conversion(type, (P, P), (I, I)).total_s == 0.0


def test_without_a_gradient_the_backward_costs_nothing() -> None:
    of = prices((4,))
    ids = TensorType((64, 64), torch.int64, False)
    assert of.conversion(ids, (I,), (R,)).total_s == 0.0
    assert of.conversion(ids, (S(0),), (I,)).backward_s == 0.0
    weight = TensorType((64, 64), torch.float32, True)
    reduced = of.conversion(weight, (I,), (R,))
    assert reduced.forward_s == 0.0
    assert reduced.backward_s == of.once(weight, (I,), (R,)).backward_s == of.collective_s("all_reduce", 0, 64 * 64 * 4)


def test_an_outer_cut_is_reached_by_undoing_the_inner_one() -> None:
    of = prices((2, 4))
    type = TensorType((64, 64), torch.float32, True)
    sequence = of.conversion(type, (S(0), S(0)), (I, S(0))).steps
    assert [step.axis for step in sequence] == [1, 0, 1]
    assert sequence[1].source == S(0) and sequence[1].target == I


def test_a_sum_over_two_axes_is_scattered_inside_the_node_first() -> None:
    of = prices((2, 8), "2x8@A100-80GB")
    type = TensorType((8, 2048, 4096), torch.bfloat16, False)
    names = [conversion(step.source, step.target).forward for step in of.conversion(type, (P, P), (I, I)).steps]
    assert names == ["reduce_scatter", "all_reduce", "all_gather"]


def test_uneven_shards_are_priced_by_the_largest() -> None:
    of = prices((4,))
    five, eight = (TensorType((size, 1 << 20), torch.float32, False) for size in (5, 8))
    price = of.conversion(five, (S(0),), (S(1),)).total_s
    assert 0 < price <= 1.02 * of.conversion(eight, (S(0),), (S(1),)).total_s
