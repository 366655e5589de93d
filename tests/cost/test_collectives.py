from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import parse_cluster
from autoshard.cost.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_shapes,
    collective,
    group_shapes,
    reduce_scatter,
    transfer,
)  # fmt: skip
from autoshard.plan import Mesh

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def whole(spec: str, ranks: int | None = None) -> tuple:  # type: ignore[type-arg]
    cluster = parse_cluster(spec)
    return group_shapes(cluster, [range(ranks or cluster.size)])


# Published times, bytes as in the formulas; see ml-engineering's network page (nccl-tests and all_reduce_bench), and
# the Galvatron profile for all_to_all on a node of the A100 class.
@pytest.mark.parametrize(
    ("name", "spec", "size", "published_s"),
    [
        ("all_reduce", "1x8@A100-80GB", 32768, 43.83e-6),
        ("all_reduce", "1x8@A100-80GB", 2097152, 101.4e-6),
        ("all_reduce", "1x8@A100-80GB", 268435456, 2420.6e-6),
        ("all_reduce", "1x8@A100-80GB", 17179869184, 127997e-6),
        ("all_reduce", "1x8@H200", 32768, 39.82e-6),
        ("all_reduce", "1x8@H200", 268435456, 1077e-6),
        ("all_reduce", "1x8@B200", 268435456, 727e-6),
        ("all_reduce", "4x8@H200", 4294967296, 22807e-6),
        ("all_gather", "1x8@H200", 17179869184, 41595e-6),
        ("reduce_scatter", "1x8@H200", 17179869184, 41423e-6),
        ("all_reduce", "1x2@MI300X", 4294967296, 90096e-6),
        ("all_reduce", "1x8@MI300X", 4294967296, 24020e-6),
        ("all_to_all", "1x8@A100-80GB", 134217728, 713.5e-6),
        ("all_to_all", "1x8@A100-80GB", 1073741824, 4815e-6),
    ],
)
def test_published_times_are_met_within_a_factor_of_two(name: str, spec: str, size: float, published_s: float) -> None:
    assert 0.5 < collective(name, whole(spec), float(size)) / published_s < 2


# Measured on an emulated network of 1 Gbit/s and 0.2 ms one way (a message takes 302 us): seconds of an empty
# collective, and a byte that a rank sends.
@pytest.mark.parametrize(
    ("name", "ranks", "empty_s", "sent_byte_s"),
    [
        ("all_reduce", 2, 1170e-6, 9.1e-9),
        ("all_gather", 2, 683e-6, 9.8e-9),
        ("all_reduce", 4, 3706e-6, 8.0e-9),
        ("all_gather", 4, 2306e-6, 8.6e-9),
        ("reduce_scatter", 4, 4088e-6, 16.4e-9),
        ("all_to_all", 4, 861e-6, 10.7e-9),
    ],
)
def test_gloo_as_measured(name: str, ranks: int, empty_s: float, sent_byte_s: float) -> None:
    (shape,) = whole(f"{ranks}x1@cpu")
    shape = replace(shape, between_latency_s=302e-6)
    empty = collective(name, [shape], 0.0)
    sent = (2 if name == "all_reduce" else 1) * (ranks - 1) / ranks
    assert empty == pytest.approx(empty_s, rel=0.2)
    assert (collective(name, [shape], 1e6) - empty) / 1e6 / sent == pytest.approx(sent_byte_s, rel=0.3)


def test_closed_forms_of_a_ring_in_one_node() -> None:
    (shape,) = whole("1x8@A100-80GB")
    size, bandwidth = 1e9, 300e9 * 0.78
    assert all_gather(shape, size) == pytest.approx(25e-6 + 7e-6 + 7 / 8 * size / bandwidth)
    assert all_reduce(shape, size) == pytest.approx(25e-6 + 14e-6 + 2 * 7 / 8 * size / bandwidth)
    assert reduce_scatter(shape, size) == all_gather(shape, size)
    assert all_to_all(shape, size) - all_to_all(shape, 0.0) == pytest.approx(7 / 8 * size / bandwidth)


