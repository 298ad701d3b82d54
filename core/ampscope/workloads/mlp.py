"""An MLP on handwritten digits: 64 pixels, hidden linear layers with ReLU, 10 logits.

The smallest thing that learns: a step takes a millisecond, so it serves lessons and tests where the
question is about precision and not about the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from ampscope.workloads.digits import classification_loss, digit_batches
from ampscope.workloads.protocol import Workload


@dataclass(frozen=True, slots=True)
class MLPSize:
    """Width and number of the hidden layers, images a step."""

    width: int
    hidden_layers: int
    batch_size: int
    lr: float


SIZES: Mapping[str, MLPSize] = {
    "tiny": MLPSize(64, 2, batch_size=32, lr=0.07),
    "small": MLPSize(512, 3, batch_size=128, lr=0.05),
    "medium": MLPSize(3840, 3, batch_size=128, lr=0.05),
}


class HiddenLayer(nn.Module):
    """One linear layer and its ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.relu(self.linear(x))
        return activated


class MLP(nn.Module):
    """(batch, 1, 8, 8) -> (batch, 10) logits."""

    def __init__(self, size: MLPSize) -> None:
        super().__init__()
        widths = [64] + [size.width] * size.hidden_layers
        self.flatten = nn.Flatten()
        self.layers = nn.ModuleList(
            HiddenLayer(inputs, outputs) for inputs, outputs in pairwise(widths)
        )
        self.head = nn.Linear(size.width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.flatten(images)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def build(size: str, seed: int) -> Workload:
    """The workload of one size; weights come from torch's global generator."""
    chosen = SIZES[size]
    return Workload(
        model=MLP(chosen),
        batches=digit_batches(seed, chosen.batch_size),
        loss=classification_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=chosen.lr, momentum=0.9),
    )
