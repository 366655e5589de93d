"""A residual multilayer perceptron that classifies vectors.

Letters in shape comments: b batch, d width, f hidden units, c classes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload


class Block(nn.Module):
    """Up, GELU, down."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(width, hidden)
        self.down_proj = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.up_proj(x))  # b f
        return self.down_proj(x)  # b d


class MLP(nn.Module):
    """Residual blocks under a linear classifier."""

    def __init__(self, width: int, hidden: int, depth: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)  # b d
        logits = self.head(x)  # b c
        return F.cross_entropy(logits, targets)


def mlp(
    *,
    width: int = 64,
    hidden: int = 256,
    depth: int = 4,
    classes: int = 16,
    batch: int = 16,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """Four residual blocks, 64 wide; classifies 16 random vectors."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = MLP(width, hidden, depth, classes).to(getattr(torch, dtype))
        x = torch.randn(batch, width, dtype=getattr(torch, dtype))
        targets = torch.randint(classes, (batch,))
    return Workload(model, (x, targets))
