# Emitted by autoshard 0.1.0 from models/resnet.py:resnet_tiny for 1x4@A100-SXM-80GB. Yours to edit.
# Mesh dp=4.
# Predicted step 2.5 ms (compute 993 us, collectives 966 us, gradient sums 527 us), at most 3.1 MiB per device.
# Shapes in comments are a rank's own: b samples, 64/dp its share of 64 over axis dp.

from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# isort: split
from collectives import all_gather_invariant, all_reduce, shard
from mesh import Mesh
from microbatch import MicrobatchStep
from parameters import GradientReducer, fill_buffers, materialize, summed_groups

WORLD_SIZE = 4
MESH = {"dp": 4}
MICROBATCHES = 1
BATCH_DIMS = {"images": 0, "targets": 0}  # the dim of each input that counts samples


class Bottleneck(nn.Module):
    """One rank's part of `blocks.*`."""

    SUMMED: ClassVar = {
        "conv1.weight": ("dp",),
        "conv2.weight": ("dp",),
        "conv3.weight": ("dp",),
        "shortcut.0.weight": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.conv1 = nn.Conv2d(8, 8, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 32, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)
        self.shortcut = nn.ModuleList([nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)])

    def forward(self, x: Tensor) -> Tensor:
        """x: b/dp 8 16 16 -> b/dp 32 16 16"""
        # batch_norm needs all of dim 0, which dp splits (64.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv1(x), dim=0, group=self.dp)  # b 8 16 16
        # each rank of dp keeps its share of dim 0 (64.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn1(y), dim=0, group=self.dp)  # b/dp 8 16 16
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (64.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv2(y), dim=0, group=self.dp)  # b 8 16 16
        # each rank of dp keeps its share of dim 0 (64.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn2(y), dim=0, group=self.dp)  # b/dp 8 16 16
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (256.0 KiB, 29 us forward, 4 us backward)
        y = all_gather_invariant(self.conv3(y), dim=0, group=self.dp)  # b 32 16 16
        y = self.bn3(y)
        # batch_norm needs all of dim 0, which dp splits (256.0 KiB, 29 us forward, 4 us backward)
        y_2 = all_gather_invariant(self.shortcut[0](x), dim=0, group=self.dp)  # b 32 16 16
        # each rank of dp keeps its share of dim 0 (256.0 KiB, 4 us forward, 29 us backward)
        y = shard(self.shortcut[1](y_2) + y, dim=0, group=self.dp)  # b/dp 32 16 16
        return F.relu(y)


