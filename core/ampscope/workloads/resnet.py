"""A small ResNet with batch normalisation on handwritten digits.

Size small has the plan of the CIFAR ResNet-20: a 3x3 stem, three stages of three basic blocks with
16, 32 and 64 channels, global average pooling (He et al., 2015, section 4.2), on the digits' own
8x8 pixels. Batch normalisation is the reason to have it here: it stays fp32 in its statistics while
its input and output are half, and one overflow can poison its running averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampscope.workloads.protocol import Workload
from ampscope.workloads.training_data import classification_loss, digit_batches


@dataclass(frozen=True, slots=True)
class ResNetSize:
    """Channels of each stage, basic blocks per stage, images per step."""

    widths: tuple[int, ...]
    blocks: int
    batch_size: int
    lr: float


SIZES: Mapping[str, ResNetSize] = {
    "tiny": ResNetSize((16, 32), 1, batch_size=32, lr=0.05),
    "small": ResNetSize((16, 32, 64), 3, batch_size=64, lr=0.02),
    "medium": ResNetSize((168, 336, 672), 3, batch_size=32, lr=0.01),
}


class BasicBlock(nn.Module):
    """conv-norm-relu-conv-norm plus the shortcut, then relu; halves the image when stride is 2."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(project, nn.BatchNorm2d(outputs))
        self.relu2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        residual = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        out: Tensor = self.relu2(residual + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """(batch, 1, 8, 8) -> (batch, 10) logits."""

    def __init__(self, size: ResNetSize) -> None:
        super().__init__()
        channels = size.widths[0]
        self.conv = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.stages = nn.ModuleList()
        for index, width in enumerate(size.widths):
            strides = [1 if index == 0 else 2] + [1] * (size.blocks - 1)
            blocks = []
            for stride in strides:
                blocks.append(BasicBlock(channels, width, stride))
                channels = width
            self.stages.append(nn.Sequential(*blocks))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.relu(self.norm(self.conv(images)))
        for stage in self.stages:
            x = stage(x)
        logits: Tensor = self.head(self.flatten(self.pool(x)))
        return logits


def build(size: str, seed: int) -> Workload:
    """The workload of one size; weights come from torch's global generator."""
    chosen = SIZES[size]
    return Workload(
        model=ResNet(chosen),
        batches=digit_batches(seed, chosen.batch_size),
        loss=classification_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=chosen.lr, momentum=0.9),
    )
