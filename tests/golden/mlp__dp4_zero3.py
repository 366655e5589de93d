# Emitted by autoshard 0.1.0 from models/mlp.py:mlp for 1x4@A100-SXM-80GB. Yours to edit.
# Mesh dp=4.
# Predicted step 1.5 ms (compute 363 us, collectives 823 us, gradient sums 279 us, optimizer 1 us), at most 643.5 KiB
# per device.
# Shapes in comments are a rank's own: b samples, 64/dp its share of 64 over axis dp.

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# isort: split
from collectives import all_reduce, gather_again, gather_parameter
from mesh import Mesh
from microbatch import MicrobatchStep
from parameters import GradientReducer, materialize, summed_groups

WORLD_SIZE = 4
MESH = {"dp": 4}
MICROBATCHES = 1
BATCH_DIMS = {"x": 0, "targets": 0}  # the dim of each input that counts samples


class Block(nn.Module):
    """One rank's part of `blocks.*`."""

    PLACEMENTS: ClassVar = {
        "up_proj.weight": {"dp": 0},
        "down_proj.weight": {"dp": 0},
    }

    SUMMED: ClassVar = {
        "up_proj.bias": ("dp",),
        "down_proj.bias": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.up_proj = nn.Linear(64, 256 // dp.size())
        self.down_proj = nn.Linear(256, 64 // dp.size())
        self.down_proj.bias = nn.Parameter(torch.empty(64))
        self.up_proj.bias = nn.Parameter(torch.empty(256))

    def forward(self, x: Tensor) -> Tensor:
        """x: b/dp 64 -> b/dp 64"""
        # dp stores a part of it each: gather it for this use (64.0 KiB, 28 us forward, 28 us backward)
        up_proj_weight = gather_parameter(self.up_proj.weight, dim=0, group=self.dp)  # 256 64
        x = F.gelu(F.linear(x, up_proj_weight, self.up_proj.bias))
        # dp stores a part of it each: gather it for this use (64.0 KiB, 28 us forward, 28 us backward)
        down_proj_weight = gather_parameter(self.down_proj.weight, dim=0, group=self.dp)  # 64 256
        return F.linear(x, down_proj_weight, self.down_proj.bias)


class MLP(nn.Module):
    """One rank's part of the model."""

    PLACEMENTS: ClassVar = {
        "head.weight": {"dp": 0},
    }

    SUMMED: ClassVar = {
        "head.bias": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.blocks = nn.ModuleList(Block(dp) for _ in range(4))
        self.head = nn.Linear(64, 16 // dp.size())
        self.head.bias = nn.Parameter(torch.empty(16))

    @gather_again()
    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """x: b/dp 64; targets: b/dp -> scalar"""
        for block in self.blocks:
            x = x + block(x)
        # dp stores a part of it each: gather it for this use (4.0 KiB, 28 us forward, 28 us backward)
        head_weight = gather_parameter(self.head.weight, dim=0, group=self.dp)  # 16 64
        logits = F.linear(x, head_weight, self.head.bias)  # b/dp 16
        # add up the partial sums of dp (8 B, 31 us forward)
        y = all_reduce((targets != -100).sum(), self.dp)  # scalar
        # add up the partial sums of dp (4 B, 31 us forward)
        return all_reduce(F.cross_entropy(logits, targets, reduction="sum") / y, self.dp)  # scalar


def build(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[MLP, Mesh, MicrobatchStep]:
    """This rank's module (parameters not filled yet), its mesh, and what runs a training step of it.

    dtype: of everything of a floating dtype, left out: torch.float32 where the model has it.
    """
    mesh = Mesh(MESH)
    module = materialize(lambda: MLP(mesh.group("dp")), torch.float32, device, dtype)
    reducer = GradientReducer(module, summed_groups(module, mesh, ()))
    return module, mesh, MicrobatchStep(module, MICROBATCHES, BATCH_DIMS, reducer=reducer)
