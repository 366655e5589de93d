"""What the command line and a user's Python call: `compile` and `plan`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoshard.cluster import Cluster, parse_cluster
from autoshard.compiled import Compiled, read_plan
from autoshard.compiler import Observer, PlanOptions, compile_workload, make_plan, parse_mesh
from autoshard.cost.memory import OPTIMIZER_STATES
from autoshard.errors import BadInput
from autoshard.loading import check_dtype, load_workload, with_dtype
from autoshard.passes.segment import segment
from autoshard.passes.trace import trace
from autoshard.plan import Plan
from autoshard.plan_price import given_plan
from autoshard.workload import Workload


def compile(
    workload: Workload | str,
    cluster: Cluster | str | Path | None = None,
    *,
    mesh: str | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str = "auto",
    pins: Mapping[str, str] | None = None,
    cut_before: Sequence[str] | None = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
    plan: Plan | str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
) -> Compiled:
    """Plan the training of a workload on a cluster and write it down as PyTorch source.

    workload: a Workload, or "file.py:name" or "package.module:name" of what makes one, called with `settings`.
    cluster: a TOML file, "2x8@A100-80GB", or a Cluster; with `plan`, the plan's own where left out.
    mesh: one stage's, "dp=2,tp=8". stages, microbatches, schedule ("gpipe", "1f1b"), pins ({"parameter pattern" or
        "input:name" or module path: "S(0)@tp"}), cut_before (module paths): each fixes a part of the search.
    optimizer: "adamw", "adam", "momentum" or "sgd", for its memory. dtype: what model and inputs are cast to.
    memory_limit: bytes, or "40GiB", of every device. time_limit: seconds for the search.
    plan: a saved or edited plan, or its file, to emit instead of searching. It must belong to the model and its inputs
        (fingerprints); its stages must take all segments in order, on devices that the cluster has; every operator's
        layouts must be among its strategies, every parameter's a way to store it; it is priced again and must fit.
    observers: see every pass begin and end.
    Raises every AutoshardError but NotEqual: BadInput for what cannot be used as given, InfeasiblePlan where nothing
    fits.
    """
    options = plan_options(
        mesh=mesh,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        pins=pins,
        cut_before=cut_before,
        optimizer=optimizer,
        dtype=dtype,
        memory_limit=memory_limit,
        time_limit=time_limit,
    )
    request = _request(workload, cluster, options, plan, settings)
    program, _, made, files = compile_workload(
        request.workload, request.cluster, request.options, plan=request.plan, observers=observers
    )
    return Compiled(made, files, request.workload, program)


def plan(
    workload: Workload | str,
    cluster: Cluster | str | Path | None = None,
    options: PlanOptions | None = None,
    *,
    plan: Plan | str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
) -> Plan:
    """The plan alone, as `compile` with these options would make it, or check and price it. Raises AutoshardError."""
    request = _request(workload, cluster, options or PlanOptions(), plan, settings)
    if request.plan is None:
        return make_plan(request.workload, request.cluster, request.options, observers)[2]
    program = trace(request.workload)
    return given_plan(request.plan, program, segment(program), request.cluster)


@dataclass(frozen=True)
class _Request:
    """What is to be planned, or carried out where a plan is given."""

    workload: Workload
    cluster: Cluster
    options: PlanOptions
    plan: Plan | None


def _request(
    workload: Workload | str,
    cluster: Cluster | str | Path | None,
    options: PlanOptions,
    plan: Plan | str | Path | None,
    settings: Mapping[str, Any] | None,
) -> _Request:
    if plan is None:
        return _Request(find_workload(workload, settings, options.dtype), find_cluster(cluster, None), options, None)
    given = plan if isinstance(plan, Plan) else read_plan(Path(plan))
    for name in ("mesh", "stages", "microbatches", "pins", "cut_before"):
        if getattr(options, name) not in (None, {}, ()):
            raise BadInput(f"{name} is given beside a plan, which decides it", help=f"leave {name} out, or the plan")
    options = replace(options, optimizer=given.optimizer, dtype=options.dtype or given.dtype)
    where = find_cluster(cluster, given)
    if options.memory_limit_bytes is not None:
        where = where.with_memory_limit(options.memory_limit_bytes)
    found = find_workload(workload, {**given.settings, **(settings or {})}, options.dtype)
    return _Request(
        found, where, options, replace(given, workload=found.name, settings=found.settings, dtype=options.dtype)
    )


def plan_options(
    *,
    mesh: str | None = None,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str = "auto",
    pins: Mapping[str, str] | None = None,
    cut_before: Sequence[str] | None = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    memory_limit: int | str | None = None,
    time_limit: float | None = None,
) -> PlanOptions:
    """The options as the passes take them. Raises BadInput for a text that cannot be read."""
    if optimizer not in OPTIMIZER_STATES:
        raise BadInput(f"'{optimizer}' is not an optimizer", help=f"known optimizers: {', '.join(OPTIMIZER_STATES)}")
    if dtype is not None:
        check_dtype(dtype)
    return PlanOptions(
        mesh=parse_mesh(mesh) if mesh is not None else None,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        optimizer=optimizer,
        pins=dict(pins or {}),
        cut_before=tuple(cut_before or ()),
        memory_limit_bytes=parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit,
        time_limit_s=time_limit,
        dtype=dtype,
    )


_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Read "40GiB", "40GB", "512MiB" or a number of bytes. Raises BadInput."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise BadInput(f"'{text}' is not an amount of memory", help='write "40GiB", "40GB" or bytes above 0')
    power = " KMGT".index(match[2].upper() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def find_workload(workload: Workload | str, settings: Mapping[str, Any] | None, dtype: str | None) -> Workload:
    """The workload that is meant. Raises BadInput."""
    if isinstance(workload, str):
        return load_workload(workload, settings or {}, dtype=dtype)
    if not isinstance(workload, Workload):
        raise BadInput(
            f"a {type(workload).__name__} is not a workload",
            help='give an autoshard.Workload(model, args), or "file.py:name"',
        )
    return workload if dtype is None else with_dtype(workload, dtype)


def find_cluster(cluster: Cluster | str | Path | None, given: Plan | None) -> Cluster:
    """The cluster that is meant; the plan's, where none is. Raises BadInput."""
    if cluster is None:
        if given is None:
            raise BadInput("there is no cluster to plan for", help='give one: "1x8@A100-80GB", or a TOML file')
        cluster = parse_cluster(given.cluster)
        if cluster.fingerprint != given.fingerprints.get("cluster"):
            raise BadInput(
                f"the plan's cluster, {given.cluster}, was described in a file", help="give the cluster beside the plan"
            )
    return cluster if isinstance(cluster, Cluster) else parse_cluster(cluster)
