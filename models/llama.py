"""Llama 3: grouped queries, rotary positions, RMSNorm, SwiGLU; module names as in transformers.

Letters in shape comments: b batch, s sequence, d width, h heads, g key-value heads, k head width, f hidden units,
v vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload


class RMSNorm(nn.Module):
    """Scales each vector to unit root mean square, then by a weight."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: turn the pairs (i, i + k/2) of each head. x: b h s k, cos and sin: s k."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention in which several query heads share one key-value head."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q_proj = nn.Linear(width, heads * self.head_width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # b h s k
        k = self.k_proj(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # b g s k
        v = self.v_proj(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # b g s k
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # b h s k
        return self.o_proj(y.transpose(1, 2).flatten(2))  # b s d


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.gate_proj(x)) * self.up_proj(x)  # b s f
        return self.down_proj(x)  # b s d


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width)
        self.self_attn = Attention(width, heads, kv_heads)
        self.post_attention_layernorm = RMSNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)  # b s d
        return x + self.mlp(self.post_attention_layernorm(x))  # b s d


class Decoder(nn.Module):
    """Embedding, layers, last norm."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, kv_heads: int, hidden: int, theta: float
    ) -> None:
        super().__init__()
        self.head_width, self.theta = width // heads, theta
        self.embed_tokens = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, kv_heads, hidden) for _ in range(depth))
        self.norm = RMSNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)  # b s d
        cos, sin = self.rotary_tables(x)  # s k
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def rotary_tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position's angles, in x's dtype: each s k."""
        dims = torch.arange(0, self.head_width, 2, device=x.device, dtype=torch.float32)  # k/2
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)  # s
        angles = torch.outer(positions, self.theta ** (-dims / self.head_width))  # s k/2
        angles = torch.cat((angles, angles), dim=-1)  # s k
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Llama(nn.Module):
    """Decoder-only language model; forward returns the mean loss of the next token."""

    def __init__(
        self, vocab: int, width: int, depth: int, heads: int, kv_heads: int, hidden: int, theta: float = 500000.0
    ) -> None:
        super().__init__()
        self.model = Decoder(vocab, width, depth, heads, kv_heads, hidden, theta)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        for name, parameter in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.model(tokens))  # b s v
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build(
    vocab: int,
    sequence: int,
    width: int,
    depth: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    batch: int,
    dtype: str,
    device: str,
    seed: int,
) -> Workload:
    """A Llama of these sizes with one global batch of random tokens."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Llama(vocab, width, depth, heads, kv_heads, hidden).to(getattr(torch, dtype))
        tokens = torch.randint(vocab, (batch, sequence))
        targets = torch.randint(vocab, (batch, sequence))
    return Workload(model, (tokens, targets))


def llama_tiny(
    *,
    vocab: int = 128,
    sequence: int = 16,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    hidden: int = 128,
    batch: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """Four layers, 64 wide; 4 query heads share 2 key-value heads."""
    return build(vocab, sequence, width, depth, heads, kv_heads, hidden, batch, dtype, device, seed)


def llama_8b(
    *,
    vocab: int = 128256,
    sequence: int = 8192,
    width: int = 4096,
    depth: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    hidden: int = 14336,
    batch: int = 128,
    dtype: str = "bfloat16",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """Llama 3 8B, on the meta device unless told otherwise."""
    return build(vocab, sequence, width, depth, heads, kv_heads, hidden, batch, dtype, device, seed)


def llama_70b(
    *,
    vocab: int = 128256,
    sequence: int = 8192,
    width: int = 8192,
    depth: int = 80,
    heads: int = 64,
    kv_heads: int = 8,
    hidden: int = 28672,
    batch: int = 128,
    dtype: str = "bfloat16",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """Llama 3 70B, on the meta device unless told otherwise."""
    return build(vocab, sequence, width, depth, heads, kv_heads, hidden, batch, dtype, device, seed)


def llama_405b(
    *,
    vocab: int = 128256,
    sequence: int = 8192,
    width: int = 16384,
    depth: int = 126,
    heads: int = 128,
    kv_heads: int = 8,
    hidden: int = 53248,
    batch: int = 128,
    dtype: str = "bfloat16",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """Llama 3.1 405B, on the meta device unless told otherwise."""
    return build(vocab, sequence, width, depth, heads, kv_heads, hidden, batch, dtype, device, seed)
