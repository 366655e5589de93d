"""A plan as a JSON file: `to_json` and `from_json`, each the exact inverse of the other.

    {"version": 1, "workload": ..., "settings": {"depth": 12}, "dtype": null, "cluster": ..., "fingerprints": {...},
     "microbatches": 4, "schedule": "1f1b", ...
     "stages": [{"mesh": {"dp": 2, "tp": 4}, "devices": [0, ...], "segments": [0, 12],
                 "layouts": {"blocks.0.mlp.up.weight": "I@dp, S(0)@tp", ...},                    stored parameters
                 "operators": {"linear_3": {"operands": ["S(0)@dp, I@tp", ...], "results": [...],
                                            "implementations": [null, null]}},
                 "receives": {...}, "sends": {...}, "remat": [...], "predicted": {...}}]}

A layout is written with the axis of every placement, in the mesh's order, so that a person can edit it. Numbers keep
their full precision. Every error is a `BadPlan` that names the field by its path, "stages[1].mesh.dp".
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from autoshard.errors import BadInput, BadPlan
from autoshard.placement import Layout, format_layout, parse_placement, product
from autoshard.plan import (
    PLAN_VERSION,
    Baseline,
    Mesh,
    OperatorPlan,
    Plan,
    Predicted,
    Solver,
    StagePlan,
    StagePrediction,
)

T = TypeVar("T")


def to_json(plan: Plan, *, indent: int | None = 1) -> str:
    """The plan as JSON text; the same plan always gives the same text."""
    return json.dumps(plan_data(plan), indent=indent, ensure_ascii=False) + "\n"


def plan_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain dicts, lists, strings and numbers: what `to_json` writes and `autoshard plan --json` prints."""
    return {
        "version": plan.version,
        "workload": plan.workload,
        "settings": dict(plan.settings),
        "dtype": plan.dtype,
        "cluster": plan.cluster,
        "fingerprints": dict(plan.fingerprints),
        "optimizer": plan.optimizer,
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "idle_devices": list(plan.idle_devices),
        "predicted": {
            "step_time_s": plan.predicted.step_time_s,
            "peak_memory_bytes": list(plan.predicted.peak_memory_bytes),
            "breakdown": dict(plan.predicted.breakdown),
        },
        "solver": asdict(plan.solver),
        "timing": dict(plan.timing),
        "baselines": [asdict(baseline) for baseline in plan.baselines],
        "notes": list(plan.notes),
        "stages": [_stage_data(stage) for stage in plan.stages],
    }


