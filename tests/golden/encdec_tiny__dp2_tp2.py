# Emitted by autoshard 0.1.0 from models/encdec.py:encdec_tiny for 1x4@A100-SXM-80GB. Yours to edit.
# Mesh dp=2,tp=2.
# Predicted step 6.8 ms (compute 2.1 ms, collectives 1.1 ms, gradient sums 3.6 ms, optimizer 6 us), at most 4.5 MiB per
# device.
# Shapes in comments are a rank's own: b samples, s dim 1 of source, t dim 1 of tokens, 64/tp its share of 64 over axis
# tp.

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
BATCH_DIMS = {"source": 0, "tokens": 0, "targets": 0}  # the dim of each input that counts samples


class Embedding(nn.Module):
    """One rank's part of `embed`."""

    PLACEMENTS: ClassVar = {
        "tokens.weight": {"tp": 0},
        "positions.weight": {"tp": 0},
    }

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.tokens = nn.Embedding(128 // tp.size(), 64)
        self.positions = nn.Embedding(32 // tp.size(), 64)

    def forward(self, source: Tensor) -> Tensor:
        """source: b/dp s -> b/dp s 64, partial over tp"""
        positions = torch.arange(source.shape[1], device=source.device)  # s
        return vocab_embedding(source, self.tokens.weight, 128, self.tp) + vocab_embedding(
            positions, self.positions.weight, 32, self.tp
        )

    def forward_2(self, tokens: Tensor) -> Tensor:
        """tokens: b/dp t -> b/dp t 64, partial over tp"""
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # t
        return vocab_embedding(tokens, self.tokens.weight, 128, self.tp) + vocab_embedding(
            positions, self.positions.weight, 32, self.tp
        )


class Attention(nn.Module):
    """One rank's part of `encoder.layers.*.self_attn`."""

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
        y = F.scaled_dot_product_attention(q, k, v)
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        o_proj_bias = keep_one(self.o_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(y.transpose(1, 2).flatten(2), self.o_proj.weight, o_proj_bias)


class MLP(nn.Module):
    """One rank's part of `encoder.layers.*.mlp` and one more."""

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
        x = F.relu(self.up_proj(x))
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        down_proj_bias = keep_one(self.down_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(x, self.down_proj.weight, down_proj_bias)


class EncoderLayer(nn.Module):
    """One rank's part of `encoder.layers.*`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.self_attn_norm = nn.LayerNorm(64)
        self.self_attn = Attention(tp)
        self.mlp_norm = nn.LayerNorm(64)
        self.mlp = MLP(tp)

    def forward(self, x: Tensor, x_2: Tensor) -> Tensor:
        """x: b/dp s 64; x_2: b/dp s 64, partial over tp -> b/dp s 64, partial over tp"""
        y = self.self_attn_norm(x)
        x = x_2 + self.self_attn(y)
        # add up the partial sums of tp (32.0 KiB, 27 us forward)
        x_2 = all_reduce(x, self.tp)  # b/dp s 64
        return x + self.mlp(self.mlp_norm(x_2))


class Encoder(nn.Module):
    """One rank's part of `encoder`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.layers = nn.ModuleList(EncoderLayer(tp) for _ in range(3))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        """x: b/dp s 64, partial over tp -> b/dp s 64"""
        for layer in self.layers:
            # add up the partial sums of tp (32.0 KiB, 27 us forward)
            x_2 = all_reduce(x, self.tp)  # b/dp s 64
            x = layer(x_2, x)  # b/dp s 64, partial over tp
        # add up the partial sums of tp (32.0 KiB, 27 us forward)
        x = all_reduce(x, self.tp)  # b/dp s 64
        return self.norm(x)


class Attention_2(nn.Module):
    """One rank's part of `decoder.layers.*.self_attn`."""

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
        """x: b/dp t 64 -> b/dp t 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (16.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        q = self.q_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp t 16
        k = self.k_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp t 16
        v = self.v_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp t 16
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        o_proj_bias = keep_one(self.o_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(y.transpose(1, 2).flatten(2), self.o_proj.weight, o_proj_bias)


class Attention_3(nn.Module):
    """One rank's part of `decoder.layers.*.cross_attn`."""

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

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x: b/dp t 64; memory: b/dp s 64 -> b/dp t 64, partial over tp"""
        # each rank of tp uses this for its own part: in backward, add up the gradients (16.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        q = self.q_proj(x).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp t 16
        k = self.k_proj(memory).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp s 16
        v = self.v_proj(memory).unflatten(2, (-1, 16)).transpose(1, 2)  # b/dp 4/tp s 16
        y = F.scaled_dot_product_attention(q, k, v)
        # it will be added to partial sums over tp: one rank adds it (256 B, 4 us forward)
        o_proj_bias = keep_one(self.o_proj.bias, self.tp)  # 64, partial over tp
        return F.linear(y.transpose(1, 2).flatten(2), self.o_proj.weight, o_proj_bias)


class DecoderLayer(nn.Module):
    """One rank's part of `decoder.layers.*`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.self_attn_norm = nn.LayerNorm(64)
        self.self_attn = Attention_2(tp)
        self.cross_attn_norm = nn.LayerNorm(64)
        self.cross_attn = Attention_3(tp)
        self.mlp_norm = nn.LayerNorm(64)
        self.mlp = MLP(tp)

    def forward(self, x: Tensor, x_2: Tensor, memory: Tensor) -> Tensor:
        """x: b/dp t 64; x_2: b/dp t 64, partial over tp; memory: b/dp s 64 -> b/dp t 64, partial over tp"""
        y = self.self_attn_norm(x)
        x = x_2 + self.self_attn(y)
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        x_2 = all_reduce(x, self.tp)  # b/dp t 64
        x = x + self.cross_attn(self.cross_attn_norm(x_2), memory)
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        x_2 = all_reduce(x, self.tp)  # b/dp t 64
        return x + self.mlp(self.mlp_norm(x_2))


class Decoder(nn.Module):
    """One rank's part of `decoder`."""

    def __init__(self, tp: ProcessGroup) -> None:
        super().__init__()
        self.tp = tp
        self.layers = nn.ModuleList(DecoderLayer(tp) for _ in range(3))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        """x: b/dp t 64, partial over tp; memory: b/dp s 64 -> b/dp t 64"""
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        x_2 = all_reduce(x, self.tp)  # b/dp t 64
        # each rank of tp uses this for its own part: in backward, add up the gradients (32.0 KiB, 27 us backward)
        memory = sum_gradient(memory, self.tp)
        for layer in self.layers[:2]:
            x = layer(x_2, x, memory)  # b/dp t 64, partial over tp
            # add up the partial sums of tp (16.0 KiB, 27 us forward)
            x_2 = all_reduce(x, self.tp)  # b/dp t 64
        x = self.layers[2](x_2, x, memory)  # b/dp t 64, partial over tp
        # add up the partial sums of tp (16.0 KiB, 27 us forward)
        x = all_reduce(x, self.tp)  # b/dp t 64
        return self.norm(x)


class Translator(nn.Module):
    """One rank's part of the model."""

    def __init__(self, dp: ProcessGroup, tp: ProcessGroup) -> None:
        super().__init__()
        self.dp = dp
        self.tp = tp
        self.embed = Embedding(tp)
        self.encoder = Encoder(tp)
        self.decoder = Decoder(tp)
        self.lm_head = nn.Linear(64, 128 // tp.size(), bias=False)
        self.lm_head.weight = self.embed.tokens.weight

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        """source: b/dp s; tokens: b/dp t; targets: b/dp t -> scalar"""
        memory = self.encoder(self.embed(source))  # b/dp s 64
        x = self.decoder(self.embed.forward_2(tokens), memory)  # b/dp t 64
        # each rank of tp uses this for its own part: in backward, add up the gradients (16.0 KiB, 27 us backward)
        x = sum_gradient(x, self.tp)
        logits = self.lm_head(x)  # b/dp t 128/tp
        y = targets.flatten(0)  # b*t/dp
        # cross_entropy needs all of dim 1, which tp splits (32.0 KiB, 26 us forward, 4 us backward)
        y_2 = all_gather_invariant(logits.flatten(0, 1), dim=1, group=self.tp)  # b*t/dp 128
        # add up the partial sums of dp (8 B, 27 us forward)
        y_3 = all_reduce((y != -100).sum(), self.dp)  # scalar
        # add up the partial sums of dp (4 B, 27 us forward)
        return all_reduce(F.cross_entropy(y_2, y, reduction="sum") / y_3, self.dp)  # scalar


def build(
    device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Translator, Mesh, MicrobatchStep]:
    """This rank's module (parameters not filled yet), its mesh, and what runs a training step of it.

    dtype: of everything of a floating dtype, left out: torch.float32 where the model has it.
    """
    mesh = Mesh(MESH)
    module = materialize(lambda: Translator(mesh.group("dp"), mesh.group("tp")), torch.float32, device, dtype)
    reducer = GradientReducer(module, summed_groups(module, mesh, ("dp",)))
    return module, mesh, MicrobatchStep(module, MICROBATCHES, BATCH_DIMS, reducer=reducer)
