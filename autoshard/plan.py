"""The plan: plain data that says how a program runs on a cluster. A versioned JSON file (`to_json`, `from_json`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.placement import Layout, product

PLAN_VERSION = 1


@dataclass(frozen=True)
class Mesh:
    """Named axes, outermost first, laid over `devices` (cluster-wide ranks) in row-major order."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.axes) == len(self.sizes) and product(self.sizes) == len(self.devices)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in zip(self.axes, self.sizes, strict=True)) or "one device"


@dataclass(frozen=True)
class OperatorPlan:
    """The strategy of one operator on the whole mesh: layouts of its tensor operands and results, in schema order.

    implementations: per axis, the named implementation or None (see `AxisStrategy`).
    """

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    implementations: tuple[str | None, ...]


@dataclass(frozen=True)
class StagePrediction:
    """Predicted seconds of one microbatch and of once-a-step work, and bytes on the fullest device of the stage."""

    forward_s: float
    backward_s: float
    compute_s: float
    collectives_s: float
    once_s: float
    optimizer_s: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    saved_bytes_per_microbatch: int
    in_flight: int
    transient_bytes: int
    peak_memory_bytes: int


@dataclass(frozen=True)
class StagePlan:
    """Consecutive segments on one submesh.

    segments: half-open range of the chain's segment numbers. operators: node name -> its strategy.
    parameters: parameter name (the user's) -> stored layout.
    receives, sends: value (as `str(Value)`) -> layout on this stage's mesh when it arrives from an earlier stage or
        leaves for later ones; placements I and S only, so that gradients travel whole.
    remat: module paths whose forward is run again in backward instead of keeping its activations.
    """

    mesh: Mesh
    segments: tuple[int, int]
    operators: Mapping[str, OperatorPlan]
    parameters: Mapping[str, Layout]
    receives: Mapping[str, Layout]
    sends: Mapping[str, Layout]
    remat: tuple[str, ...]
    predicted: StagePrediction


@dataclass(frozen=True)
class Predicted:
    """Predicted time of one whole training step and what it is made of (seconds by name, summing to it)."""

    step_time_s: float
    peak_memory_bytes: tuple[int, ...]
    breakdown: Mapping[str, float]


@dataclass(frozen=True)
class Baseline:
    """A hand-written configuration priced by the same model. step_time_s is None where it cannot run at all."""

    name: str
    step_time_s: float | None
    peak_memory_bytes: int | None
    fits: bool


@dataclass(frozen=True)
class Solver:
    """How good the search result is: relative gap to the proved bound, and the seconds it took."""

    gap: float
    time_s: float
    status: str = "optimal"


@dataclass(frozen=True)
class Plan:
    """How to run one model on one cluster.

    fingerprints: "model", "workload", "cluster", "torch" -> hash or version, checked when the plan is loaded.
    schedule: "gpipe", "1f1b" (or "none" for a single stage and microbatch).
    timing: "trace_s", "plan_s", "emit_s" -> seconds spent.
    settings: what `workload` was called with. dtype: what model and inputs were cast to before planning, None for as
    they came.
    """

    stages: tuple[StagePlan, ...]
    microbatches: int
    schedule: str
    predicted: Predicted
    baselines: tuple[Baseline, ...]
    solver: Solver
    optimizer: str
    idle_devices: tuple[int, ...]
    fingerprints: Mapping[str, str]
    workload: str
    cluster: str
    timing: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    version: int = PLAN_VERSION

    @property
    def ranks(self) -> dict[int, int]:
        """Device -> rank in the emitted program: the devices that the plan uses, in order."""
        used = sorted({device for stage in self.stages for device in stage.mesh.devices})
        return {device: rank for rank, device in enumerate(used)}
