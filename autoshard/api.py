"""What the command line and a user's Python call: `compile` and `plan`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard import compiler
from autoshard.cluster import Cluster, parse_cluster
from autoshard.compiled import Compiled, read_plan
from autoshard.compiler import Observer, PlanOptions, make_plan, parse_mesh
from autoshard.cost.memory import OPTIMIZER_STATES
from autoshard.errors import BadInput
from autoshard.loading import check_dtype, load_workload, with_dtype
from autoshard.plan import Plan
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
    given = None if plan is None else plan if isinstance(plan, Plan) else read_plan(Path(plan))
    options = plan_options(
        mesh=mesh,
        stages=stages,
        microbatches=microbatches,
        schedule=schedule,
        pins=pins,
        cut_before=cut_before,
        optimizer=optimizer if given is None else given.optimizer,
        dtype=dtype,
        memory_limit=memory_limit,
        time_limit=time_limit,
    )
    if given is not None:
        _check_free(mesh=mesh, stages=stages, microbatches=microbatches, pins=pins, cut_before=cut_before)
        settings = {**given.settings, **(settings or {})}
        dtype = dtype or given.dtype
    found = find_workload(workload, settings, dtype)
    where = find_cluster(cluster, given)
    program, _, made, files = compiler.compile_workload(found, where, options, plan=given, observers=observers)
    return Compiled(made, files, found, program)


def plan(
    workload: Workload | str,
    cluster: Cluster | str | Path,
    options: PlanOptions | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    observers: Sequence[Observer] = (),
) -> Plan:
    """The plan alone, as `compile` would make it. Raises AutoshardError."""
    options = options or PlanOptions()
    found = find_workload(workload, settings, options.dtype)
    return make_plan(found, find_cluster(cluster, None), options, observers)[2]


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


def _check_free(**fixed: Any) -> None:
    for name, value in fixed.items():
        if value is not None:
            raise BadInput(f"{name} is given beside a plan, which decides it", help=f"leave {name} out, or the plan")
