"""Blocks 2 and 3, and the classifier. Letters: b batch of a microbatch, d width, c classes."""

from __future__ import annotations

import torch.nn.functional as F
from stage_0 import Block
from torch import Tensor, nn


class Stage1(nn.Module):
    """Residual blocks under a linear classifier."""

    totals: dict[str, Tensor] | None = None

    def __init__(self, width: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({name: Block() for name in ("2", "3")})
        self.head = nn.Linear(width, classes)

    def denominators(self, targets: Tensor) -> dict[str, Tensor]:
        """Valid targets of the batch."""
        return {"valid": (targets != -100).sum()}

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks.values():
            hidden = hidden + block(hidden)  # b d
        loss = F.cross_entropy(self.head(hidden), targets, reduction="sum")
        totals = self.totals or self.denominators(targets)
        return loss / totals["valid"]
