"""The command line: parses, calls `api`, prints. Exit codes: 0 done, 1 the answer is no, 2 bad input."""

import ast
import contextlib
import json as json_text
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.table import Table

from autoshard import api
from autoshard.compiled import check_folder
from autoshard.demo import run_demo
from autoshard.errors import AutoshardError, BadInput
from autoshard.plan import Plan
from autoshard.plan_file import to_json
from autoshard.verify_program import VerifyResult, verify

app = typer.Typer(help="Plan and write down the distributed training of a PyTorch model.", no_args_is_help=True)

WorkloadSpec = Annotated[str, typer.Argument(help="file.py:name or package.module:name")]
ClusterSpec = Annotated[str | None, typer.Option(help="TOML file or NODESxDEVICES@TYPE")]
Mesh = Annotated[str | None, typer.Option(help="one stage's mesh, dp=2,tp=4")]
Stages = Annotated[int | None, typer.Option(help="number of pipeline stages")]
Microbatches = Annotated[str, typer.Option(help="microbatches of a step, or auto")]
Schedule = Annotated[str, typer.Option(help="1f1b, gpipe or auto")]
Optimizer = Annotated[str, typer.Option(help="adamw, adam, momentum or sgd: what it keeps takes memory")]
CutBefore = Annotated[list[str] | None, typer.Option(help="module path that begins a stage")]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="a saved or edited plan to use instead of searching")]
Dtype = Annotated[str | None, typer.Option(help="dtype to cast to: float32, bfloat16...")]
MemoryLimit = Annotated[str | None, typer.Option(help="of every device: 40GiB, or bytes")]
TimeLimit = Annotated[float | None, typer.Option(help="seconds for the search")]
Pins = Annotated[list[str] | None, typer.Option("--pin", help="'model.layers.*.weight=S(0)@tp' or 'input:x=S(0)@dp'")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="name=value, an argument of the workload")]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


@app.callback()
def _main() -> None:
    """Plan and write down the distributed training of a PyTorch model."""


@app.command("plan")
def plan_command(
    workload: WorkloadSpec,
    cluster: ClusterSpec = None,
    mesh: Mesh = None,
    stages: Stages = None,
    microbatches: Microbatches = "auto",
    schedule: Schedule = "auto",
    optimizer: Optimizer = "adamw",
    cut_before: CutBefore = None,
    plan: PlanFile = None,
    dtype: Dtype = None,
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = None,
    pin: Pins = None,
    set_: Settings = None,
    json: Json = False,
) -> None:
    """Find the fastest plan. Example: autoshard plan models/gpt.py:gpt_tiny --cluster 1x4@cpu"""
    with _refusals():
        options = api.plan_options(
            mesh=mesh,
            stages=stages,
            microbatches=_count(microbatches),
            schedule=schedule,
            optimizer=optimizer,
            cut_before=cut_before,
            dtype=dtype,
            memory_limit=memory_limit,
            time_limit=time_limit,
            pins=_pins(pin),
        )
        found = api.plan(workload, cluster, options, plan=plan, settings=_settings(set_))
    _print_plan(found, json)


@app.command("compile")
def compile_command(
    workload: WorkloadSpec,
    out: Annotated[Path, typer.Option(help="folder to write to")],
    cluster: ClusterSpec = None,
    mesh: Mesh = None,
    stages: Stages = None,
    microbatches: Microbatches = "auto",
    schedule: Schedule = "auto",
    optimizer: Optimizer = "adamw",
    cut_before: CutBefore = None,
    plan: PlanFile = None,
    dtype: Dtype = None,
    memory_limit: MemoryLimit = None,
    time_limit: TimeLimit = None,
    pin: Pins = None,
    set_: Settings = None,
    json: Json = False,
) -> None:
    """Plan, and write a program. Example: autoshard compile models/gpt.py:gpt_tiny --cluster 1x4@cpu --out out"""
    with _refusals():
        check_folder(out)
        compiled = api.compile(
            workload,
            cluster,
            mesh=mesh,
            stages=stages,
            microbatches=_count(microbatches),
            schedule=schedule,
            optimizer=optimizer,
            cut_before=cut_before,
            plan=plan,
            dtype=dtype,
            memory_limit=memory_limit,
            time_limit=time_limit,
            pins=_pins(pin),
            settings=_settings(set_),
        )
        compiled.save(out)
    _print_plan(compiled.plan, json)
    if not json:
        typer.echo(f"wrote {out}: {', '.join(sorted(compiled.files))}")


