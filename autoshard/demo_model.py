"""The model of `autoshard demo`: a GPT over bytes.

Letters in shape comments: b batch, s sequence, d width, h heads, k head width, f hidden units.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        k = self.k_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # b h s k
        return self.o_proj(y.transpose(1, 2).flatten(2))  # b s d


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))  # b s d


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(width), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))  # b s d
        return x + self.mlp(self.mlp_norm(x))  # b s d


class ByteGPT(nn.Module):
    """Decoder-only language model of bytes; forward returns the mean loss of the next byte."""

    def __init__(self, positions: int, width: int, depth: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, width)
        self.embed_positions = nn.Embedding(positions, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # s
        x = self.embed_tokens(tokens) + self.embed_positions(positions)  # b s d
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))  # b s v
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def byte_gpt(
    *,
    width: int = 192,
    depth: int = 4,
    heads: int = 6,
    hidden: int = 768,
    sequence: int = 128,
    batch: int = 8,
    seed: int = 0,
) -> Workload:
    """Four blocks, 192 wide, 6 heads: 1.9 million parameters; 8 sequences of 128 bytes a step."""
    torch.manual_seed(seed)
    model = ByteGPT(sequence, width, depth, heads, hidden)
    tokens, targets = (torch.randint(VOCABULARY, (batch, sequence)) for _ in range(2))
    return Workload(model, (tokens, targets))
