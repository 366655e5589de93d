"""A reduced twin: the same plan on fewer ranks and a smaller instance of the workload, for what is too large here.

Every axis of a mesh is cut to 2 ranks (1 where that is still too many), the stages stay, parameters are stored as the
plan stores them (by pins), and where memory does not suffice the workload is made smaller by the whole-number
arguments of its callable. The twin is planned and emitted like the plan itself; what it shares with the plan is the
kinds of layouts and the way they are written, not the text.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.cluster import Cluster, parse_cluster
from autoshard.compiler import compile_workload
from autoshard.errors import AutoshardError, BadInput
from autoshard.loading import integer_arguments, load_workload, takes_argument
from autoshard.passes.inter_options import MeshShape, PlanOptions, format_mesh
from autoshard.passes.inter_setting import fingerprints
from autoshard.passes.segment import Chain, segment
from autoshard.passes.trace import trace
from autoshard.placement import format_layout, product
from autoshard.plan import Plan
from autoshard.program import Program, result_types
from autoshard.verify_twin_plan import Traced, carried_plan
from autoshard.workload import Workload

MOST_RANKS = 8
"""Ranks that any machine carries; one with more than half as many processors carries two a processor."""

TWIN_BYTES = 2 << 30
"""Largest twin, so that it runs in a minute or two."""


@dataclass(frozen=True)
class Twin:
    """A smaller instance with its program. notes: what was reduced."""

    workload: Workload
    program: Program
    plan: Plan
    files: Mapping[str, str | bytes]
    notes: tuple[str, ...]


def too_large(program: Program, ranks: int) -> str | None:
    """Why this machine cannot run so many ranks beside the original, None where it can."""
    if ranks > carried_ranks():
        return f"the plan has {ranks} ranks and this machine carries {carried_ranks()}"
    need, have = needed_bytes(program, ranks), available_bytes()
    if need > have / 2:
        return (
            f"{ranks} ranks in float64 beside the original need some {need / 2**30:.1f} GiB, "
            f"more than half of the {have / 2**30:.1f} GiB that are free"
        )
    return None


def carried_ranks() -> int:
    """The most ranks that run at once on this machine."""
    return max(MOST_RANKS, 2 * (os.cpu_count() or 1))


def make_twin(workload: Workload, plan: Plan, reason: str, near: Path | None = None) -> Twin:
    """The largest twin that this machine can run. Raises BadInput with the reason where there is none."""
    shape = _reduced_mesh(plan, reason)
    ranks = product([size for _, size in shape]) * len(plan.stages)
    refusal: AutoshardError | None = None
    for settings in _settings(workload, plan, shape, near):
        try:
            small = workload if settings is None else _small(workload, settings, near)
            if needed_bytes(trace(small), ranks) <= min(available_bytes() / 2, TWIN_BYTES):
                return _compiled(workload, small, plan, shape, reason)
        except AutoshardError as error:  # sizes that the model, or its plan, does not take
            refusal = error
    raise BadInput(
        f"{reason}, and the workload cannot be made smaller" + (f": {refusal.what}" if refusal else ""),
        where=workload.name or None,
        help="verify on a larger machine, or compile a smaller instance: a workload named as file.py:name is reduced "
        "by those arguments that are whole numbers (batch, depth, width...)",
    )


def _small(workload: Workload, settings: Mapping[str, Any], near: Path | None) -> Workload:
    if takes_argument(workload.name, "device", near):
        settings = {**settings, "device": "meta"}
    return load_workload(workload.name, settings, near=near)


def _compiled(workload: Workload, small: Workload, plan: Plan, shape: MeshShape, reason: str) -> Twin:
    stages = len(plan.stages)
    names = {name for name, _ in small.model.named_parameters(remove_duplicate=False)}
    options = PlanOptions(
        mesh=shape,
        stages=stages,
        microbatches=_microbatches(plan),
        schedule=plan.schedule if plan.schedule != "none" else "auto",
        optimizer=plan.optimizer,
        pins=_pins(plan, shape, names),
    )
    cluster = parse_cluster(f"1x{product([size for _, size in shape]) * stages}@cpu")
    kept, found = "its layouts are the plan's", _carried(workload, small, plan, shape, cluster)
    if found is None:
        kept = "its parameters are stored as the plan stores them, the rest was planned anew"
        found = compile_workload(small, cluster, options)
    program, _, made, files = found
    before = {**integer_arguments(workload.name), **workload.settings} if workload.name else {}
    changed = [
        f"{name}={value}" for name, value in small.settings.items() if name != "device" and before.get(name) != value
    ]
    notes = [
        f"a reduced twin was run: {reason}",
        f"its mesh is {format_mesh(shape)} in each of {stages} stage{'s' * (stages > 1)}, with {made.microbatches} "
        f"microbatches; {kept}",
    ]
    if changed:
        notes.append(f"its sizes: {', '.join(changed)}")
    return Twin(small, program, made, files, tuple(notes))


def _carried(
    workload: Workload, small: Workload, plan: Plan, shape: MeshShape, cluster: Cluster
) -> tuple[Program, Chain, Plan, Mapping[str, str | bytes]] | None:
    """The small instance compiled with the plan's own layouts, None where it does not take them."""
    large, little = (Traced(program, segment(program)) for program in (trace(workload), trace(small)))
    carried = carried_plan(plan, large, little, shape, _microbatches(plan))
    if carried is None:
        return None
    try:
        known = replace(carried, fingerprints=fingerprints(little.program, cluster))
        return compile_workload(small, cluster, plan=known)
    except AutoshardError:  # layouts that the small sizes do not take
        return None


