"""LeNet on handwritten digits: Conv 1-20-5, pool, Conv 20-50-5, pool, FC 500, FC 10.

Size small is the classic network with its 431,080 parameters (LeCun et al., 1998, in the form of
Caffe's MNIST example). The 8x8 digits are enlarged to the 28x28 it was made for (`digits.enlarge`).
Plain SGD with momentum, no normalisation: what half precision does to it is easy to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampscope.workloads.digits import classification_loss, digit_batches, enlarge
from ampscope.workloads.protocol import Workload


@dataclass(frozen=True, slots=True)
class LeNetSize:
    """Channels of the two convolutions, width of the hidden linear layer, images a step."""

    channels1: int
    channels2: int
    hidden: int
    batch_size: int
    lr: float


SIZES: Mapping[str, LeNetSize] = {
    "tiny": LeNetSize(8, 16, 64, batch_size=32, lr=0.004),
    "small": LeNetSize(20, 50, 500, batch_size=64, lr=0.003),
    "medium": LeNetSize(64, 256, 7168, batch_size=64, lr=0.001),
}
_AREA = 4 * 4  # 28 -conv5-> 24 -pool-> 12 -conv5-> 8 -pool-> 4

_HEAD_STD = 0.02  # the first loss is that of a guess, ln(10)


class LeNet(nn.Module):
    """(batch, 1, 28, 28) -> (batch, 10) logits. Every step is a module, so hooks see its output."""

    def __init__(self, size: LeNetSize) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, size.channels1, 5)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(size.channels1, size.channels2, 5)
        self.pool2 = nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(size.channels2 * _AREA, size.hidden)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(size.hidden, 10)
        self._initialise()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.pool2(self.conv2(self.pool1(self.conv1(images))))
        logits: Tensor = self.fc2(self.relu(self.fc1(self.flatten(features))))
        return logits

    def _initialise(self) -> None:
        """He et al. (2015) in front of the last layer: with torch's default weights momentum builds
        up on a plateau, and the loss then overshoots by half of where it started."""
        for layer in (self.conv1, self.conv2, self.fc1):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:  # for the type checker
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.fc2.weight, std=_HEAD_STD)
        nn.init.zeros_(self.fc2.bias)


def build(size: str, seed: int) -> Workload:
    """The workload of one size; weights come from torch's global generator."""
    chosen = SIZES[size]
    return Workload(
        model=LeNet(chosen),
        batches=digit_batches(seed, chosen.batch_size, enlarge),
        loss=classification_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=chosen.lr, momentum=0.9),
    )
