"""GPT-2: learned positions, pre-norm blocks, GELU, the head tied to the token embedding.

Letters in shape comments: b batch, s sequence, d width, h heads, k head width, f hidden units, v vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        k = self.k_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        v = self.v_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # b h s k
        return self.o_proj(y.transpose(1, 2).flatten(2))  # b s d


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up_proj(x), approximate="tanh")  # b s f
        return self.down_proj(x)  # b s d


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))  # b s d
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # b s d


class GPT(nn.Module):
    """Decoder-only language model; forward returns the mean loss of the next token."""

    def __init__(
        self, vocab: int, positions: int, width: int, depth: int, heads: int, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.embed_positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight") or "embed" in name:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # s
        x = self.dropout(self.embed_tokens(tokens) + self.embed_positions(positions))  # b s d
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))  # b s v
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    vocab: int,
    sequence: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int,
    batch: int,
    dropout: float,
    dtype: str,
    device: str,
    seed: int,
) -> Workload:
    """A GPT of these sizes with one global batch of random tokens."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = GPT(vocab, sequence, width, depth, heads, hidden, dropout).to(getattr(torch, dtype))
        tokens = torch.randint(vocab, (batch, sequence))
        targets = torch.randint(vocab, (batch, sequence))
    return Workload(model, (tokens, targets))


def gpt_tiny(
    *,
    vocab: int = 128,
    sequence: int = 32,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    hidden: int = 256,
    batch: int = 8,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """Four blocks, 64 wide, 4 heads."""
    return build(vocab, sequence, width, depth, heads, hidden, batch, dropout, dtype, device, seed)


def gpt2_small(
    *,
    vocab: int = 50257,
    sequence: int = 1024,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int = 3072,
    batch: int = 64,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """GPT-2 small, 124 million parameters, on the meta device unless told otherwise."""
    return build(vocab, sequence, width, depth, heads, hidden, batch, dropout, dtype, device, seed)
