# Emitted by autoshard 0.1.0 from models/gpt.py:gpt_tiny for 1x4@A100-SXM-80GB. Yours to edit.
# Mesh dp=2,tp=2.
# Predicted step 3.6 ms (compute 1.1 ms, collectives 637 us, gradient sums 1.8 ms, optimizer 4 us), at most 3.2 MiB per
# device.
# Shapes in comments are a rank's own: b samples, s dim 1 of tokens, 64/tp its share of 64 over axis tp.

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# isort: split
from collectives import all_gather_invariant, all_reduce, keep_one, sum_gradient
from mesh import Mesh
from microbatch import MicrobatchStep
from operators import vocab_embedding
from parameters import GradientReducer, materialize, summed_groups

WORLD_SIZE = 4
MESH = {"dp": 2, "tp": 2}
MICROBATCHES = 1
BATCH_DIMS = {"tokens": 0, "targets": 0}  # the dim of each input that counts samples


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
        """x: b/dp s 64 -> b/dp s 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (32.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        q = self.q_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp s 16
        k = self.k_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp s 16
        v = self.v_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp s 16
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
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
        """x: b/dp s 64 -> b/dp s 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (32.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        x = F.gelu(self.up_proj(x), approximate="tanh")
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        down_proj_bias = keep_one(self.down_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(x, self.down_proj.weight, down_proj_bias)


class Block(nn.Module):
    """One rank's part of `blocks.*`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.attn_norm = nn.LayerNorm(64)
        self.attn = Attention(tp)
        self.mlp_norm = nn.LayerNorm(64)
        self.mlp = MLP(tp)

    def forward(self, x: Tensor, x_2: Tensor) -> Tensor:
        """x: b/dp s 64; x_2: b/dp s 64, partial over tp -> b/dp s 64, partial over tp"""
        x = x_2 + self.attn(self.attn_norm(x))
        # add up the partial sums of tp (32.0 KiB, 27 us forward)
        x_2 = all_reduce(x, self.tp)  # b/dp s 64
        return x + self.mlp(self.mlp_norm(x_2))


class GPT(nn.Module):
    """One rank's part of the model."""

    PLACEMENTS: ClassVar = {
        "embed_tokens.weight": {"tp": 0},
        "embed_positions.weight": {"tp": 0},
    }

    def __init__(self, dp: ProcessGroup, tp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.tp = tp
        self.embed_tokens = nn.Embedding(128 // tp.size(), 64)
        self.embed_positions = nn.Embedding(32 // tp.size(), 64)
        self.blocks = nn.ModuleList(Block(tp) for _ in range(4))
        self.norm = nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 128 // tp.size(), bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """tokens: b/dp s; targets: b/dp s -> scalar"""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # s
        x = vocab_embedding(tokens, self.embed_tokens.weight, 128, self.tp) + vocab_embedding(
            positions, self.embed_positions.weight, 32, self.tp
        )
        for block in self.blocks:
            # add up the partial sums of tp (32.0 KiB, 27 us forward)
            x_2 = all_reduce(x, self.tp)  # b/dp s 64
            x = block(x_2, x)  # b/dp s 64, partial over tp
        # add up the partial sums of tp (32.0 KiB, 27 us forward)
        x = all_reduce(x, self.tp)  # b/dp s 64
        # each rank of tp uses this for its own part: in backward, add up the gradients (32.0 KiB, 27 us backward)
        y = sum_gradient(self.norm(x), self.tp)
        logits = self.lm_head(y)  # b/dp s 128/tp
        # reshape needs all of dim 2, which tp splits (64.0 KiB, 26 us forward, 4 us backward)
        logits = all_gather_invariant(logits, dim=2, group=self.tp)  # b/dp s 128
        y = targets.flatten(0)  # b*s/dp
        # add up the partial sums of dp (8 B, 27 us forward)
        y_2 = all_reduce((y != -100).sum(), self.dp)  # scalar
        # add up the partial sums of dp (4 B, 27 us forward)
        return all_reduce(F.cross_entropy(logits.flatten(0, 1), y, reduction="sum") / y_2, self.dp)  # scalar


def build(device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[GPT, Mesh, MicrobatchStep]:
    """This rank's module (parameters not filled yet), its mesh, and what runs a training step of it.

    dtype: of everything of a floating dtype, left out: torch.float32 where the model has it.
    """
    mesh = Mesh(MESH)
    module = materialize(lambda: GPT(mesh.group("dp"), mesh.group("tp")), torch.float32, device, dtype)
    reducer = GradientReducer(module, summed_groups(module, mesh, ("dp",)))
    return module, mesh, MicrobatchStep(module, MICROBATCHES, BATCH_DIMS, reducer=reducer)
