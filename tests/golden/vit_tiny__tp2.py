# Emitted by autoshard 0.1.0 from models/vit.py:vit_tiny for 1x2@A100-SXM-80GB. Yours to edit.
# Mesh tp=2.
# Predicted step 1.7 ms (compute 1.2 ms, collectives 585 us, optimizer 4 us), at most 3.3 MiB per device.
# Shapes in comments are a rank's own: b samples, 64/tp its share of 64 over axis tp.

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# isort: split
from collectives import all_gather_invariant, all_reduce, keep_one, sum_gradient
from mesh import Mesh
from microbatch import MicrobatchStep
from parameters import GradientReducer, materialize, summed_groups

WORLD_SIZE = 2
MESH = {"tp": 2}
MICROBATCHES = 1
BATCH_DIMS = {"images": 0, "targets": 0}  # the dim of each input that counts samples


class Attention(nn.Module):
    """One rank's part of `blocks.*.attn`."""

    PLACEMENTS: ClassVar = {
        "q_proj.weight": {"tp": 0},
        "q_proj.bias": {"tp": 0},
        "k_proj.weight": {"tp": 0},
        "k_proj.bias": {"tp": 0},
        "v_proj.weight": {"tp": 0},
        "v_proj.bias": {"tp": 0},
        "o_proj.weight": {"tp": 1},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.q_proj = nn.Linear(64, 64 // tp.size())
        self.k_proj = nn.Linear(64, 64 // tp.size())
        self.v_proj = nn.Linear(64, 64 // tp.size())
        self.o_proj = nn.Linear(64 // tp.size(), 64)

    def forward(self, x: Tensor) -> Tensor:
        """x: b 17 64 -> b 17 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (34.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        q = self.q_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b 4/tp 17 16
        k = self.k_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b 4/tp 17 16
        v = self.v_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b 4/tp 17 16
        y = F.scaled_dot_product_attention(q, k, v)
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        o_proj_bias = keep_one(self.o_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(y.transpose(1, 2).flatten(2), self.o_proj.weight, o_proj_bias)


class MLP(nn.Module):
    """One rank's part of `blocks.*.mlp`."""

    PLACEMENTS: ClassVar = {
        "up_proj.weight": {"tp": 0},
        "up_proj.bias": {"tp": 0},
        "down_proj.weight": {"tp": 1},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.up_proj = nn.Linear(64, 256 // tp.size())
        self.down_proj = nn.Linear(256 // tp.size(), 64)

    def forward(self, x: Tensor) -> Tensor:
        """x: b 17 64 -> b 17 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (34.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        x = F.gelu(self.up_proj(x))
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        down_proj_bias = keep_one(self.down_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(x, self.down_proj.weight, down_proj_bias)


class Block(nn.Module):
    """One rank's part of `blocks.*`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.attn_norm = nn.LayerNorm(64, eps=1e-06)
        self.attn = Attention(tp)
        self.mlp_norm = nn.LayerNorm(64, eps=1e-06)
        self.mlp = MLP(tp)

    def forward(self, x: Tensor) -> Tensor:
        """x: b 17 64 -> b 17 64"""
        # add up the partial sums of tp (34.0 KiB, 27 us forward)
        y = all_reduce(self.attn(self.attn_norm(x)), self.tp)  # b 17 64
        x = x + y
        # add up the partial sums of tp (34.0 KiB, 27 us forward)
        y = all_reduce(self.mlp(self.mlp_norm(x)), self.tp)  # b 17 64
        return x + y


class ViT(nn.Module):
    """One rank's part of the model."""

    PLACEMENTS: ClassVar = {
        "class_token": {"tp": 2},
        "embed_positions": {"tp": 2},
        "patch_embed.weight": {"tp": 0},
        "patch_embed.bias": {"tp": 0},
        "head.weight": {"tp": 0},
        "head.bias": {"tp": 0},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.class_token = nn.Parameter(torch.empty(1, 1, 64 // tp.size()))
        self.embed_positions = nn.Parameter(torch.empty(1, 17, 64 // tp.size()))
        self.patch_embed = nn.Conv2d(3, 64 // tp.size(), 8, stride=8)
        self.blocks = nn.ModuleList(Block(tp) for _ in range(4))
        self.norm = nn.LayerNorm(64, eps=1e-06)
        self.head = nn.Linear(64, 8 // tp.size())

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        """images: b 3 32 32; targets: b -> scalar"""
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)  # b 16 64/tp
        class_token = self.class_token.expand(images.shape[0], -1, -1)  # b 1 64/tp
        x = torch.cat((class_token, patches), dim=1) + self.embed_positions
        # layer_norm needs all of dim 2, which tp splits (34.0 KiB, 26 us forward, 4 us backward)
        x = all_gather_invariant(x, dim=2, group=self.tp)  # b 17 64
        for block in self.blocks:
            x = block(x)
        # each rank of tp uses this for its own part: in backward, add up the gradients (2.0 KiB, 27 us backward)
        y = sum_gradient(self.norm(x[:, 0]), self.tp)
        logits = self.head(y)  # b 8/tp
        # cross_entropy needs all of dim 1, which tp splits (256 B, 26 us forward, 4 us backward)
        logits = all_gather_invariant(logits, dim=1, group=self.tp)  # b 8
        return F.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum()


def build(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[ViT, Mesh, MicrobatchStep]:
    """This rank's module (parameters not filled yet), its mesh, and what runs a training step of it.

    dtype: of everything of a floating dtype, left out: torch.float32 where the model has it.
    """
    mesh = Mesh(MESH)
    module = materialize(lambda: ViT(mesh.group("tp")), torch.float32, device, dtype)
    reducer = GradientReducer(module, summed_groups(module, mesh, ()))
    return module, mesh, MicrobatchStep(module, MICROBATCHES, BATCH_DIMS, reducer=reducer)
