"""The shared networks (:mod:`.networks`) in PyTorch: same weights, batches and layer names as in
Keras and Paddle, so that their runs can be compared layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD

from ampscope.ext.frameworks import networks
from ampscope.workloads.protocol import Workload
from ampscope.workloads.training_data import DigitBatch, classification_loss


class LeNet(nn.Module):
    """(batch, 1, 28, 28) -> (batch, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.relu1, self.pool1 = nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)
        self.conv2, self.relu2, self.pool2 = nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        self.flatten = nn.Flatten()
        self.fc1, self.relu3, self.fc2 = nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool1(self.relu1(self.conv1(images)))
        x = self.flatten(self.pool2(self.relu2(self.conv2(x))))
        logits: Tensor = self.fc2(self.relu3(self.fc1(x)))
        return logits


class MLP(nn.Module):
    """(batch, 64) -> (batch, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu1 = nn.Linear(64, 128), nn.ReLU()
        self.fc2, self.relu2 = nn.Linear(128, 64), nn.ReLU()
        self.fc3 = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.fc3(self.relu2(self.fc2(self.relu1(self.fc1(pixels)))))
        return logits


class Attention(nn.Module):
    """Every position looks at every other; two matmuls and a softmax between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (
            nn.Linear(networks.WIDTH, networks.WIDTH) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mixed = torch.softmax(scores, dim=-1) @ v
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        return x.view(batch, places, networks.HEADS, width // networks.HEADS).transpose(1, 2)


class Block(nn.Module):
    """One pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        width = networks.WIDTH
        self.ln1, self.attn = nn.LayerNorm(width, eps=networks.EPS), Attention()
        self.ln2 = nn.LayerNorm(width, eps=networks.EPS)
        self.fc1, self.relu = nn.Linear(width, 2 * width), nn.ReLU()
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        out: Tensor = x + self.fc2(self.relu(self.fc1(self.ln2(x))))
        return out


class Transformer(nn.Module):
    """(batch, 64) pixel values -> (batch, 10) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(networks.SYMBOLS, networks.WIDTH)
        self.pos = nn.Embedding(networks.POSITIONS, networks.WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(networks.BLOCKS))
        self.ln = nn.LayerNorm(networks.WIDTH, eps=networks.EPS)
        self.head = nn.Linear(networks.WIDTH, 10)

    def forward(self, symbols: Tensor) -> Tensor:
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x: Tensor = self.embed(symbols) + self.pos(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x).mean(dim=1))
        return logits


_MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "shared-lenet": LeNet,
    "shared-mlp": MLP,
    "shared-transformer": Transformer,
}


def build(name: str, seed: int) -> Workload:
    """The workload of that name. Raises BadInput for another."""
    chosen = networks.network(name, seed)
    model = _MODELS[name]()
    model.load_state_dict({k: torch.from_numpy(v) for k, v in chosen.weights.items()})

    def batches() -> Iterator[DigitBatch]:
        for inputs, labels in chosen.batches():
            yield torch.from_numpy(inputs), torch.from_numpy(labels)

    return Workload(
        model=model,
        batches=batches,
        loss=classification_loss,
        optimizer=lambda params: SGD(params, lr=chosen.lr),
        name=name,
    )
