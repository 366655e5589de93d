"""The strings of an emitted folder's README: how to launch, the plan as tables, what each file is."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from autoshard.plan import Baseline, Plan, StagePlan
from autoshard.program import Program

FILES: Mapping[str, str] = {
    "model.py": "the sharded modules; `build` makes this rank's part of them",
    "train.py": "a training script for torchrun; your own can take its place",
    "test_equivalence.py": "this program against the original model on CPU processes, by pytest; needs autoshard",
    "plan.json": "the plan: read it, edit it, compile from it again",
    "weights.pt": "the weights of the original model when it was compiled, a state dict",
    "constants.pt": "buffers that no state dict holds",
    "report.html": "the plan to look at",
    "README.md": "this page",
    "collectives.py": "every change of a tensor's placement over the ranks, with its gradient",
    "operators.py": "operators on split tensors that are more than themselves: embedding, loss, batch norm, dropout",
    "mesh.py": "joining the ranks; named axes over them; this rank's share of a batch",
    "parameters.py": "loading, initializing and putting together parameters; sums and clipping of gradients",
    "microbatch.py": "one training step in microbatches",
    "pipeline.py": "one training step over pipeline stages",
    "transfer.py": "moving a tensor from one stage's ranks to another's",
    "checkpoint.py": "checkpoints that any layout writes and any layout reads",
}


def readme_fields(program: Program, plan: Plan, world_size: int, names: Iterable[str]) -> Mapping[str, Any]:
    """What the template is filled with. names: of all other files."""
    nodes, per_node = _nodes(plan.cluster, world_size)
    inputs = [f"`{found.name}` {found.type.shape}" for found in program.inputs.values()]
    device = "cpus-per-task" if plan.cluster.endswith("@cpu") else "gpus-per-node"
    return {
        "title": plan.workload.rpartition(":")[2] or "The model",
        "ranks_text": "one rank" if world_size == 1 else f"{world_size} ranks",
        "workload": plan.workload,
        "cluster": plan.cluster,
        "nodes": nodes,
        "last_node": nodes - 1,
        "per_node": per_node,
        "slurm_devices": f"#SBATCH --{device}={per_node}",
        "sentence": _sentence(plan),
        "stages": [_stage_row(number, stage) for number, stage in enumerate(plan.stages)],
        "breakdown": [(name, _ms(time)) for name, time in plan.predicted.breakdown.items()],
        "step_ms": _ms(plan.predicted.step_time_s),
        "baselines": [_baseline_row(baseline) for baseline in plan.baselines],
        "files": [(name, _what(name)) for name in sorted({*names, "README.md"})],
        "loop": _LOOP,
        "inputs": ", ".join(inputs),
    }


_LOOP = """\
import torch

from mesh import start
from model import BATCH_DIMS, build
from parameters import clip_grad_norm, load_full

device = start()  # joins the ranks that torchrun started
module, mesh, step = build(device)  # this rank's part, its parameters not filled yet
load_full(module, mesh, "weights.pt")
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
for batch in batches:  # your data: whole tensors by the names of the inputs, the same on every rank
    inputs = {name: value.to(device) for name, value in mesh.share(batch, BATCH_DIMS).items()}
    optimizer.zero_grad()
    loss = step.step(inputs)  # forward and backward of all microbatches; gradients are summed over the ranks
    clip_grad_norm(module, mesh, 1.0, counted_elsewhere=step.counted_elsewhere)
    optimizer.step()
"""


def _nodes(cluster: str, world_size: int) -> tuple[int, int]:
    """Nodes and ranks on each for the example of several nodes; the cluster's own where it has several."""
    found = re.match(r"(\d+)x(\d+)@", cluster)
    if found and int(found[1]) > 1 and int(found[1]) * int(found[2]) == world_size:
        return int(found[1]), int(found[2])
    return (2, world_size // 2) if world_size % 2 == 0 else (world_size, 1)


def _sentence(plan: Plan) -> str:
    stages = "One stage" if len(plan.stages) == 1 else f"{len(plan.stages)} pipeline stages"
    parts = f"{plan.microbatches} microbatch{'es' if plan.microbatches > 1 else ''} a step"
    schedule = "" if plan.schedule == "none" else f", schedule {plan.schedule}"
    idle = f" Devices {', '.join(map(str, plan.idle_devices))} of the cluster stay idle." if plan.idle_devices else ""
    gap = "No plan" if plan.solver.gap <= 1e-6 else f"No plan more than {plan.solver.gap:.1%}"
    proof = f"{gap} among those that the search was left to choose from is faster by its prices."
    return f"{stages}, {parts}{schedule}, optimizer {plan.optimizer}.\n{proof}{idle}"


def _stage_row(number: int, stage: StagePlan) -> tuple[str, ...]:
    seen = stage.predicted
    kept = (seen.parameter_bytes, seen.gradient_bytes, seen.optimizer_bytes)
    devices = stage.mesh.devices
    run = devices == tuple(range(devices[0], devices[-1] + 1))
    return (
        str(number),
        str(stage.mesh),
        f"{devices[0]} to {devices[-1]}" if run and len(devices) > 2 else ", ".join(map(str, devices)),
        _ms(seen.forward_s),
        _ms(seen.backward_s),
        _mib(seen.peak_memory_bytes),
        ", ".join(_mib(size) for size in kept),
        _mib(seen.saved_bytes_per_microbatch),
        str(seen.in_flight),
    )


def _baseline_row(baseline: Baseline) -> tuple[str, str, str, str]:
    time = "-" if baseline.step_time_s is None else _ms(baseline.step_time_s)
    memory = "-" if baseline.peak_memory_bytes is None else _mib(baseline.peak_memory_bytes)
    return baseline.name, time, memory, "yes" if baseline.fits else "no"


def _what(name: str) -> str:
    """One line about a file."""
    stage = re.fullmatch(r"stage_(\d+)\.py", name)
    return f"the sharded modules of stage {stage[1]}" if stage else FILES.get(name, "")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
