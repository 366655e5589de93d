"""Seconds of everything a plan does on one mesh: operators, conversions, transfers between stages, the optimizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autoshard.cluster import Cluster, Device
from autoshard.cost.collectives import Floats, GroupShape, axis_shapes, collective, transfer
from autoshard.cost.compute import operator_seconds
from autoshard.cost.convert import ConversionPrice, ConversionTables, LayoutGraph, LocalCosts
from autoshard.placement import Layout
from autoshard.plan import Mesh
from autoshard.program import Operator, TensorType

OPTIMIZER_PASSES = {"sgd": 3.0, "momentum": 6.0, "adam": 14.0, "adamw": 14.0}
"""Times an optimizer step reads or writes as many bytes as the parameters have, unfused as PyTorch's `foreach` does."""


@dataclass(frozen=True)
class OperatorPrice:
    """Seconds of an operator on one rank: compute forward and backward; and of the communication inside it.

    communication_s is forward and backward together and in neither forward_s nor backward_s;
    communication_backward_s is the part of it that runs in backward.
    """

    forward_s: float
    backward_s: float
    communication_s: float = 0.0
    communication_backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Everything."""
        return self.forward_s + self.backward_s + self.communication_s


@dataclass(frozen=True)
class Prices:
    """What things cost on `mesh` of `cluster`. Where device types differ, the slowest counts."""

    cluster: Cluster
    mesh: Mesh
    optimizer: str = "adamw"

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The different device types of the mesh, in the order of its ranks."""
        return tuple(dict.fromkeys(self.cluster.group(rank).device for rank in self.mesh.devices))

    @cached_property
    def shapes(self) -> tuple[tuple[GroupShape, ...], ...]:
        """The process groups of each axis."""
        return tuple(axis_shapes(self.cluster, self.mesh, axis) for axis in range(len(self.mesh.axes)))

    @cached_property
    def memory_bytes(self) -> int:
        """Memory that every device of the mesh has."""
        return min(self.cluster.memory_bytes(rank) for rank in self.mesh.devices)

    @cached_property
    def _local(self) -> LocalCosts:
        return LocalCosts(
            max(device.launch_overhead_s for device in self.devices),
            min(device.memory_bandwidth_bytes_per_s * device.memory_efficiency for device in self.devices),
        )

    @cached_property
    def _graphs(self) -> dict[TensorType, LayoutGraph]:
        return {}

    @cached_property
    def _conversions(self) -> dict[tuple[TensorType, Layout, Layout], ConversionPrice]:
        return {}

    def graph(self, type: TensorType) -> LayoutGraph:
        """All layouts of a tensor and the priced steps between them."""
        if type not in self._graphs:
            self._graphs[type] = LayoutGraph(type, self.mesh.sizes, self.shapes, self._local)
        return self._graphs[type]

    def operator(self, op: Operator, implementations: Sequence[str | None] = ()) -> OperatorPrice:
        """Seconds of an operator whose operands and results have their local shapes.

        implementations: per axis of the mesh, the named implementation or None.
        """
        forward_s = backward_s = 0.0
        for device in self.devices:
            forward, backward = operator_seconds(op, device)
            forward_s, backward_s = max(forward_s, forward), max(backward_s, backward)
        inner_forward = inner_backward = 0.0
        for axis, name in enumerate(implementations):
            if name is not None and self.mesh.sizes[axis] > 1:
                forward, backward = self._inner(op, name, self.shapes[axis])
                inner_forward, inner_backward = inner_forward + forward, inner_backward + backward
        return OperatorPrice(forward_s, backward_s, inner_forward + inner_backward, inner_backward)

    def _inner(self, op: Operator, name: str, shapes: Sequence[GroupShape]) -> tuple[float, float]:
        """Seconds of the communication inside a named implementation, forward and backward."""
        x = op.operands[0]
        wide = 4.0 if x.dtype.itemsize < 4 else float(x.dtype.itemsize)  # both accumulate in float32 or wider

        def reduced(*numbers: float) -> float:
            return sum(float(collective("all_reduce", shapes, wide * count)) for count in numbers)

        if name == "vocab_cross_entropy":
            # Of each row the largest logit, then the sum of exponentials, the target's logit and the smoothing's sum.
            rows = float(math.prod(x.shape[:1] + x.shape[2:])) if len(x.shape) > 1 else 1.0
            return reduced(rows, 3 * rows), 0.0
        if name == "batch_norm_synced":
            # Of each channel the sum (and the count), then the squares; in backward two sums of the gradient.
            channels = float(x.shape[1])
            return reduced(channels + 1, channels), reduced(2 * channels) if x.needs_grad else 0.0
        return 0.0, 0.0

    def conversion(self, type: TensorType, source: Layout, target: Layout) -> ConversionPrice:
        """The cheapest steps from one layout to another of a tensor with this global type."""
        key = (type, source, target)
        if key not in self._conversions:
            self._conversions[key] = self.graph(type).convert(source, target)
        return self._conversions[key]

    def conversion_table(self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> Floats:
        """Seconds, forward and backward, from every source (rows) to every target (columns)."""
        return self.conversion_tables(type, sources, targets).total_s

    def conversion_tables(
        self, type: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
    ) -> ConversionTables:
        """Forward seconds, backward seconds and transient bytes from every source (rows) to every target (columns)."""
        return self.graph(type).tables(sources, targets)

    def once(self, type: TensorType, source: Layout, target: Layout) -> ConversionPrice:
        """The conversion of a parameter done once a step: source forward, its gradient's sum backward."""
        return self.conversion(type, source, target)

    def collective_s(self, name: str, axis: int, size_bytes: float) -> float:
        """Seconds of one collective ("all_reduce", ...) on a mesh axis; bytes as in `cost.collectives`."""
        return float(collective(name, self.shapes[axis], size_bytes)) if self.mesh.sizes[axis] > 1 else 0.0

    def optimizer_s(self, parameter_bytes: float) -> float:
        """Seconds of an optimizer step over a rank's `parameter_bytes`."""
        return OPTIMIZER_PASSES.get(self.optimizer, 14.0) * parameter_bytes / self._local.memory_bandwidth

    def transfer_s(self, size_bytes: float, source: Mesh, target: Mesh) -> float:
        """Seconds to send `size_bytes` from each rank of one stage's mesh to its partner in another's."""
        return _transfer_s(self.cluster, source.devices, target.devices, float(size_bytes))


@lru_cache(maxsize=65536)
def _transfer_s(cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...], size_bytes: float) -> float:
    count = max(len(source), len(target))
    pairs = [(source[i * len(source) // count], target[i * len(target) // count]) for i in range(count)]
    return transfer(cluster, pairs, size_bytes)
