"""Facts about a program and its chain that the inter-operator pass reads."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from autoshard.cluster import Cluster
from autoshard.errors import BadInput
from autoshard.passes.inter_options import PlanOptions
from autoshard.passes.inter_prices import DATA_AXIS
from autoshard.passes.inter_sites import Sites
from autoshard.passes.intra_op import ChainSolution, Pin
from autoshard.passes.segment import Chain
from autoshard.placement import I, Layout, S, local_shape, parse_placement
from autoshard.plan import Mesh
from autoshard.program import Program, TensorType, Value, operand_values, result_types
from autoshard.rules import AxisStrategy


@dataclass(frozen=True)
class Setting:
    """The program to plan.

    samples: where samples lie in every value, None where operators couple them. counts: microbatch counts to try.
    cuts: segments that must begin a stage. deadline: on time.monotonic's clock, when the search ends with what it
    has. solutions: of the integer program on inner axes, shared by all searches.
    """

    program: Program
    chain: Chain
    sites: Sites
    samples: Mapping[str, AxisStrategy] | None
    batch: int
    counts: tuple[int, ...]
    cuts: frozenset[int]
    notes: tuple[str, ...]
    deadline: float
    solutions: dict[tuple[object, ...], ChainSolution | None] = field(default_factory=dict, repr=False, compare=False)

    def is_late(self) -> bool:
        """Whether the time for searching is over."""
        return time.monotonic() >= self.deadline

    def entering(self, start: int, stop: int) -> tuple[Value, ...]:
        """Values that segments [start, stop) read and earlier segments make."""
        earlier = self._made_before(start)
        return tuple(value for value in self._read(start, stop) if value.node in earlier)

    def leaving(self, start: int, stop: int) -> tuple[Value, ...]:
        """Values that segments [start, stop) make and later segments read."""
        made = self._made_before(stop) - self._made_before(start)
        return tuple(value for value in self._read(stop, len(self.chain.segments)) if value.node in made)

    def shared(self, start: int, stop: int) -> tuple[str, ...]:
        """Names of parameters that segments [start, stop) use and earlier segments use too."""
        before = {value.node for value in self._read(0, start)}
        mine = dict.fromkeys(value.node for value in self._read(start, stop))
        known = self.program.parameters
        return tuple(known[node].name for node in mine if node in before and node in known)

    def whole(self, value: Value, mesh: Mesh) -> Layout:
        """The layout of a value that crosses between stages of different meshes: split by samples on dp, else whole."""
        strategy = (self.samples or {}).get(value.node)
        placement = strategy.results[value.index] if strategy is not None else I
        split = S(placement.dim) if placement.dim is not None else I
        return tuple(
            split if axis == DATA_AXIS and size > 1 else I for axis, size in zip(mesh.axes, mesh.sizes, strict=True)
        )

    def part_type(self, value: Value, microbatches: int) -> TensorType:
        """Type of a value in one microbatch."""
        type_ = result_types(self._nodes[value.node])[value.index]
        strategy = (self.samples or {}).get(value.node)
        if strategy is None or microbatches == 1:
            return type_
        return replace(type_, shape=local_shape(type_.shape, (strategy.results[value.index],), (microbatches,)))

    def _read(self, start: int, stop: int) -> list[Value]:
        names = (name for segment in self.chain.segments[start:stop] for name in segment.nodes)
        return list(dict.fromkeys(value for name in names for value in operand_values(self._nodes[name])))

    def _made_before(self, number: int) -> set[str]:
        return {name for segment in self.chain.segments[:number] for name in segment.nodes}

    @cached_property
    def _nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.program.graph.nodes}


def batch_size(program: Program) -> int:
    """Samples of the global batch. Raises BadInput where inputs disagree; 1 where no input has samples."""
    sizes = {
        given.name: given.type.shape[given.batch_dim]
        for given in program.inputs.values()
        if given.batch_dim is not None
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name} has {size}" for name, size in sizes.items())
        raise BadInput(f"inputs have different numbers of samples: {listed}")
    return next(iter(sizes.values()), 1)


def beginnings(program: Program, chain: Chain) -> tuple[frozenset[str], ...]:
    """For each segment, paths of the modules whose first operator is in it and is its first."""
    nodes, seen = {node.name: node for node in program.graph.nodes}, {""}
    found = []
    for segment in chain.segments:
        first = True
        begun: set[str] = set()
        for name in segment.nodes:
            paths = {frame.path for frame in nodes[name].meta.get("frames", ())}
            if first:
                begun = paths - seen
            seen |= paths
            first = False
        found.append(frozenset(begun))
    return tuple(found)


def parse_pins(pins: Mapping[str, str]) -> tuple[Pin, ...]:
    """Read {"model.layers.*.weight": "S(0)@tp"}; several axes are separated by commas."""
    found = []
    for pattern, text in pins.items():
        for part in text.split(","):
            placement, at, axis = part.strip().partition("@")
            if not at or not axis:
                raise BadInput(f"'{part.strip()}' names no axis", where=f"pin {pattern}", help="write S(0)@tp")
            found.append(Pin(pattern, parse_placement(placement), axis))
    return tuple(found)


def fingerprints(program: Program, cluster: Cluster) -> dict[str, str]:
    """What a plan belongs to: "model" (graph and parameters), "workload" (inputs), "cluster", "torch"."""

    def digest(lines: list[str]) -> str:
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]

    parameters = [f"{p.name} {p.aliases} {p.type} {p.trainable}" for p in program.parameters.values()]
    buffers = [f"{b.name} {b.type} {b.updated_by}" for b in program.buffers.values()]
    graph = [f"{node.op} {node.name} {_called(node.target)} {node.args} {node.kwargs}" for node in program.graph.nodes]
    inputs = [f"{given.name} {given.type} {given.batch_dim}" for given in program.inputs.values()]
    return {
        "model": digest(parameters + buffers + graph),
        "workload": digest(inputs),
        "cluster": cluster.fingerprint,
        "torch": str(torch.__version__),
    }


def _called(target: object) -> str:
    """What a node calls, without the address that Python functions print."""
    return str(target) if isinstance(target, (str, torch._ops.OpOverload)) else getattr(target, "__name__", str(target))


def check_pinned_axes(options: PlanOptions) -> None:
    """Refuse pins on axes that the fixed mesh lacks."""
    if options.mesh is None:
        return
    for pin in parse_pins(options.pins):
        if pin.axis not in dict(options.mesh):
            axes = ", ".join(axis for axis, _ in options.mesh)
            raise BadInput(f"pin {pin} names axis '{pin.axis}'", help=f"axes of the mesh: {axes}")