def test_gloo_scatters_at_the_price_of_a_full_reduction() -> None:
    (shape,) = whole("1x4@cpu")
    assert reduce_scatter(shape, 1e6) == all_reduce(shape, 1e6)
    assert all_reduce(shape, 0.0) == pytest.approx(4 * 3 * 50e-6)


sizes = st.floats(0, 1e10)
specs = st.sampled_from(["1x8@A100-80GB", "2x8@A100-80GB", "4x3@H100-80GB", "2x5@cpu", "1x6@MI300X", "3x1@L4"])


@given(st.sampled_from(NAMES), specs, sizes, sizes)
def test_more_bytes_never_take_less_time(name: str, spec: str, first: float, second: float) -> None:
    small, large = sorted((first, second))
    assert collective(name, whole(spec), small) <= collective(name, whole(spec), large)


@given(st.sampled_from(NAMES), st.integers(2, 7), sizes)
def test_more_ranks_never_take_less_time_in_one_node(name: str, ranks: int, size: float) -> None:
    for spec in ("1x8@A100-80GB", "1x8@cpu"):
        fewer, more = (collective(name, whole(spec, count), size) for count in (ranks, ranks + 1))
        assert fewer <= more * (1 + 1e-12)


@given(st.sampled_from(NAMES), sizes)
def test_arrays_are_priced_as_numbers(name: str, size: float) -> None:
    shapes = whole("2x8@A100-80GB")
    assert collective(name, shapes, np.array([size, 0.0]))[0] == pytest.approx(collective(name, shapes, size))


def test_one_rank_is_free() -> None:
    assert all(collective(name, whole("1x1@cpu"), 1e9) == 0.0 for name in NAMES)


def test_axes_lie_in_the_cluster_as_the_mesh_says() -> None:
    cluster = parse_cluster("2x8@A100-80GB")
    mesh = Mesh(("dp", "tp"), (4, 4), tuple(range(16)))
    (tp,), (dp,) = axis_shapes(cluster, mesh, 1), axis_shapes(cluster, mesh, 0)
    assert (tp.nodes, tp.per_node, dp.nodes, dp.per_node) == (1, 4, 2, 2)
    # Four groups of two members a node share eight adapters: two each.
    assert dp.between_bandwidth == pytest.approx(2 * 25e9 * 0.9)


def test_groups_that_share_an_adapter_wait_for_each_other() -> None:
    cluster = parse_cluster("2x2@cpu")
    (alone,) = group_shapes(cluster, [(0, 2)])
    (shared,) = axis_shapes(cluster, Mesh(("dp", "tp"), (2, 2), (0, 1, 2, 3)), 0)
    assert shared.between_bandwidth == alone.between_bandwidth / 2
    (ring,) = group_shapes(cluster, [(0, 1, 2, 3)])
    assert ring.between_bandwidth == alone.between_bandwidth


def test_three_devices_a_node_give_groups_of_different_shapes() -> None:
    cluster = parse_cluster("2x3@A100-80GB")
    shapes = axis_shapes(cluster, Mesh(("dp", "tp"), (3, 2), tuple(range(6))), 1)
    assert {shape.nodes for shape in shapes} == {1, 2}
    assert collective("all_reduce", shapes, 1e8) == max(all_reduce(shape, 1e8) for shape in shapes)


def test_a_group_over_two_types_runs_at_the_slower_network() -> None:
    cluster = parse_cluster("1x4@A100-80GB+1x4@L4")
    (shape,) = group_shapes(cluster, [range(8)])
    assert shape.nodes == 2 and shape.between_bandwidth == pytest.approx(12.5e9 * 0.9)
    assert shape.inside_bandwidth == pytest.approx(31e9 * 0.78)


def test_transfers_between_nodes_share_adapters_and_stay_cheap_inside() -> None:
    cluster = parse_cluster("2x4@cpu")
    inside = transfer(cluster, [(0, 1), (2, 3)], 1e6)
    one = transfer(cluster, [(0, 4)], 1e6)
    four = transfer(cluster, [(rank, rank + 4) for rank in range(4)], 1e6)
    assert inside < one < four
    assert four - one == pytest.approx(3 * 1e6 / 0.125e9)
    assert transfer(cluster, [(1, 1)], 1e9) == 0.0
