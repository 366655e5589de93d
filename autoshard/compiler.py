"""The compiler: a tuple of passes and the loop that runs it.

A pass reads results of earlier passes by name and its own result gets its name. Printing, timing and saving are
observers around the loop. From a workload to files:

    workload -> program -> chain -> plan -> local (a program a stage) -> modules (their text) -> files
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autoshard.cluster import Cluster
from autoshard.passes.emit import emit
from autoshard.passes.emit_constants import constant_files
from autoshard.passes.emit_folder import folder_files
from autoshard.passes.inter_op import InterOp
from autoshard.passes.inter_options import MeshShape, PlanOptions, format_mesh, parse_mesh
from autoshard.passes.local import LocalProgram
from autoshard.passes.lower import Lower
from autoshard.passes.segment import Chain, segment
from autoshard.passes.trace import trace
from autoshard.plan import Plan
from autoshard.plan_price import given_plan
from autoshard.program import Program
from autoshard.workload import Workload

__all__ = [
    "MeshShape",
    "Observer",
    "Pass",
    "PlanOptions",
    "Timing",
    "compile_workload",
    "emitting",
    "format_mesh",
    "make_plan",
    "parse_mesh",
    "planning",
    "run_passes",
]


class Observer(Protocol):
    """Sees every pass begin and end."""

    def on_start(self, name: str) -> None:
        """A pass begins."""

    def on_end(self, name: str, result: Any, seconds: float) -> None:
        """A pass has made `result`."""


@dataclass(frozen=True)
class Pass:
    """One step. name: of its result. reads: names of the results it is called with, in order."""

    name: str
    reads: tuple[str, ...]
    run: Callable[..., Any]


def run_passes(passes: Sequence[Pass], given: Mapping[str, Any], observers: Sequence[Observer] = ()) -> dict[str, Any]:
    """Run the passes in order; what was given and every result, by name."""
    results = dict(given)
    for step in passes:
        for observer in observers:
            observer.on_start(step.name)
        started = time.perf_counter()
        results[step.name] = step.run(*(results[name] for name in step.reads))
        took = time.perf_counter() - started
        for observer in observers:
            observer.on_end(step.name, results[step.name], took)
    return results


@dataclass
class Timing:
    """An observer that keeps the seconds of each pass."""

    seconds: dict[str, float]

    def on_start(self, name: str) -> None:
        """Nothing."""

    def on_end(self, name: str, result: Any, seconds: float) -> None:
        """Keep the seconds."""
        self.seconds[name] = seconds


def planning(cluster: Cluster, options: PlanOptions, baselines: bool = True) -> tuple[Pass, ...]:
    """The passes from "workload" to "plan"."""
    return (
        Pass("program", ("workload",), trace),
        Pass("chain", ("program",), segment),
        Pass("plan", ("program", "chain"), InterOp(cluster, options, baselines)),
    )


def given_planning(cluster: Cluster, plan: Plan) -> tuple[Pass, ...]:
    """The passes from "workload" to "plan" where there is one already: it is checked and priced again."""
    return (
        *planning(cluster, PlanOptions())[:2],
        Pass("plan", ("program", "chain"), lambda program, chain: given_plan(plan, program, chain, cluster)),
    )


def emitting(cluster: Cluster) -> tuple[Pass, ...]:
    """The passes from "plan" to "files"."""
    return (
        Pass("local", ("program", "chain", "plan"), Lower(cluster)),
        Pass("constants", ("workload", "program", "local"), _constants),
        Pass("modules", ("program", "plan", "local", "constants"), emit),
        Pass("files", ("workload", "program", "plan", "modules", "constants"), _folder),
    )


def _constants(workload: Workload, program: Program, local: LocalProgram) -> Mapping[str, bytes]:
    return constant_files(program, local, workload.model)


def _folder(
    workload: Workload, program: Program, plan: Plan, modules: Mapping[str, str], constants: Mapping[str, bytes]
) -> Mapping[str, str | bytes]:
    """Every file of the emitted folder. Weights are written where the workload has them."""
    state = {name: value.detach() for name, value in workload.model.state_dict().items()}
    return folder_files(program, plan, {**modules, **constants}, state)


def compile_workload(
    workload: Workload,
    cluster: Cluster,
    options: PlanOptions | None = None,
    plan: Plan | None = None,
    observers: Sequence[Observer] = (),
    baselines: bool = True,
) -> tuple[Program, Chain, Plan, Mapping[str, str | bytes]]:
    """Plan a workload, or take a plan that was made before, and write its files: name -> content.

    Raises every AutoshardError but NotEqual.
    """
    timing = Timing({})
    if plan is None:
        program, chain, plan = make_plan(workload, cluster, options, (*observers, timing), baselines)
    else:
        planned = run_passes(given_planning(cluster, plan), {"workload": workload}, (*observers, timing))
        program, chain, plan = planned["program"], planned["chain"], planned["plan"]
    given = {"workload": workload, "program": program, "chain": chain, "plan": plan}
    results = run_passes(emitting(cluster), given, (*observers, timing))
    emit_s = sum(timing.seconds[step.name] for step in emitting(cluster))
    plan = replace(plan, timing={**plan.timing, "emit_s": emit_s})
    return program, chain, plan, results["files"]


def make_plan(
    workload: Workload,
    cluster: Cluster,
    options: PlanOptions | None = None,
    observers: Sequence[Observer] = (),
    baselines: bool = True,
) -> tuple[Program, Chain, Plan]:
    """Trace a workload, cut it into segments and plan it. Raises every AutoshardError but NotEqual."""
    timing = Timing({})
    results = run_passes(
        planning(cluster, options or PlanOptions(), baselines), {"workload": workload}, (*observers, timing)
    )
    plan: Plan = results["plan"]
    seconds = {
        "trace_s": timing.seconds["program"],
        "segment_s": timing.seconds["chain"],
        "plan_s": timing.seconds["plan"],
    }
    return (
        results["program"],
        results["chain"],
        replace(plan, timing=seconds, settings=workload.settings, dtype=options.dtype if options else None),
    )