class Bottleneck_2(nn.Module):
    """One rank's part of `blocks.*`."""

    SUMMED: ClassVar = {
        "conv1.weight": ("dp",),
        "conv2.weight": ("dp",),
        "conv3.weight": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.conv1 = nn.Conv2d(32, 8, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.conv3 = nn.Conv2d(8, 32, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        """x: b/dp 32 16 16 -> b/dp 32 16 16"""
        # batch_norm needs all of dim 0, which dp splits (64.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv1(x), dim=0, group=self.dp)  # b 8 16 16
        # each rank of dp keeps its share of dim 0 (64.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn1(y), dim=0, group=self.dp)  # b/dp 8 16 16
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (64.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv2(y), dim=0, group=self.dp)  # b 8 16 16
        # each rank of dp keeps its share of dim 0 (64.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn2(y), dim=0, group=self.dp)  # b/dp 8 16 16
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (256.0 KiB, 29 us forward, 4 us backward)
        y = all_gather_invariant(self.conv3(y), dim=0, group=self.dp)  # b 32 16 16
        y = self.bn3(y)
        # each rank of dp keeps its share of dim 0 (256.0 KiB, 4 us forward, 29 us backward)
        y = shard(y, dim=0, group=self.dp)  # b/dp 32 16 16
        return F.relu(x + y)


class Bottleneck_3(nn.Module):
    """One rank's part of `blocks.*`."""

    SUMMED: ClassVar = {
        "conv1.weight": ("dp",),
        "conv2.weight": ("dp",),
        "conv3.weight": ("dp",),
        "shortcut.0.weight": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.conv1 = nn.Conv2d(32, 16, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 64, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)
        self.shortcut = nn.ModuleList([nn.Conv2d(32, 64, 1, stride=2, bias=False), nn.BatchNorm2d(64)])

    def forward(self, x: Tensor) -> Tensor:
        """x: b/dp 32 16 16 -> b/dp 64 8 8"""
        # batch_norm needs all of dim 0, which dp splits (128.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv1(x), dim=0, group=self.dp)  # b 16 16 16
        # each rank of dp keeps its share of dim 0 (128.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn1(y), dim=0, group=self.dp)  # b/dp 16 16 16
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (32.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv2(y), dim=0, group=self.dp)  # b 16 8 8
        # each rank of dp keeps its share of dim 0 (32.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn2(y), dim=0, group=self.dp)  # b/dp 16 8 8
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (128.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv3(y), dim=0, group=self.dp)  # b 64 8 8
        y = self.bn3(y)
        # batch_norm needs all of dim 0, which dp splits (128.0 KiB, 28 us forward, 4 us backward)
        y_2 = all_gather_invariant(self.shortcut[0](x), dim=0, group=self.dp)  # b 64 8 8
        # each rank of dp keeps its share of dim 0 (128.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.shortcut[1](y_2) + y, dim=0, group=self.dp)  # b/dp 64 8 8
        return F.relu(y)


class Bottleneck_4(nn.Module):
    """One rank's part of `blocks.*`."""

    SUMMED: ClassVar = {
        "conv1.weight": ("dp",),
        "conv2.weight": ("dp",),
        "conv3.weight": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.conv1 = nn.Conv2d(64, 16, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.conv3 = nn.Conv2d(16, 64, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        """x: b/dp 64 8 8 -> b/dp 64 8 8"""
        # batch_norm needs all of dim 0, which dp splits (32.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv1(x), dim=0, group=self.dp)  # b 16 8 8
        # each rank of dp keeps its share of dim 0 (32.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn1(y), dim=0, group=self.dp)  # b/dp 16 8 8
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (32.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv2(y), dim=0, group=self.dp)  # b 16 8 8
        # each rank of dp keeps its share of dim 0 (32.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn2(y), dim=0, group=self.dp)  # b/dp 16 8 8
        y = F.relu(y)
        # batch_norm needs all of dim 0, which dp splits (128.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv3(y), dim=0, group=self.dp)  # b 64 8 8
        y = self.bn3(y)
        # each rank of dp keeps its share of dim 0 (128.0 KiB, 4 us forward, 28 us backward)
        y = shard(y, dim=0, group=self.dp)  # b/dp 64 8 8
        return F.relu(x + y)


class ResNet(nn.Module):
    """One rank's part of the model."""

    SUMMED: ClassVar = {
        "conv1.weight": ("dp",),
        "head.weight": ("dp",),
        "head.bias": ("dp",),
    }

    def __init__(self, dp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([Bottleneck(dp), Bottleneck_2(dp), Bottleneck_3(dp), Bottleneck_4(dp)])
        self.head = nn.Linear(64, 8)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """images: b/dp 3 16 16; targets: b/dp -> scalar"""
        # batch_norm needs all of dim 0, which dp splits (64.0 KiB, 28 us forward, 4 us backward)
        y = all_gather_invariant(self.conv1(images), dim=0, group=self.dp)  # b 8 16 16
        # each rank of dp keeps its share of dim 0 (64.0 KiB, 4 us forward, 28 us backward)
        y = shard(self.bn1(y), dim=0, group=self.dp)  # b/dp 8 16 16
        x = F.relu(y)
        x = self.blocks[0](x)  # b/dp 32 16 16
        x = self.blocks[1](x)
        x = self.blocks[2](x)  # b/dp 64 8 8
        x = self.blocks[3](x)
        logits = self.head(x.mean((2, 3)))  # b/dp 8
        # sum needs all of dim 0, which dp splits (8 B, 28 us forward)
        y = all_gather_invariant(targets != -100, dim=0, group=self.dp)  # b
        # add up the partial sums of dp (4 B, 31 us forward)
        y_2 = all_reduce(F.cross_entropy(logits, targets, reduction="sum"), self.dp)  # scalar
        return y_2 / y.sum()


def build(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[ResNet, Mesh, MicrobatchStep]:
    """This rank's module (parameters not filled yet), its mesh, and what runs a training step of it.

    dtype: of everything of a floating dtype, left out: torch.float32 where the model has it.
    """
    mesh = Mesh(MESH)
    module = materialize(lambda: ResNet(mesh.group("dp")), torch.float32, device, dtype)
    fill_buffers(module, Path(__file__).with_name("constants.pt"))
    reducer = GradientReducer(module, summed_groups(module, mesh, ()))
    return module, mesh, MicrobatchStep(module, MICROBATCHES, BATCH_DIMS, reducer=reducer)
