"""The machines a plan is for: groups of equal nodes, their devices and the links inside and between nodes.

    parse_cluster("2x8@A100-80GB")      nodes x devices @ type; several groups are joined by "+"
    parse_cluster("cluster.toml")       a file, as `to_toml` writes it

Devices are numbered node by node, group by group. Known types are listed in cost/catalogue.toml (data-sheet facts) and
cost/coefficients.toml (how much of them programs reach); a file may override any field or describe a type of its own.
"""

import difflib
import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from autoshard.errors import BadCluster

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Backend = Literal["nccl", "gloo"]
DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


@dataclass(frozen=True)
class Device:
    """One device type.

    peak_flops: (dtype name, operations a second) pairs; a type without an entry runs at the float32 rate, float64 at
        half of it.
    processors: streaming multiprocessors, compute units or cores that share a matrix multiplication.
    """

    type: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    processors: int = 1
    backend: Backend = "nccl"
    matmul_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    launch_overhead_s: float = 4e-6
    collective_overhead_s: float = 25e-6

    def flops(self, dtype: str) -> float:
        """Peak operations a second for a dtype's name, "bfloat16"."""
        peaks = dict(self.peak_flops)
        if dtype in peaks:
            return peaks[dtype]
        if dtype.startswith("float8") and "float8" in peaks:
            return peaks["float8"]
        return peaks["float32"] / (2 if dtype in ("float64", "complex128") else 1)


