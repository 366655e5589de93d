"""ResNet with bottleneck blocks and batch norm.

Letters in shape comments: b batch, n channels, y and x rows and columns, c classes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.workload import Workload


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, beside a residual; the shortcut is projected where the shape changes."""

    def __init__(self, channels: int, middle: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, middle, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, 4 * middle, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * middle)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * middle:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * middle, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(4 * middle)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))  # b n/4 y x
        y = F.relu(self.bn2(self.conv2(y)))  # b n/4 y x, stride here
        y = self.bn3(self.conv3(y))  # b n y x
        return F.relu(self.shortcut(x) + y)


class ResNet(nn.Module):
    """Image classifier; forward returns the mean loss.

    depths: blocks of each stage; every stage after the first halves rows and columns and doubles the channels.
    stem: kernel of the first convolution; 7 also strides by 2 and pools, as for large images.
    """

    def __init__(self, width: int, depths: Sequence[int], stem: int, classes: int) -> None:
        super().__init__()
        stride = 2 if stem == 7 else 1
        self.conv1 = nn.Conv2d(3, width, kernel_size=stem, stride=stride, padding=stem // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool: nn.Module = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if stem == 7 else nn.Identity()
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                blocks.append(Bottleneck(channels, width << stage, stride=2 if stage and block == 0 else 1))
                channels = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = self.pool(F.relu(self.bn1(self.conv1(images))))  # b n y x
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.mean(dim=(2, 3)))  # b c
        return F.cross_entropy(logits, targets)


def build(
    size: int,
    width: int,
    depths: Sequence[int],
    stem: int,
    classes: int,
    batch: int,
    dtype: str,
    device: str,
    seed: int,
) -> Workload:
    """A ResNet of these sizes with one global batch of random images."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = ResNet(width, depths, stem, classes).to(getattr(torch, dtype))
        images = torch.randn(batch, 3, size, size, dtype=getattr(torch, dtype))
        targets = torch.randint(classes, (batch,))
    return Workload(model, (images, targets))


def resnet_tiny(
    *,
    size: int = 16,
    width: int = 8,
    depths: Sequence[int] = (2, 2),
    stem: int = 3,
    classes: int = 8,
    batch: int = 8,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
) -> Workload:
    """Two stages of two blocks on images of 16 x 16 pixels."""
    return build(size, width, depths, stem, classes, batch, dtype, device, seed)


def resnet50(
    *,
    size: int = 224,
    width: int = 64,
    depths: Sequence[int] = (3, 4, 6, 3),
    stem: int = 7,
    classes: int = 1000,
    batch: int = 256,
    dtype: str = "float32",
    device: str = "meta",
    seed: int = 0,
) -> Workload:
    """ResNet-50, 26 million parameters, on the meta device unless told otherwise."""
    return build(size, width, depths, stem, classes, batch, dtype, device, seed)
