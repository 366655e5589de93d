# Stage 1 of 2 of models/llama.py:llama_tiny, emitted by autoshard 0.1.0. Yours to edit.
# Mesh: tp=2. Shapes in comments are a rank's own: b samples, s dim 1 of tokens, 64/tp its share of 64 over axis tp.

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# isort: split
from collectives import all_gather_invariant, all_reduce, sum_gradient


class RMSNorm(nn.Module):
    """One rank's part of `model.layers.*.input_layernorm` and 2 more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64))

    def forward(self, x: Tensor) -> Tensor:
        """x: b s 64 -> b s 64"""
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-05)


class Attention(nn.Module):
    """One rank's part of `model.layers.*.self_attn`."""

    PLACEMENTS: ClassVar = {
        "q_proj.weight": {"tp": 0},
        "k_proj.weight": {"tp": 0},
        "v_proj.weight": {"tp": 0},
        "o_proj.weight": {"tp": 1},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.q_proj = nn.Linear(64, 64 // tp.size(), bias=False)
        self.k_proj = nn.Linear(64, 32 // tp.size(), bias=False)
        self.v_proj = nn.Linear(64, 32 // tp.size(), bias=False)
        self.o_proj = nn.Linear(64 // tp.size(), 64, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: b s 64; cos: s 16; sin: s 16 -> b s 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (16.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        q = self.q_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b 4/tp s 16
        k = self.k_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b 2/tp s 16
        v = self.v_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b 2/tp s 16
        first, second = q.split(8, dim=-1)  # b 4/tp s 8
        q = q * cos + torch.cat((-second, first), dim=-1) * sin
        first, second = k.split(8, dim=-1)  # b 2/tp s 8
        k = k * cos + torch.cat((-second, first), dim=-1) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """One rank's part of `model.layers.*.mlp`."""

    PLACEMENTS: ClassVar = {
        "gate_proj.weight": {"tp": 0},
        "up_proj.weight": {"tp": 0},
        "down_proj.weight": {"tp": 1},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.gate_proj = nn.Linear(64, 128 // tp.size(), bias=False)
        self.up_proj = nn.Linear(64, 128 // tp.size(), bias=False)
        self.down_proj = nn.Linear(128 // tp.size(), 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: b s 64 -> b s 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (16.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        x = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(x)


class DecoderLayer(nn.Module):
    """One rank's part of `model.layers.*`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention(tp)
        self.post_attention_layernorm = RMSNorm()
        self.mlp = MLP(tp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: b s 64; cos: s 16; sin: s 16 -> b s 64"""
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        y = all_reduce(self.self_attn(self.input_layernorm(x), cos, sin), self.tp)  # b s 64
        x = x + y
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        y = all_reduce(self.mlp(self.post_attention_layernorm(x)), self.tp)  # b s 64
        return x + y


class Decoder(nn.Module):
    """One rank's part of `model`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): DecoderLayer(tp) for i in range(2, 4)})
        self.norm = RMSNorm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: b s 64; cos: s 16; sin: s 16 -> b s 64"""
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    """One rank's part of stage 1 of 2."""

    PLACEMENTS: ClassVar = {
        "lm_head.weight": {"tp": 0},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.model = Decoder(tp)
        self.lm_head = nn.Linear(64, 128 // tp.size(), bias=False)

    def forward(self, targets: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """targets: b s; x: b s 64; cos: s 16; sin: s 16 -> scalar"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (16.0 KiB, 27 us backward)
        y = sum_gradient(self.model(x, cos, sin), self.tp)
        logits = self.lm_head(y)  # b s 128/tp
        # reshape needs all of dim 2, which tp splits (32.0 KiB, 26 us forward, 4 us backward)
        logits = all_gather_invariant(logits, dim=2, group=self.tp)  # b s 128
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(0), reduction="sum") / self.totals["count"]

    def denominators(self, targets: Tensor) -> dict[str, Tensor]:
        """Counts of one microbatch; `self.totals` has their sums over the whole step."""
        return {"count": (targets.flatten(0) != -100).sum()}