@dataclass(frozen=True)
class Link:
    """What connects devices: latency of one message and bandwidth in one direction.

    Inside a node, bandwidth is that of one device, and of any two devices alone `pair_bandwidth_bytes_per_s` if given
    (a mesh without a switch). Between nodes, bandwidth is that of one adapter and a node has `lanes` of them.
    efficiency: share of the bandwidth that large transfers reach.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    efficiency: float = 1.0
    lanes: int = 1
    pair_bandwidth_bytes_per_s: float | None = None

    def reached(self, members: int = 2) -> float:
        """Bytes a second that each of `members` devices of one node reaches when they all exchange."""
        bandwidth = self.bandwidth_bytes_per_s
        if self.pair_bandwidth_bytes_per_s is not None:
            bandwidth = min(bandwidth, self.pair_bandwidth_bytes_per_s * max(1, members - 1))
        return bandwidth * self.efficiency


@dataclass(frozen=True)
class DeviceGroup:
    """`nodes` equal nodes of `devices_per_node` devices."""

    device: Device
    devices_per_node: int
    nodes: int
    inside: Link
    between: Link


@dataclass(frozen=True)
class Cluster:
    """Groups of nodes. memory_limit_bytes: plan for at most this much memory on every device."""

    groups: tuple[DeviceGroup, ...]
    memory_limit_bytes: int | None = None

    @cached_property
    def _places(self) -> tuple[tuple[DeviceGroup, int], ...]:
        places, node = [], 0
        for group in self.groups:
            for _ in range(group.nodes):
                places += [(group, node)] * group.devices_per_node
                node += 1
        return tuple(places)

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(group.nodes * group.devices_per_node for group in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device, numbered node by node."""
        return tuple(group.device for group, _ in self._places)

    def group(self, rank: int) -> DeviceGroup:
        """The group a device belongs to."""
        return self._places[rank][0]

    def node(self, rank: int) -> int:
        """The node a device sits in."""
        return self._places[rank][1]

    def memory_bytes(self, rank: int) -> int:
        """Memory a plan may use on a device."""
        own = self.group(rank).device.memory_bytes
        return own if self.memory_limit_bytes is None else min(own, self.memory_limit_bytes)

    def link(self, first: int, second: int) -> Link:
        """The link between two devices; between groups the slower of the two networks."""
        (one, node_one), (two, node_two) = self._places[first], self._places[second]
        return one.inside if node_one == node_two else slower(one.between, two.between)

    def with_memory_limit(self, limit_bytes: int | None) -> "Cluster":
        """The same cluster, planned for at most `limit_bytes` on every device."""
        if limit_bytes is not None and limit_bytes <= 0:
            raise BadCluster(f"memory limit is {limit_bytes}", help="give a number of bytes above 0")
        return replace(self, memory_limit_bytes=limit_bytes)

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that change when anything a plan depends on changes."""
        return hashlib.sha256(to_toml(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        text = "+".join(f"{group.nodes}x{group.devices_per_node}@{group.device.type}" for group in self.groups)
        return text if self.memory_limit_bytes is None else f"{text}, {self.memory_limit_bytes} bytes each"


def slower(first: Link, second: Link) -> Link:
    """A link no faster than either, in latency, bandwidth and lanes."""
    thin = min(first, second, key=lambda link: link.bandwidth_bytes_per_s * link.efficiency)
    latency_s, lanes = max(first.latency_s, second.latency_s), min(first.lanes, second.lanes)
    return replace(thin, latency_s=latency_s, lanes=lanes)


_SPEC = re.compile(r"\s*(\d+)\s*[xX]\s*(\d+)\s*@\s*(\S+)\s*")
_SPEC_HELP = 'write NODESxDEVICES@TYPE, for example "2x8@A100-80GB" or "1x4@cpu", or the path of a TOML file'


def parse_cluster(spec: str | Path) -> Cluster:
    """The cluster that a text ("2x8@A100-80GB", joined by "+" for several groups) or a TOML file describes.

    Raises BadCluster naming file, field and what is allowed.
    """
    text = str(spec)
    if isinstance(spec, Path) or text.endswith(".toml") or Path(text).is_file():
        return _read_file(Path(spec))
    return Cluster(tuple(_parse_group(part, text) for part in text.split("+")))


def device_types() -> tuple[str, ...]:
    """Names of the known device types, without their aliases."""
    return tuple(_catalogue())


def _parse_group(text: str, whole: str) -> DeviceGroup:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise BadCluster(f"'{text}' is not a cluster", where=f"cluster '{whole}'", help=_SPEC_HELP)
    nodes, count = int(match[1]), int(match[2])
    for number, name in ((nodes, "nodes"), (count, "devices per node")):
        if number < 1:
            raise BadCluster(f"{name} is {number}", where=f"cluster '{whole}'", help=f"{name} must be 1 or more")
    known = _known(match[3])
    if known is None:
        raise BadCluster(f"'{match[3]}' is not a device type", where=f"cluster '{whole}'", help=_near(match[3]))
    return _group(known, {}, nodes, count, whole)


def _read_file(path: Path) -> Cluster:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCluster(f"cannot read {path}: {error.strerror}", help=_SPEC_HELP) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadCluster(f"not a TOML file: {error}", where=str(path)) from error
    return cluster_from_table(table, str(path))


def cluster_from_table(table: Mapping[str, Any], file: str) -> Cluster:
    """A cluster from the parsed tables of a cluster file; `file` names it in messages."""
    _only(table, ("groups", "memory_limit_bytes"), file, "")
    groups = table.get("groups")
    if not isinstance(groups, list) or not groups or not all(isinstance(entry, dict) for entry in groups):
        raise BadCluster("there are no device groups", where=f"{file}, groups", help="add one [[groups]] table or more")
    read = tuple(_read_group(entry, file, f"groups[{index}].") for index, entry in enumerate(groups))
    limit = table.get("memory_limit_bytes")
    return Cluster(read, None if limit is None else int(_number(limit, file, "memory_limit_bytes", above=True)))


def _read_group(table: Mapping[str, Any], file: str, prefix: str) -> DeviceGroup:
    _only(table, ("type", "nodes", "devices_per_node", "device", "inside", "between"), file, prefix)
    for name in ("type", "nodes", "devices_per_node"):
        if name not in table:
            raise BadCluster(f"field '{name}' is missing", where=f"{file}, {prefix}{name}", help=_ALLOWED[name])
    kind = table["type"]
    if not isinstance(kind, str) or not kind:
        raise BadCluster(f"type is {kind!r}", where=f"{file}, {prefix}type", help=_ALLOWED["type"])
    for name in ("device", "inside", "between"):
        if not isinstance(table.get(name, {}), dict):
            raise BadCluster(f"{name} is not a table", where=f"{file}, {prefix}{name}", help=f"write [groups.{name}]")
    known = _known(kind)
    if known is None and "device" not in table:
        way_out = f"{_near(kind)}, or describe it in [groups.device]"
        raise BadCluster(f"'{kind}' is not a device type", where=f"{file}, {prefix}type", help=way_out)
    entry = known or (kind, {})
    nodes, count = (_whole(table[name], file, f"{prefix}{name}") for name in ("nodes", "devices_per_node"))
    return _group(entry, table, nodes, count, file, prefix)


def _group(
    known: tuple[str, Mapping[str, Any]], given: Mapping[str, Any], nodes: int, count: int, file: str, prefix: str = ""
) -> DeviceGroup:
    name, facts = known
    device = {key: facts[key] for key in _DEVICE_FIELDS if key in facts} | dict(given.get("device", {}))
    where = f"{prefix}device."
    _only(device, _DEVICE_FIELDS, file, where)
    read: dict[str, Any] = {"type": name}
    for key in _DEVICE_FIELDS:
        if key in device:
            read[key] = _device_field(key, device[key], file, f"{where}{key}")
        elif key in ("peak_flops", "memory_bytes", "memory_bandwidth_bytes_per_s"):
            raise BadCluster(f"field '{key}' is missing", where=f"{file}, {where}{key}", help=_ALLOWED[key])
    links = {
        side: _link(dict(facts.get(side, {})) | dict(given.get(side, {})), file, f"{prefix}{side}.", side, nodes, count)
        for side in ("inside", "between")
    }
    return DeviceGroup(Device(**read), count, nodes, **links)


def _link(table: Mapping[str, Any], file: str, prefix: str, side: str, nodes: int, count: int) -> Link:
    _only(table, _LINK_FIELDS, file, prefix)
    if not table and (count if side == "inside" else nodes) == 1:
        return Link(0.0, 1e12)  # nothing to connect
    read: dict[str, Any] = {}
    for key in _LINK_FIELDS:
        if key not in table:
            if key in ("latency_s", "bandwidth_bytes_per_s"):
                raise BadCluster(f"field '{key}' is missing", where=f"{file}, {prefix}{key}", help=_ALLOWED[key])
        elif key == "lanes":
            read[key] = _whole(table[key], file, f"{prefix}{key}")
        elif key == "efficiency":
            read[key] = _share(table[key], file, f"{prefix}{key}")
        else:
            read[key] = _number(table[key], file, f"{prefix}{key}", above=key != "latency_s")
    return Link(**read)


def _device_field(key: str, value: Any, file: str, where: str) -> Any:
    if key == "peak_flops":
        if not isinstance(value, dict) or "float32" not in value:
            raise BadCluster("peak_flops lacks float32", where=f"{file}, {where}", help=_ALLOWED["peak_flops"])
        _only(value, DTYPES, file, f"{where}.")
        given = [name for name in DTYPES if name in value]
        return tuple((name, _number(value[name], file, f"{where}.{name}", above=True)) for name in given)
    if key == "processors":
        return _whole(value, file, where)
    if key == "backend":
        if value not in ("nccl", "gloo"):
            raise BadCluster(f"backend is {value!r}", where=f"{file}, {where}", help=_ALLOWED["backend"])
        return value
    if key.endswith("_efficiency"):
        return _share(value, file, where)
    number = _number(value, file, where, above=not key.endswith("_overhead_s"))
    return int(number) if key == "memory_bytes" else number


def _number(value: Any, file: str, where: str, *, above: bool) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not (0 < value < float("inf") if above else 0 <= value < float("inf")):
        allowed = "a number above 0" if above else "a number, 0 or more"
        raise _refusal(value, file, where, f"give {allowed}")
    return float(value)


def _share(value: Any, file: str, where: str) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= 1:
        raise _refusal(value, file, where, "give a number above 0, at most 1")
    return float(value)


def _whole(value: Any, file: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _refusal(value, file, where, "give a whole number, 1 or more")
    return value


def _refusal(value: Any, file: str, where: str, allowed: str) -> BadCluster:
    return BadCluster(f"{where.rsplit('.', 1)[-1]} is {value!r}", where=f"{file}, {where}", help=allowed)


def _only(table: Mapping[str, Any], allowed: tuple[str, ...], file: str, prefix: str) -> None:
    for key in table:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            hint = (f"did you mean '{near[0]}'? " if near else "") + f"allowed: {', '.join(allowed)}"
            raise BadCluster(f"field '{key}' is unknown", where=f"{file}, {prefix}{key}", help=hint)


_DEVICE_FIELDS = tuple(field.name for field in fields(Device) if field.name != "type")
_LINK_FIELDS = tuple(field.name for field in fields(Link))
_ALLOWED: Mapping[str, str] = {
    "type": 'give a device type, for example type = "A100-80GB"',
    "nodes": "give a whole number, 1 or more",
    "devices_per_node": "give a whole number, 1 or more",
    "peak_flops": "give operations a second by dtype: peak_flops = { float32 = 19.5e12, bfloat16 = 312e12 }",
    "memory_bytes": "give a number above 0, for example memory_bytes = 80e9",
    "memory_bandwidth_bytes_per_s": "give a number above 0, for example memory_bandwidth_bytes_per_s = 2039e9",
    "backend": 'give "nccl" or "gloo"',
    "latency_s": "give seconds, 0 or more, for example latency_s = 5e-6",
    "bandwidth_bytes_per_s": "give a number above 0, for example bandwidth_bytes_per_s = 25e9",
}


def _load(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("autoshard.cost").joinpath(name).read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def _catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Known types with facts and coefficients joined, shaped as a group's tables."""
    coefficients = _load("coefficients.toml")
    known: dict[str, Mapping[str, Any]] = {}
    for name, facts in _load("catalogue.toml")["devices"].items():
        own = coefficients["default"] | coefficients["devices"].get(name, {})
        entry = facts | {key: value for key, value in own.items() if key in _DEVICE_FIELDS}
        for side in ("inside", "between"):
            entry[side] = facts[side] | {"efficiency": own[f"{side}_efficiency"]}
        known[name] = entry
    return known


