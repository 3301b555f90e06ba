"""ResNet in its 18-layer layout: a 7×7 stem, four stages of two basic blocks, one linear layer.

Convolution, batch normalization and ReLU are separate modules, as in common implementations, so that rungs
(optimizations) that fold or fuse them have to find them first.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution if the shape changes."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.shortcut = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        branch = self.relu(self.norm1(self.conv1(x)))
        branch = self.norm2(self.conv2(branch))
        return self.relu(self.shortcut(x) + branch)


class ResNet(nn.Module):
    """Maps images (B, 3, H, W) to logits (B, classes)."""

    def __init__(self, width: int = 64, blocks: tuple[int, ...] = (2, 2, 2, 2), classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        stages, channels_in = [], width
        for index, count in enumerate(blocks):
            channels = width * 2**index
            stage = []
            for block in range(count):
                stride = 2 if index and block == 0 else 1
                stage.append(BasicBlock(channels_in, channels, stride))
                channels_in = channels
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels_in, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        return self.head(F.adaptive_avg_pool2d(features, 1).flatten(1))
