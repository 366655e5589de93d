"""Vision transformer: patches by convolution, a class token, pre-norm blocks.

Letters in shape comments: b batch, s patches and class token, d width, h heads, k head width, f hidden units,
c classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload


class Attention(nn.Module):
    """Self-attention of every patch to every patch."""

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
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)  # b h s k
        return self.o_proj(y.transpose(1, 2).flatten(2))  # b s d


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up_proj(x))  # b s f
        return self.down_proj(x)  # b s d


class Block(nn.Module):
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.attn_norm(x)))  # b s d
        return x + self.dropout(self.mlp(self.mlp_norm(x)))  # b s d


class ViT(nn.Module):
    """Image classifier; forward returns the mean loss."""

    def __init__(
        self, size: int, patch: int, width: int, depth: int, heads: int, hidden: int, classes: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.embed_positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)  # b s-1 d
        class_token = self.class_token.expand(images.shape[0], -1, -1)  # b 1 d
        x = torch.cat((class_token, patches), dim=1) + self.embed_positions  # b s d
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x[:, 0]))  # b c
        return F.cross_entropy(logits, targets)


def build(
    size: int,
    patch: int,
    width: int,
    depth: int,
    heads: int,
    hidden: int,
    classes: int,
    batch: int,
    dropout: float,
    dtype: str,
    device: str,
    seed: int,
) -> Workload:
    """A ViT of these sizes with one global batch of random images."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = ViT(size, patch, width, depth, heads, hidden, classes, dropout).to(getattr(torch, dtype))
        images = torch.randn(batch, 3, size, size, dtype=getattr(torch, dtype))
        targets = torch.randint(classes, (batch,))
    return Workload(model, (images, targets))


def vit_tiny(
    *,
    size: int = 32,
    patch: int = 8,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    hidden: int = 256,
    classes: int = 8,
    batch: int = 8,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """Four blocks, 64 wide, 4 heads; 16 patches of 8 x 8 pixels."""
    return build(size, patch, width, depth, heads, hidden, classes, batch, dropout, dtype, device, seed)


def vit_base(
    *,
    size: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    hidden: int = 3072,
    classes: int = 1000,
    batch: int = 256,
    dropout: float = 0.0,
    dtype: str = "float32",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """ViT-B/16, 87 million parameters, on the meta device unless told otherwise."""
    return build(size, patch, width, depth, heads, hidden, classes, batch, dropout, dtype, device, seed)