def from_json(text: str, *, where: str = "plan.json") -> Plan:
    """Read what `to_json` wrote. where: the file's name for messages. Raises BadPlan."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadPlan(f"the plan is not JSON: {error.msg}", where=f"{where}:{error.lineno}") from error
    root = _Field(data, "", where)
    version = root.key("version").integer(least=1)
    if version != PLAN_VERSION:
        raise BadPlan(
            f"the plan has version {version}; this autoshard reads version {PLAN_VERSION}",
            where=where,
            help="plan again, or use the autoshard that wrote it",
        )
    predicted = root.key("predicted")
    stages = tuple(root.key("stages").each(_read_stage))
    if not stages:
        root.key("stages").fail("must have at least one stage")
    return Plan(
        stages=stages,
        microbatches=root.key("microbatches").integer(least=1),
        schedule=root.key("schedule").one_of(("none", "gpipe", "1f1b")),
        predicted=Predicted(
            predicted.key("step_time_s").number(),
            tuple(predicted.key("peak_memory_bytes").each(_Field.integer)),
            predicted.key("breakdown").mapping(_Field.number),
        ),
        baselines=tuple(root.key("baselines").each(_read_baseline)),
        solver=Solver(
            root.key("solver").key("gap").number(),
            root.key("solver").key("time_s").number(),
            root.key("solver").key("status").text(),
        ),
        optimizer=root.key("optimizer").text(),
        idle_devices=tuple(root.key("idle_devices").each(_Field.integer)),
        fingerprints=root.key("fingerprints").mapping(_Field.text),
        workload=root.key("workload").text(),
        cluster=root.key("cluster").text(),
        timing=root.key("timing").mapping(_Field.number),
        notes=tuple(root.key("notes").each(_Field.text)),
        settings=root.key("settings").mapping(lambda setting: setting.value),
        dtype=root.key("dtype").optional_text(),
        version=version,
    )


def _stage_data(stage: StagePlan) -> dict[str, Any]:
    axes = stage.mesh.axes

    def layouts(table: Mapping[str, Layout]) -> dict[str, str]:
        return {name: format_layout(layout, axes) for name, layout in table.items()}

    return {
        "mesh": dict(zip(axes, stage.mesh.sizes, strict=True)),
        "devices": list(stage.mesh.devices),
        "segments": list(stage.segments),
        "remat": list(stage.remat),
        "predicted": asdict(stage.predicted),
        "layouts": layouts(stage.parameters),
        "receives": layouts(stage.receives),
        "sends": layouts(stage.sends),
        "operators": {
            name: {
                "operands": [format_layout(layout, axes) for layout in operator.operands],
                "results": [format_layout(layout, axes) for layout in operator.results],
                "implementations": list(operator.implementations),
            }
            for name, operator in stage.operators.items()
        },
    }


def _read_stage(field: "_Field") -> StagePlan:
    sizes = field.key("mesh").mapping(lambda size: size.integer(least=1))
    devices = tuple(field.key("devices").each(_Field.integer))
    if product(tuple(sizes.values())) != len(devices):
        field.key("devices").fail(f"has {len(devices)} devices for a mesh of {product(tuple(sizes.values()))}")
    if len(set(devices)) != len(devices):
        field.key("devices").fail("names a device twice")
    mesh = Mesh(tuple(sizes), tuple(sizes.values()), devices)
    segments = tuple(field.key("segments").each(_Field.integer))
    if len(segments) != 2 or not 0 <= segments[0] < segments[1]:
        field.key("segments").fail("must be [first, end) with 0 <= first < end")

    def layout(item: _Field) -> Layout:
        return item.layout(mesh.axes)

    return StagePlan(
        mesh=mesh,
        segments=(segments[0], segments[1]),
        operators=field.key("operators").mapping(lambda item: _read_operator(item, mesh.axes)),
        parameters=field.key("layouts").mapping(layout),
        receives=field.key("receives").mapping(layout),
        sends=field.key("sends").mapping(layout),
        remat=tuple(field.key("remat").each(_Field.text)),
        predicted=_read_prediction(field.key("predicted")),
    )


def _read_operator(field: "_Field", axes: tuple[str, ...]) -> OperatorPlan:
    implementations = tuple(field.key("implementations").each(_Field.optional_text))
    if len(implementations) != len(axes):
        field.key("implementations").fail(f"must have {len(axes)} entries, one a mesh axis")
    return OperatorPlan(
        tuple(field.key("operands").each(lambda item: item.layout(axes))),
        tuple(field.key("results").each(lambda item: item.layout(axes))),
        implementations,
    )


def _read_prediction(field: "_Field") -> StagePrediction:
    seconds = ("forward_s", "backward_s", "compute_s", "collectives_s", "once_s", "optimizer_s")
    counts = (
        "parameter_bytes", "gradient_bytes", "optimizer_bytes", "saved_bytes_per_microbatch",
        "in_flight", "transient_bytes", "peak_memory_bytes",
    )  # fmt: skip
    values: dict[str, Any] = {name: field.key(name).number() for name in seconds}
    values |= {name: field.key(name).integer() for name in counts}
    return StagePrediction(**values)


def _read_baseline(field: "_Field") -> Baseline:
    step_time, peak = field.key("step_time_s"), field.key("peak_memory_bytes")
    return Baseline(
        field.key("name").text(),
        None if step_time.value is None else step_time.number(),
        None if peak.value is None else peak.integer(),
        field.key("fits").boolean(),
    )


@dataclass(frozen=True)
class _Field:
    """A JSON value with its path, read as a type or refused by name."""

    value: Any
    path: str
    where: str

    def fail(self, why: str) -> Any:
        raise BadPlan(f"{self.path or 'the plan'} {why}", where=self.where)

    def key(self, name: str) -> "_Field":
        if not isinstance(self.value, dict):
            self.fail("must be an object")
        path = f"{self.path}.{name}" if self.path else name
        if name not in self.value:
            raise BadPlan(f"{path} is missing", where=self.where)
        return _Field(self.value[name], path, self.where)

    def each(self, read: Callable[["_Field"], T]) -> list[T]:
        if not isinstance(self.value, list):
            self.fail("must be a list")
        return [read(_Field(item, f"{self.path}[{index}]", self.where)) for index, item in enumerate(self.value)]

    def mapping(self, read: Callable[["_Field"], T]) -> dict[str, T]:
        if not isinstance(self.value, dict):
            self.fail("must be an object")
        return {name: read(_Field(item, f"{self.path}.{name}", self.where)) for name, item in self.value.items()}

    def text(self) -> str:
        return str(self.value) if isinstance(self.value, str) else self.fail("must be a string")

    def optional_text(self) -> str | None:
        return None if self.value is None else self.text()

    def boolean(self) -> bool:
        return self.value if isinstance(self.value, bool) else self.fail("must be true or false")

    def integer(self, least: int = 0) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < least:
            self.fail(f"must be an integer of at least {least}")
        return int(self.value)

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)) or math.isnan(self.value):
            self.fail("must be a number")
        return float(self.value)

    def one_of(self, allowed: tuple[str, ...]) -> str:
        return str(self.value) if self.value in allowed else self.fail(f"must be one of {', '.join(allowed)}")

    def layout(self, axes: tuple[str, ...]) -> Layout:
        """ "S(0)@dp, I@tp": one placement an axis, in the mesh's order."""
        parts = [part.strip() for part in self.text().split(",")] if self.value else []
        named = [part.rpartition("@") for part in parts]
        if tuple(axis for _, _, axis in named) != axes:
            self.fail(
                f"is {self.value!r}; write one placement@axis for each of the axes {', '.join(axes)}, in this order"
            )
        try:
            return tuple(parse_placement(placement) for placement, _, _ in named)
        except BadInput as error:
            raise BadPlan(f"{self.path}: {error.what}", where=self.where, help=error.help) from error
