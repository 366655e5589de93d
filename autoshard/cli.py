"""The command line: parses, calls `api`, prints. Exit codes: 0 done, 1 the answer is no, 2 bad input."""

import ast
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoshard.api import plan
from autoshard.compiler import PlanOptions, parse_mesh
from autoshard.errors import AutoshardError, BadInput
from autoshard.loading import load_workload
from autoshard.plan_file import to_json

app = typer.Typer(help="Plan the distributed training of a PyTorch model.", no_args_is_help=True)


@app.callback()
def _main() -> None:
    """Plan the distributed training of a PyTorch model."""


@app.command("plan")
def plan_command(
    workload: Annotated[str, typer.Argument(help="file.py:name or package.module:name")],
    cluster: Annotated[str, typer.Option(help="TOML file or NODESxDEVICES@TYPE")],
    mesh: Annotated[str | None, typer.Option(help="one stage's mesh, dp=2,tp=4")] = None,
    stages: Annotated[int | None, typer.Option(help="number of pipeline stages")] = None,
    microbatches: Annotated[int | None, typer.Option(help="microbatches of a step")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="name=value, an argument of the workload")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Find the fastest plan. Example: autoshard plan models/gpt.py:gpt_tiny --cluster 1x4@cpu"""
    try:
        options = PlanOptions(mesh=parse_mesh(mesh) if mesh else None, stages=stages, microbatches=microbatches)
        found = plan(load_workload(workload, dict(_setting(text) for text in set_ or [])), cluster, options)
    except AutoshardError as error:
        typer.echo(f"autoshard: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
    if json:
        typer.echo(to_json(found))
        return
    table = Table("configuration", "step (ms)", "fits")
    table.add_row("this plan", f"{found.predicted.step_time_s * 1e3:.3f}", "yes")
    for baseline in found.baselines:
        time = "-" if baseline.step_time_s is None else f"{baseline.step_time_s * 1e3:.3f}"
        table.add_row(baseline.name, time, "yes" if baseline.fits else "no")
    for index, stage in enumerate(found.stages):
        typer.echo(f"stage {index}: {stage.mesh}, segments {stage.segments[0]} to {stage.segments[1] - 1}")
    typer.echo(f"{found.microbatches} microbatches, schedule {found.schedule}, gap {found.solver.gap:.1e}")
    Console().print(table)


def _setting(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found:
        raise BadInput(f"--set {text} sets nothing", help="write name=value, for example --set depth=12")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    """Entry point of the `autoshard` command."""
    app()
