# Emitted by autoshard 0.1.0 from models/llama.py:llama_tiny for 1x4@A100-SXM-80GB. Yours to edit.
# 2 stages, mesh tp=2; 2 microbatches, 1f1b.
# Predicted step 3.1 ms (compute 1.4 ms, collectives 547 us, optimizer 1 us, transfers 52 us, bubble 1.0 ms), at most
# 1.4 MiB per device.
# Shapes in comments are a rank's own: b samples, s dim 1 of tokens, 64/tp its share of 64 over axis tp.

import functools
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

# isort: split
import stage_0
import stage_1
from mesh import Mesh
from parameters import GradientReducer, materialize, summed_groups
from pipeline import Crossing, PipelineStep

WORLD_SIZE = 4
MICROBATCHES = 2
BATCH_DIMS = {"tokens": 0, "targets": 0}  # the dim of each input that counts samples
MESHES = [  # of each stage: its axes, and the ranks that they are laid over
    ({"tp": 2}, range(2)),
    ({"tp": 2}, range(2, 4)),
]
STAGES = [  # of each stage: its class, and the axes whose groups that takes
    (stage_0.Llama, ("tp",)),
    (stage_1.Llama, ("tp",)),
]
ROWS = [  # of each stage, in order: F forward, B backward of a microbatch
    "F0 F1 B0 B1",
    "F0 B0 F1 B1",
]
CROSSINGS = [
    Crossing("x", 0, 1, {}, {}),
    Crossing("cos", 0, 1, {}, {}, gradient=False),
    Crossing("sin", 0, 1, {}, {}, gradient=False),
]
TIED = []


def crossing_shapes(
    inputs: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None = None
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every value that crosses, for a microbatch whose inputs have these shapes over all of dp."""
    b = inputs["tokens"][0]
    s = inputs["tokens"][1]
    return {
        "x": ((b, s, 64), dtype or torch.float32),
        "cos": ((s, 16), dtype or torch.float32),
        "sin": ((s, 16), dtype or torch.float32),
    }


def build(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[nn.Module, Mesh, PipelineStep]:
    """This rank's stage (parameters not filled yet), its mesh, and what runs a training step of the pipeline.

    dtype: of everything of a floating dtype, left out: torch.float32 where the model has it.
    """
    meshes = [Mesh(axes, ranks) for axes, ranks in MESHES]
    number = next(number for number, mesh in enumerate(meshes) if dist.get_rank() in mesh)
    mesh, (stage, axes) = meshes[number], STAGES[number]
    module = materialize(lambda: stage(*(mesh.group(axis) for axis in axes)), torch.float32, device, dtype)
    reducer = GradientReducer(module, summed_groups(module, mesh, ()))
    shapes = functools.partial(crossing_shapes, dtype=dtype)
    step = PipelineStep(module, meshes, ROWS, CROSSINGS, BATCH_DIMS, shapes, reducer=reducer, tied=TIED, device=device)
    return module, mesh, step
