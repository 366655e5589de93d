"""Encoder-decoder translator: pre-norm blocks, cross-attention, one embedding for source, target and head.

Letters in shape comments: b batch, s source sequence, t target sequence, d width, h heads, k head width,
f hidden units, v vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload


class Attention(nn.Module):
    """Attention of the queries x to a memory: x itself, or what the encoder returned."""

    def __init__(self, width: int, heads: int, is_causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.is_causal, self.dropout = heads, is_causal, dropout
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h t k
        k = self.k_proj(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        v = self.v_proj(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # b h s k
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.is_causal)  # b h t k
        return self.o_proj(y.transpose(1, 2).flatten(2))  # b t d


class MLP(nn.Module):
    """Up, ReLU, down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.up_proj(x))  # b t f
        return self.down_proj(x)  # b t d


class EncoderLayer(nn.Module):
    """Self-attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.self_attn_norm = nn.LayerNorm(width)
        self.self_attn = Attention(width, heads, is_causal=False, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.self_attn_norm(x)  # b s d
        x = x + self.dropout(self.self_attn(y, y))  # b s d
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # b s d


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's output, MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.self_attn_norm = nn.LayerNorm(width)
        self.self_attn = Attention(width, heads, is_causal=True, dropout=dropout)
        self.cross_attn_norm = nn.LayerNorm(width)
        self.cross_attn = Attention(width, heads, is_causal=False, dropout=dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.self_attn_norm(x)  # b t d
        x = x + self.dropout(self.self_attn(y, y))  # b t d
        x = x + self.dropout(self.cross_attn(self.cross_attn_norm(x), memory))  # b t d
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # b t d


class Embedding(nn.Module):
    """Token plus position."""

    def __init__(self, vocab: int, positions: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(positions, width)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)  # s
        return self.tokens(tokens) + self.positions(positions)  # b s d


class Encoder(nn.Module):
    """Layers and last norm over the embedded source."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Decoder(nn.Module):
    """Layers and last norm over the embedded target, beside the encoder's output."""

    def __init__(self, width: int, depth: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class Translator(nn.Module):
    """Forward returns the mean loss of the target's next token."""

    def __init__(
        self, vocab: int, positions: int, width: int, depth: int, heads: int, hidden: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = Embedding(vocab, positions, width)
        self.encoder = Encoder(width, depth, heads, hidden, dropout)
        self.decoder = Decoder(width, depth, heads, hidden, dropout)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith("proj.weight") or name.startswith("embed"):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, source: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))  # b s d
        x = self.decoder(self.embed(tokens), memory)  # b t d
        logits = self.lm_head(x)  # b t v
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    vocab: int,
    source: int,
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
    """A translator of these sizes with one global batch of random tokens."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Translator(vocab, max(source, sequence), width, depth, heads, hidden, dropout)
        sources = torch.randint(vocab, (batch, source))
        tokens = torch.randint(vocab, (batch, sequence))
        targets = torch.randint(vocab, (batch, sequence))
    return Workload(model.to(getattr(torch, dtype)), (sources, tokens, targets))


def encdec_tiny(
    *,
    vocab: int = 128,
    source: int = 32,
    sequence: int = 16,
    width: int = 64,
    depth: int = 3,
    heads: int = 4,
    hidden: int = 256,
    batch: int = 8,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """Three layers on each side, 64 wide, 4 heads; 32 source and 16 target tokens."""
    return build(vocab, source, sequence, width, depth, heads, hidden, batch, dropout, dtype, device, seed)


def encdec_base(
    *,
    vocab: int = 37000,
    source: int = 512,
    sequence: int = 512,
    width: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int = 2048,
    batch: int = 256,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """The base size of "Attention is all you need", 63 million parameters, on the meta device unless told otherwise."""
    return build(vocab, source, sequence, width, depth, heads, hidden, batch, dropout, dtype, device, seed)
