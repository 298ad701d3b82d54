"""Three models that read handwritten digits: LeNet, an MLP and a small ResNet, with their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class LeNetSize:
    """Channels of the two convolutions, width of the hidden linear layer, images per step."""

    channels1: int
    channels2: int
    hidden: int
    batch_size: int
    lr: float


LENET_SIZES: Mapping[str, LeNetSize] = {
    "tiny": LeNetSize(8, 16, 64, batch_size=32, lr=0.004),
    "small": LeNetSize(20, 50, 500, batch_size=64, lr=0.003),
    "medium": LeNetSize(64, 256, 7168, batch_size=64, lr=0.001),
}
_AREA = 4 * 4  # 28 -conv5-> 24 -pool-> 12 -conv5-> 8 -pool-> 4

_HEAD_STD = 0.02  # the first loss is that of a guess, ln(10)


class LeNet(nn.Module):
    """(batch, 1, 28, 28) -> (batch, 10) logits.

    Size small is the classic network with its 431,080 parameters: Conv 1-20-5, pool, Conv 20-50-5,
    pool, FC 500, FC 10 (LeCun et al., 1998, in the form of Caffe's MNIST example). The 8x8
    digits are enlarged to the 28x28 it was made for (`training_data.enlarge`). Plain SGD with
    momentum, no normalisation: what half precision does to it is easy to read. Every step is a
    module, so hooks see its output.
    """

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


@dataclass(frozen=True, slots=True)
class MLPSize:
    """Width and number of the hidden layers, images per step."""

    width: int
    hidden_layers: int
    batch_size: int
    lr: float


MLP_SIZES: Mapping[str, MLPSize] = {
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
    """(batch, 1, 8, 8) -> (batch, 10) logits: 64 pixels, hidden linear layers with ReLU.

    The smallest thing that learns: a step takes a millisecond, so it serves lessons and tests where
    the question is about precision and not about the model.
    """

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


@dataclass(frozen=True, slots=True)
class ResNetSize:
    """Channels of each stage, basic blocks per stage, images per step."""

    widths: tuple[int, ...]
    blocks: int
    batch_size: int
    lr: float


RESNET_SIZES: Mapping[str, ResNetSize] = {
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
    """(batch, 1, 8, 8) -> (batch, 10) logits: the plan of the CIFAR ResNet-20.

    A 3x3 stem, three stages of three basic blocks with 16, 32 and 64 channels, global average
    pooling (He et al., 2015, section 4.2), on the digits' own 8x8 pixels. Batch normalisation is
    the reason to have it here: it stays fp32 in its statistics while its input and output are half,
    and one overflow can poison its running averages.
    """

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