@app.command("verify")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="folder that `autoshard compile` wrote")],
    steps: Annotated[int, typer.Option(help="training steps to compare")] = 3,
    json: Json = False,
) -> None:
    """Run a program against the original on processes of this machine. Exit code 1: not equal."""
    with _refusals():
        result = verify(folder, steps)
    typer.echo(json_text.dumps(_result_data(result), indent=1) if json else str(result))
    if not result.equal:
        raise typer.Exit(1)


@app.command("demo")
def demo_command(
    steps: Annotated[int, typer.Option(help="training steps")] = 30,
    out: Annotated[
        Path | None, typer.Option(help="folder for the emitted program; left out: a new temporary one")
    ] = None,
) -> None:
    """The main job on this machine's CPU: a small GPT trained on one process and, emitted, on four."""
    with _refusals(sys.stdout):
        code = run_demo(out, steps)
    raise typer.Exit(code)


@contextlib.contextmanager
def _refusals(prints: TextIO | None = None) -> Iterator[None]:
    """Refusals are printed in words and end the command with their exit code.

    prints: where code inside prints to, the user's too; left out: not among what the command answers.
    """
    try:
        with contextlib.redirect_stdout(prints or sys.stderr):
            yield
    except AutoshardError as error:
        typer.echo(f"autoshard: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


# What is printed ------------------------------------------------------------------------------------------------------


def _print_plan(plan: Plan, json: bool) -> None:
    if json:
        typer.echo(to_json(plan), nl=False)
        return
    for index, stage in enumerate(plan.stages):
        first, end = stage.segments
        peak = stage.predicted.peak_memory_bytes / 2**20
        devices = ", ".join(map(str, stage.mesh.devices))
        typer.echo(
            f"stage {index}: {stage.mesh} on devices {devices}; segments {first} to {end - 1}; {peak:.1f} MiB a device"
        )
    if plan.idle_devices:
        typer.echo(f"idle devices: {', '.join(map(str, plan.idle_devices))}")
    typer.echo(f"{plan.microbatches} microbatches, schedule {plan.schedule}, gap {plan.solver.gap:.1e}")
    for note in plan.notes:
        typer.echo(f"note: {note}")
    table = Table("configuration", "step (ms)", "fits")
    table.add_row("this plan", f"{plan.predicted.step_time_s * 1e3:.3f}", "yes")
    for baseline in plan.baselines:
        time = "-" if baseline.step_time_s is None else f"{baseline.step_time_s * 1e3:.3f}"
        table.add_row(baseline.name, time, "yes" if baseline.fits else "no")
    Console().print(table)


def _result_data(result: VerifyResult) -> dict[str, Any]:
    """null stands for an infinite error: a tensor that is missing, misshapen or not finite."""
    return {
        "equal": result.equal,
        "errors": {name: worst.error if math.isfinite(worst.error) else None for name, worst in _worst(result)},
        "worst": {name: worst.name for name, worst in _worst(result)},
        "first_divergence": result.first_divergence,
        "notes": list(result.notes),
    }


def _worst(result: VerifyResult) -> list[tuple[str, Any]]:
    return list(result.errors.worst.items())


# What is read ---------------------------------------------------------------------------------------------------------


def _count(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"'{text}' is no number of microbatches", help="write a number, or auto") from None


def _pins(texts: Sequence[str] | None) -> dict[str, str]:
    """Pins by pattern; several of one pattern are joined."""
    pins: dict[str, str] = {}
    for text in texts or ():
        pattern, found, layout = text.rpartition("=")
        if not found or not pattern:
            raise BadInput(f"--pin {text} pins nothing", help="write 'model.layers.*.weight=S(0)@tp'")
        pins[pattern] = f"{pins[pattern]},{layout}" if pattern in pins else layout
    return pins


def _settings(texts: Sequence[str] | None) -> dict[str, Any]:
    return dict(_setting(text) for text in texts or ())


def _setting(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found:
        raise BadInput(f"--set {text} sets nothing", help="write name=value, for example --set depth=12")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        words = {"true": True, "false": False, "none": None}
        return name, words.get(value.lower(), value)


def main() -> None:
    """Entry point of the `autoshard` command."""
    app()


if __name__ == "__main__":
    main()
