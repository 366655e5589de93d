"""The main job on this machine's CPU: a small GPT is compiled for four ranks and trained beside the original.

Both train on the text of Python's own standard library, from the same weights, on the same batches: their losses must
agree but for rounding.
"""

import importlib
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autoshard import api
from autoshard.compiled import check_folder
from autoshard.errors import BadInput
from autoshard.loading import load_workload
from autoshard.placement import format_layout
from autoshard.plan import Plan
from autoshard.ranks import run_ranks

WORKLOAD, CLUSTER, MESH, RANKS = "autoshard.demo_model:byte_gpt", "1x4@cpu", "dp=2,tp=2", 4
TEXTS = ("argparse.py", "ast.py", "dataclasses.py", "datetime.py", "functools.py", "inspect.py", "typing.py")
LEARNING_RATE, MAX_NORM = 1e-3, 1.0
TOLERANCE = 1e-3  # relative, of a loss; float32 runs drift apart by rounding, by 1e-6 in 30 steps
ROWS = 30  # of the table of losses
TIMEOUT_S = 1800.0

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Run:
    """One training: the loss of each step, and the seconds that all of them took."""

    losses: tuple[float, ...]
    seconds: float


def run_demo(out: Path | None, steps: int) -> int:
    """Compile, train both, compare and print. out: the folder for the emitted program, a new one if None.

    Returns the exit code: 0, or 1 where the losses differ by more than `TOLERANCE`. Raises AutoshardError.
    """
    if steps < 1:
        raise BadInput(f"{steps} steps", help="give --steps 1 or more")
    if out is not None:
        check_folder(out)
    console = Console()
    workload = load_workload(WORKLOAD, {})
    batches = make_batches(read_text(), workload.args[0].shape, steps)
    count = sum(parameter.numel() for parameter in workload.model.parameters())
    console.print(f"[bold]{WORKLOAD}[/]: a GPT over bytes, {count / 1e6:.1f} million parameters")
    console.print(f"compiling it for {CLUSTER}, mesh {MESH} (data and tensor parallel) ...", end=" ")
    began = time.perf_counter()
    compiled = api.compile(workload, cluster=CLUSTER, mesh=MESH)
    folder = compiled.save(out or Path(tempfile.mkdtemp(prefix="autoshard-demo-")))
    console.print(f"{time.perf_counter() - began:.1f} s")
    print_plan(console, compiled.plan)
    console.print(f"training on Python's standard library, {steps} steps, one process ...", end=" ")
    # In a process of its own as well: what computes in this one would be in the way of forking from it.
    original = run_ranks(train_original, 1, workload, batches, timeout_s=TIMEOUT_S)[0]
    console.print(f"{original.seconds:.1f} s")
    console.print(f"training the emitted program, {RANKS} processes ...", end=" ")
    emitted = run_ranks(train_emitted, RANKS, folder, batches, timeout_s=TIMEOUT_S)[0]
    console.print(f"{emitted.seconds:.1f} s")
    difference = max(abs(a - b) for a, b in zip(original.losses, emitted.losses, strict=True))
    equal = all(abs(a - b) <= TOLERANCE * abs(a) for a, b in zip(original.losses, emitted.losses, strict=True))
    print_losses(console, original.losses, emitted.losses)
    verdict = "the same training, but for float32 rounding" if equal else "[red]not the same training[/]"
    console.print(f"largest difference {difference:.1e}: {verdict}\n")
    console.print("the emitted program, which runs without autoshard:")
    console.print(f"  read it      {folder / 'model.py'}", soft_wrap=True)
    console.print(
        f"  run it       cd {folder} && torchrun --nproc-per-node {RANKS} train.py --steps 10", soft_wrap=True
    )
    console.print(f"  verify it    autoshard verify {folder}", soft_wrap=True)
    return 0 if equal else 1


# Text -----------------------------------------------------------------------------------------------------------------


def read_text() -> bytes:
    """A few files of this Python's standard library, put together."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = [folder / name for name in TEXTS if (folder / name).is_file()]
    text = b"".join(path.read_bytes() for path in found)
    if not text:
        raise BadInput(f"this Python's standard library is not in '{folder}' as text", help="use a Python that has it")
    return text


def make_batches(text: bytes, shape: Sequence[int], steps: int) -> list[Batch]:
    """`steps` global batches of `shape` (samples, bytes) from random places of the text; targets are the next bytes."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    samples, length = shape
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(values) - length, (steps, samples), generator=generator)
    pieces = values[starts.unsqueeze(-1) + torch.arange(length + 1)]
    return [{"tokens": piece[:, :-1].contiguous(), "targets": piece[:, 1:].contiguous()} for piece in pieces]


# Training -------------------------------------------------------------------------------------------------------------


def train_original(rank: int, ranks: int, workload: Any, batches: Sequence[Batch]) -> Run:
    """An ordinary training loop."""
    model = workload.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, began = [], time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        loss = model(batch["tokens"], batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return Run(tuple(losses), time.perf_counter() - began)


def train_emitted(rank: int, ranks: int, folder: Path, batches: Sequence[Batch]) -> Run:
    """The same loop around the modules of `folder`, on one of its ranks."""
    sys.path.insert(0, str(folder))
    model, parameters = importlib.import_module("model"), importlib.import_module("parameters")
    module, mesh, step = model.build()
    parameters.load_full(module, mesh, folder / "weights.pt")
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    losses, began = [], time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        loss = step.step(mesh.share(batch, model.BATCH_DIMS))
        parameters.clip_grad_norm(module, mesh, MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return Run(tuple(losses), time.perf_counter() - began)


# Printing -------------------------------------------------------------------------------------------------------------


def print_plan(console: Console, plan: Plan) -> None:
    """How parameters are stored, the plan's price, and those of other configurations."""
    for stage in plan.stages:
        table = Table(
            "parameter", "layout", title=f"parameters over the mesh {stage.mesh}: I whole, S(d) split along d"
        )
        stored = {re.sub(r"\.\d+\.", ".*.", name): layout for name, layout in stage.parameters.items()}
        for name, layout in stored.items():
            table.add_row(name, format_layout(layout, stage.mesh.axes))
        console.print(table)
    table = Table("configuration", "step (ms)", "memory (MiB)", "fits", title="the plan, and others by the same prices")
    peak = max(plan.predicted.peak_memory_bytes)
    table.add_row(f"this plan, {MESH}", f"{plan.predicted.step_time_s * 1e3:.2f}", f"{peak / 2**20:.1f}", "yes")
    for other in plan.baselines:
        time_ms = "-" if other.step_time_s is None else f"{other.step_time_s * 1e3:.2f}"
        memory = "-" if other.peak_memory_bytes is None else f"{other.peak_memory_bytes / 2**20:.1f}"
        table.add_row(other.name, time_ms, memory, "yes" if other.fits else "no")
    console.print(table)


def print_losses(console: Console, original: Sequence[float], emitted: Sequence[float]) -> None:
    """Both curves side by side, every step or every few steps, with bars."""
    width = 24
    top, stride = max(max(original), max(emitted)), -(-len(original) // ROWS)
    table = Table("step", "one process", f"{RANKS} ranks", "difference", "loss", title="losses")
    for number, (a, b) in enumerate(zip(original, emitted, strict=True)):
        if number % stride == 0 or number == len(original) - 1:
            bar = "█" * round(width * b / top) if top > 0 else ""
            table.add_row(str(number + 1), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}", bar)
    console.print(table)
