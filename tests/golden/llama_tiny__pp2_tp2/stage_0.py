# Stage 0 of 2 of models/llama.py:llama_tiny, emitted by autoshard 0.1.0. Yours to edit.
# Mesh: tp=2. Shapes in comments are a rank's own: b samples, s dim 1 of tokens, 64/tp its share of 64 over axis tp.

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

# isort: split
from collectives import all_gather_invariant, all_reduce, shard, sum_gradient
from operators import vocab_embedding


class RMSNorm(nn.Module):
    """One rank's part of `model.layers.*.input_layernorm` and one more."""

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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, x_2: Tensor) -> Tensor:
        """x: b s 64; cos: s 16; sin: s 16; x_2: b s 64, partial over tp -> b s 64, partial over tp"""
        x = x_2 + self.self_attn(self.input_layernorm(x), cos, sin)
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        x_2 = all_reduce(x, self.tp)  # b s 64
        return x + self.mlp(self.post_attention_layernorm(x_2))


class Decoder(nn.Module):
    """One rank's part of `model`."""

    PLACEMENTS: ClassVar = {
        "embed_tokens.weight": {"tp": 0},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.embed_tokens = nn.Embedding(128 // tp.size(), 64)
        self.layers = nn.ModuleList(DecoderLayer(tp) for _ in range(2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens: b s -> s 16, s 16, b s 64, partial over tp"""
        x = vocab_embedding(tokens, self.embed_tokens.weight, 128, self.tp)  # b s 64, partial over tp
        # each rank of tp keeps its share of dim 0 (32 B, 4 us forward)
        y = shard(torch.arange(0, 16, 2, dtype=torch.float32, device=tokens.device), dim=0, group=self.tp)  # 8/tp
        y_2 = torch.arange(tokens.shape[1], dtype=torch.float32, device=tokens.device).outer(
            500000.0 ** (-y / 16)
        )  # s 8/tp
        # cat needs all of dim 1, which tp splits (512 B, 26 us forward)
        y_2 = all_gather_invariant(y_2, dim=1, group=self.tp)  # s 8
        y = torch.cat((y_2, y_2), dim=-1)  # s 16
        cos = y.cos()
        sin = y.sin()
        for layer in self.layers:
            # add up the partial sums of tp (16.0 KiB, 27 us forward)
            x_2 = all_reduce(x, self.tp)  # b s 64
            x = layer(x_2, cos, sin, x)  # b s 64, partial over tp
        return cos, sin, x


class Llama(nn.Module):
    """One rank's part of stage 0 of 2."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.model = Decoder(tp)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens: b s -> b s 64, s 16, s 16"""
        cos, sin, x = self.model(tokens)  # s 16
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        x = all_reduce(x, self.tp)  # b s 64
        return x, cos, sin