def _known(name: str) -> tuple[str, Mapping[str, Any]] | None:
    wanted = name.lower()
    for known, facts in _catalogue().items():
        if wanted in (known.lower(), *(alias.lower() for alias in facts["aliases"])):
            return known, facts
    return None


def _near(name: str) -> str:
    spelt = {word.lower(): word for known, facts in _catalogue().items() for word in (known, *facts["aliases"])}
    near = [spelt[word] for word in difflib.get_close_matches(name.lower(), spelt, 4, 0.4)]
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known types: {', '.join(_catalogue())}"


def to_toml(cluster: Cluster) -> str:
    """A cluster file with every field written out; `parse_cluster` reads the same cluster back."""
    lines = [f"# {cluster}"]
    if cluster.memory_limit_bytes is not None:
        lines.append(f"memory_limit_bytes = {cluster.memory_limit_bytes}")
    for group in cluster.groups:
        lines += ["", "[[groups]]", f'type = "{group.device.type}"', f"nodes = {group.nodes}"]
        lines += [f"devices_per_node = {group.devices_per_node}", "", "[groups.device]"]
        lines += [f"{key} = {_toml_value(getattr(group.device, key))}" for key in _DEVICE_FIELDS]
        for side, link in (("inside", group.inside), ("between", group.between)):
            lines += ["", f"[groups.{side}]"]
            values = {key: getattr(link, key) for key in _LINK_FIELDS}
            lines += [f"{key} = {_toml_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "{ " + ", ".join(f"{name} = {float(number)!r}" for name, number in value) + " }"
    return f'"{value}"' if isinstance(value, str) else repr(value)