def _microbatches(plan: Plan) -> int:
    """Enough for every stage to have one at a time."""
    return min(plan.microbatches, max(2, len(plan.stages)))


# Meshes and layouts ---------------------------------------------------------------------------------------------------


def _reduced_mesh(plan: Plan, reason: str) -> MeshShape:
    """The axes of all stages at 2 ranks each, from the last axis on at 1 while there are too many."""
    sizes: dict[str, int] = {}
    for stage in plan.stages:
        for axis, size in zip(stage.mesh.axes, stage.mesh.sizes, strict=True):
            sizes[axis] = max(sizes.get(axis, 1), min(size, 2))
    for axis in reversed(list(sizes)):
        if product(list(sizes.values())) * len(plan.stages) > carried_ranks():
            sizes[axis] = 1
    if product(list(sizes.values())) * len(plan.stages) <= carried_ranks():
        return tuple(sizes.items()) or (("dp", 1),)
    raise BadInput(
        f"{reason}, and the plan has {len(plan.stages)} stages, of which each needs a rank",
        help="verify on a larger machine, or a plan with fewer stages",
    )


def _pins(plan: Plan, shape: MeshShape, names: set[str]) -> dict[str, str]:
    """Stored layouts of the parameters that the small instance has too, on the axes that are left."""
    pins: dict[str, str] = {}
    for stage in plan.stages:
        for name, layout in stage.parameters.items():
            pairs = zip(layout, stage.mesh.axes, stage.mesh.sizes, strict=True)
            kept = [(placement, axis) for placement, axis, size in pairs if size > 1 and dict(shape).get(axis, 1) > 1]
            if kept and name in names and name not in pins:
                pins[name] = format_layout(tuple(p for p, _ in kept), [axis for _, axis in kept])
    return pins


# Sizes ----------------------------------------------------------------------------------------------------------------

_DEPTH, _BATCH, _HEADS, _SAME = ("depth", "layer", "blocks"), ("batch",), ("head",), ("seed",)


def _settings(
    workload: Workload, plan: Plan, shape: MeshShape, near: Path | None
) -> Iterator[Mapping[str, Any] | None]:
    """Settings to try, the largest instance first; None stands for the workload as it is."""
    yield None
    if not workload.name:
        return
    defaults = integer_arguments(workload.name, near)
    sizes = {name: int(workload.settings.get(name, value)) for name, value in defaults.items()}
    for shift in range(1, 10):
        yield {
            **workload.settings,
            **{name: _reduced(name, value, 1 << shift, sizes, plan, shape) for name, value in sizes.items()},
        }


def _reduced(name: str, value: int, factor: int, sizes: Mapping[str, int], plan: Plan, shape: MeshShape) -> int:
    if value < 2 or _is(name, _SAME):
        return value
    if _is(name, _DEPTH):
        return min(value, 2 * len(plan.stages))
    if _is(name, _BATCH):
        return min(value, 2 * dict(shape).get("dp", 1) * _microbatches(plan))
    together, least = [value], 8
    if _is(name, _HEADS):  # all by one factor, so that as many queries share a key
        together, least = [size for other, size in sizes.items() if _is(other, _HEADS) and size > 1], 2
    while factor > 1 and any(size % factor or size // factor < least for size in together):
        factor //= 2
    return value // factor


def _is(name: str, words: Sequence[str]) -> bool:
    return any(word in name.lower() for word in words)


# Memory ---------------------------------------------------------------------------------------------------------------


def needed_bytes(program: Program, ranks: int) -> int:
    """float64 bytes of the parameters, once a rank and for the original with what it is compared by, and of twice
    every value of the whole batch: with gradients, or copies on several ranks."""
    parameters = sum(parameter.type.numel for parameter in program.parameters.values())
    values = sum(type_.numel for node in program.operators() for type_ in result_types(node))
    return 8 * ((ranks + 3) * parameters + 2 * values)


def available_bytes() -> int:
    """Memory that is free on this machine."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
