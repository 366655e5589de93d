"""What cannot be asked for is refused with the numbers that do not go together."""

import pytest

from autoshard.cluster import parse_cluster
from autoshard.errors import BadInput
from autoshard.passes.inter_options import PlanOptions, check_options, cut_segments, format_mesh, parse_mesh
from autoshard.passes.inter_sites import Sites, settled

DP4 = (("dp", 4),)


def test_meshes_are_read_and_written() -> None:
    assert parse_mesh("dp=2,tp=4") == (("dp", 2), ("tp", 4))
    assert parse_mesh("dp=2, cp=1, tp=2") == (("dp", 2), ("cp", 1), ("tp", 2))
    assert format_mesh(parse_mesh("dp=2,tp=4")) == "dp=2,tp=4"
    assert format_mesh(()) == "one device"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp", "'dp' is not a mesh axis"),
        ("dp=0", "'dp=0' is not a mesh axis"),
        ("dp=2,dp=2", "axis dp is named twice"),
        ("dp=-1", "is not a mesh axis"),
    ],
)
def test_bad_meshes(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": "zigzag"}, "'zigzag' is not a schedule"),
        ({"stages": 0}, "stages is 0"),
        ({"microbatches": -1}, "microbatches is -1"),
        ({"memory_limit_bytes": 0}, "memory limit is 0"),
        ({"time_limit_s": -1.0}, "time limit is -1.0"),
    ],
)
def test_bad_values(given: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        PlanOptions(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(stages=5), "5 stages, but the model has 3 segments"),
        (PlanOptions(mesh=(("dp", 3),)), "mesh dp=3 has 3 devices, which does not divide the cluster's 8"),
        (PlanOptions(mesh=DP4, stages=3), "3 stages of mesh dp=4 need 12 devices; the cluster has 8"),
        (PlanOptions(mesh=DP4, microbatches=4), "a batch of 8 cannot be divided by 4 microbatches x dp=4 = 16"),
        (PlanOptions(microbatches=3), "a batch of 8 cannot be divided by 3 microbatches = 3"),
        (PlanOptions(stages=1, cut_before=("a",)), r"1 cuts \(a\) make more than 1 stages"),
    ],
)
def test_numbers_that_do_not_go_together(options: PlanOptions, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check_options(options, devices=8, segments=3, batch=8)


def test_cuts_are_found_by_module_path() -> None:
    beginnings = [frozenset({"", "embed"}), frozenset({"layers.0", "layers.0.norm"}), frozenset({"layers.1"})]
    assert cut_segments(PlanOptions(cut_before=("layers.1",)), beginnings) == {2}
    with pytest.raises(BadInput, match=r"'layers.7' does not begin a segment") as caught:
        cut_segments(PlanOptions(cut_before=("layers.7",)), beginnings)
    assert "layers.0, layers.0.norm, layers.1" in str(caught.value)
    with pytest.raises(BadInput, match="after the first"):
        cut_segments(PlanOptions(cut_before=("embed",)), beginnings)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8x8@H100-80GB", (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        ("2x3@A100-80GB", (1, 3, 6)),
        ("1x6@cpu", (1, 2, 3, 6)),
        ("4x1@cpu", (1, 2, 3, 4)),
        ("1x4@H100-80GB+1x4@A100-80GB", (1, 2, 4, 8)),
    ],
)
def test_submeshes_are_divisors_of_a_node_or_whole_nodes(text: str, sizes: tuple[int, ...]) -> None:
    assert Sites(parse_cluster(text)).sizes == sizes


def test_places_are_the_last_of_each_kind() -> None:
    mixed = Sites(parse_cluster("1x4@H100-80GB+1x4@A100-80GB"))
    assert mixed.places(8, 2) == (6, 2)
    assert mixed.places(7, 2) == (5, 2)
    assert mixed.places(1, 2) == ()
    across = Sites(parse_cluster("2x3@cpu"), (("dp", 2),))
    assert across.sizes == (2,)
    assert across.places(6, 2) == (4,)


def test_idle_devices_are_the_last() -> None:
    sites = Sites(parse_cluster("2x8@cpu"))
    assert settled([(12, 2), (14, 2)], sites) == (0, 2)
    assert settled([(6, 2), (8, 4), (12, 4)], sites) == (0, 8, 12)
    assert settled([(15, 1)], sites) == (0,)
    mixed = Sites(parse_cluster("1x4@H100-80GB+1x4@A100-80GB"))
    assert settled([(6, 2)], mixed) == (6,)


def test_inner_axes_stay_inside_a_node_unless_asked_for() -> None:
    sites = Sites(parse_cluster("2x4@cpu"))
    assert (("tp", 8),) not in sites.shapes(8)
    assert set(sites.shapes(8)) == {(("dp", 8),), (("dp", 4), ("tp", 2)), (("dp", 2), ("tp", 4))}
    assert Sites(parse_cluster("2x4@cpu"), (("tp", 8),)).shapes(8) == ((("tp", 8),),)
