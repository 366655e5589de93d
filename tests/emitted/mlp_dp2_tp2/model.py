"""Written by hand: models/mlp.py:mlp on dp=2,tp=2, hidden units split over tp.

Letters: b batch, d width, f hidden units, c classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from collectives import all_reduce, sum_gradient
from mesh import Mesh
from microbatch import MicrobatchStep
from parameters import GradientReducer
from torch import Tensor, nn

WORLD_SIZE = 4
BATCH_DIMS: Mapping[str, int | None] = {"x": 0, "targets": 0}


class Block(nn.Module):
    """Up, GELU, down."""

    PLACEMENTS: Mapping[str, Mapping[str, int]] = {
        "up_proj.weight": {"tp": 0},
        "up_proj.bias": {"tp": 0},
        "down_proj.weight": {"tp": 1},
    }

    def __init__(self, mesh: Mesh, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.tp = mesh.group("tp")
        self.up_proj = nn.Linear(width, hidden // mesh.size("tp"))  # d -> f/tp
        self.down_proj = nn.Linear(hidden // mesh.size("tp"), width)  # f/tp -> d

    def forward(self, x: Tensor) -> Tensor:
        x = sum_gradient(x, self.tp)
        x = F.gelu(self.up_proj(x))  # b/dp f/tp
        x = all_reduce(F.linear(x, self.down_proj.weight), self.tp)  # b/dp d
        return x + self.down_proj.bias


class MLP(nn.Module):
    """Residual blocks under a linear classifier."""

    totals: dict[str, Tensor] | None = None

    def __init__(self, mesh: Mesh, width: int = 64, depth: int = 4, classes: int = 16) -> None:
        super().__init__()
        self.dp = mesh.group("dp")
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def denominators(self, targets: Tensor) -> dict[str, Tensor]:
        """Valid targets of the batch."""
        return {"valid": all_reduce((targets != -100).sum(), self.dp)}

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)  # b/dp d
        logits = self.head(x)  # b/dp c
        loss = F.cross_entropy(logits, targets, reduction="sum")
        totals = self.totals or self.denominators(targets)
        return all_reduce(loss, self.dp) / totals["valid"]


def build(device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[MLP, Mesh, MicrobatchStep]:
    """This rank's module, its parameters not filled yet, the mesh and the training step."""
    mesh = Mesh({"dp": 2, "tp": 2})
    module = MLP(mesh).to(device=device, dtype=dtype)
    reducer = GradientReducer(module, {name: (mesh.group("dp"),) for name, _ in module.named_parameters()})
    return module, mesh, MicrobatchStep(module, 2, BATCH_DIMS, reducer=reducer)
