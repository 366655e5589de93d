"""Blocks 0 and 1. Letters: b batch of a microbatch, d width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int = 64, hidden: int = 256) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))  # b d


class Stage0(nn.Module):
    """Residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block() for name in ("0", "1")})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = x + block(x)  # b d
        return x
