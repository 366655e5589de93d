import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.cluster import Cluster, device_types, parse_cluster, slower, to_toml
from autoshard.errors import BadCluster

OWN_TYPE = """
[[groups]]
type = "fast"
nodes = 1
devices_per_node = 3
[groups.device]
peak_flops = { float32 = 20e12, bfloat16 = 100e12 }
memory_bytes = 80e9
memory_bandwidth_bytes_per_s = 1e12
[groups.inside]
latency_s = 1e-6
bandwidth_bytes_per_s = 100e9
"""


@pytest.mark.parametrize(
    ("spec", "type", "nodes", "count"),
    [
        ("2x8@A100-80GB", "A100-SXM-80GB", 2, 8),
        ("1x4@cpu", "cpu", 1, 4),
        ("8x8@H100-80GB", "H100-SXM-80GB", 8, 8),
        ("2x3@a100", "A100-SXM-80GB", 2, 3),
        (" 1 x 6 @ L4 ", "L4", 1, 6),
    ],
)
def test_specs(spec: str, type: str, nodes: int, count: int) -> None:
    (group,) = parse_cluster(spec).groups
    assert (group.device.type, group.nodes, group.devices_per_node) == (type, nodes, count)


def test_devices_are_numbered_node_by_node_over_groups() -> None:
    cluster = parse_cluster("2x3@A100-80GB+1x2@L4")
    assert cluster.size == 8 == len(cluster.devices)
    assert [cluster.node(rank) for rank in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [device.type for device in cluster.devices[5:7]] == ["A100-SXM-80GB", "L4"]
    inside, network = cluster.link(0, 2), cluster.link(0, 3)
    assert inside.bandwidth_bytes_per_s == 300e9 and network.bandwidth_bytes_per_s == 25e9
    mixed = cluster.link(0, 7)
    assert mixed == slower(cluster.groups[0].between, cluster.groups[1].between)
    assert mixed.bandwidth_bytes_per_s == 12.5e9


@given(
    st.lists(st.tuples(st.sampled_from(device_types()), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3)
)
def test_files_read_back_what_was_written(groups: list[tuple[str, int, int]]) -> None:
    cluster = parse_cluster("+".join(f"{nodes}x{count}@{type}" for type, nodes, count in groups))
    assert cluster.size == sum(nodes * count for _, nodes, count in groups)
    again = _parse(to_toml(cluster))
    assert again == cluster and again.fingerprint == cluster.fingerprint


def _parse(text: str) -> Cluster:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        return parse_cluster(file.name)


def test_a_file_may_describe_its_own_type_and_leave_out_links_to_nothing() -> None:
    cluster = _parse(OWN_TYPE)
    assert cluster.devices[0].flops("bfloat16") == 100e12
    assert cluster.devices[0].flops("float64") == 10e12
    assert cluster.memory_bytes(0) == 80_000_000_000


def test_memory_limit_lowers_and_never_raises_memory() -> None:
    cluster = parse_cluster("1x2@A100-80GB")
    assert cluster.with_memory_limit(10**9).memory_bytes(1) == 10**9
    assert cluster.with_memory_limit(10**12).memory_bytes(1) == 80 * 10**9
    assert cluster.with_memory_limit(10**9).fingerprint != cluster.fingerprint
    assert _parse(to_toml(cluster.with_memory_limit(10**9))).memory_limit_bytes == 10**9
    with pytest.raises(BadCluster, match="memory limit is 0"):
        cluster.with_memory_limit(0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("2x8", ["'2x8' is not a cluster", "NODESxDEVICES@TYPE"]),
        ("", ["is not a cluster"]),
        ("0x8@cpu", ["nodes is 0", "1 or more"]),
        ("2x0@cpu", ["devices per node is 0"]),
        ("-1x8@cpu", ["is not a cluster"]),
        ("1x8@A100-8GB", ["'A100-8GB' is not a device type", "did you mean", "A100-80GB"]),
        ("1x8@zzzzzz", ["known types", "cpu"]),
        ("missing.toml", ["cannot read missing.toml"]),
    ],
)
def test_bad_specs(spec: str, words: list[str]) -> None:
    with pytest.raises(BadCluster) as caught:
        parse_cluster(spec)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[groups]]", "[groups]", ["no device groups", "[[groups]]"]),
        ('type = "fast"', "", ["field 'type' is missing", "groups[0].type"]),
        ('type = "fast"', "type = 3", ["type is 3"]),
        ("nodes = 1", "", ["field 'nodes' is missing", "whole number"]),
        ("nodes = 1", "nodes = -2", ["nodes is -2", "groups[0].nodes"]),
        ("nodes = 1", "nodes = true", ["nodes is True"]),
        ("nodes = 1", "nodes = 1.5", ["nodes is 1.5"]),
        ("nodes = 1", "nodes = 1\nnode = 2", ["field 'node' is unknown", "did you mean 'nodes'"]),
        ("nodes = 1", "nodes = 2", ["field 'latency_s' is missing", "groups[0].between.latency_s"]),
        ("memory_bytes = 80e9", "", ["field 'memory_bytes' is missing", "groups[0].device.memory_bytes"]),
        ("memory_bytes = 80e9", "memory_bytes = -1", ["memory_bytes is -1", "above 0"]),
        ("memory_bytes = 80e9", 'memory_bytes = "80GB"', ["memory_bytes is '80GB'"]),
        ("memory_bytes = 80e9", "memory_bytes = inf", ["memory_bytes is inf"]),
        ("memory_bytes = 80e9", "memory_bytes = 80e9\nram = 1", ["field 'ram' is unknown", "allowed: peak_flops"]),
        (
            "memory_bytes = 80e9",
            "memory_bytes = 80e9\nmatmul_efficiency = 1.2",
            ["matmul_efficiency is 1.2", "at most 1"],
        ),
        ("memory_bytes = 80e9", 'memory_bytes = 80e9\nbackend = "mpi"', ["backend is 'mpi'", '"gloo"']),
        ("float32 = 20e12, ", "", ["peak_flops lacks float32"]),
        ("bfloat16", "bf16", ["field 'bf16' is unknown", "groups[0].device.peak_flops.bf16"]),
        ("float32 = 20e12", "float32 = 0", ["float32 is 0"]),
        ("latency_s = 1e-6", "latency_s = -1", ["latency_s is -1", "0 or more", "groups[0].inside.latency_s"]),
        ("bandwidth_bytes_per_s = 100e9", "bandwidth_bytes_per_s = 0", ["bandwidth_bytes_per_s is 0"]),
        ("bandwidth_bytes_per_s = 100e9", "", ["field 'bandwidth_bytes_per_s' is missing"]),
        ("[groups.inside]", "[groups.link]", ["field 'link' is unknown", "inside"]),
        ("[[groups]]", "memory_limit_bytes = 0\n[[groups]]", ["memory_limit_bytes is 0"]),
        ("[[groups]]", "= 3\n[[groups]]", ["not a TOML file"]),
    ],
)
def test_bad_files_name_file_field_and_what_is_allowed(old: str, new: str, words: list[str]) -> None:
    assert old in OWN_TYPE
    with pytest.raises(BadCluster) as caught:
        _parse(OWN_TYPE.replace(old, new, 1))
    assert ".toml" in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_unknown_type_without_description_is_refused() -> None:
    with pytest.raises(BadCluster, match="H100-80GB"):
        _parse('[[groups]]\ntype = "H100-8GB"\nnodes = 1\ndevices_per_node = 8\n')


def test_every_known_type_is_complete() -> None:
    for type in device_types():
        device = parse_cluster(f"2x2@{type}").devices[0]
        assert device.flops("float32") > 0 and device.memory_bytes > 10**9
