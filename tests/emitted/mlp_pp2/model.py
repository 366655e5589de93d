"""Written by hand: models/mlp.py:mlp in two stages of two blocks, one device each, 4 microbatches, 1f1b."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from mesh import Mesh
from pipeline import Crossing, PipelineStep, Shapes
from stage_0 import Stage0
from stage_1 import Stage1
from torch import nn

WORLD_SIZE = 2
BATCH_DIMS: Mapping[str, int | None] = {"x": 0, "targets": 0}
ROWS = ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
CROSSINGS = (Crossing("hidden", 0, 1),)


def build(device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[nn.Module, Mesh, PipelineStep]:
    """This rank's stage, its parameters not filled yet, its mesh and the training step."""
    meshes = [Mesh({"dp": 1}, [0]), Mesh({"dp": 1}, [1])]
    index = next(index for index, mesh in enumerate(meshes) if torch.distributed.get_rank() in mesh)
    stage = (Stage0, Stage1)[index]().to(device=device, dtype=dtype)

    def shapes(inputs: Mapping[str, tuple[int, ...]]) -> Shapes:
        return {"hidden": (inputs["x"], dtype or torch.float32)}

    step = PipelineStep(stage, meshes, ROWS, CROSSINGS, BATCH_DIMS, shapes, device=device)
    return stage, meshes[index], step
