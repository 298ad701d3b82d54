"""The shared networks as Keras models, with the shared weights; layers are called as in
:mod:`ampscope.ext.frameworks.networks`.

The last layer computes in float32, as Keras' guide to mixed precision asks: a softmax of half
logits, or the loss of them, is less exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from ampscope.ext.frameworks.networks import (
    BLOCKS,
    EPS,
    HEADS,
    POSITIONS,
    SYMBOLS,
    WIDTH,
    Array,
    Network,
)

_layers = keras.layers


class Lenet(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Images (batch, 1, 28, 28), as PyTorch has them; Keras computes channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = _layers.Conv2D(8, 5)
        self.relu1 = _layers.ReLU()
        self.pool1 = _layers.MaxPooling2D(2)
        self.conv2 = _layers.Conv2D(16, 5)
        self.relu2 = _layers.ReLU()
        self.pool2 = _layers.MaxPooling2D(2)
        self.flatten = Flatten()
        self.fc1 = _layers.Dense(64)
        self.relu3 = _layers.ReLU()
        self.fc2 = _layers.Dense(10, dtype="float32")

    def call(self, images: Any) -> Any:
        x = keras.ops.transpose(images, (0, 2, 3, 1))
        x = self.pool1(self.relu1(self.conv1(x)))
        x = self.pool2(self.relu2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(self.flatten(x))))


class Flatten(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """In PyTorch's order of channels, rows and columns, so that fc1 has the same weights."""

    def call(self, x: Any) -> Any:
        return keras.ops.reshape(keras.ops.transpose(x, (0, 3, 1, 2)), (x.shape[0], -1))


class Mlp(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Images (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = _layers.Dense(128)
        self.relu1 = _layers.ReLU()
        self.fc2 = _layers.Dense(64)
        self.relu2 = _layers.ReLU()
        self.fc3 = _layers.Dense(10, dtype="float32")

    def call(self, x: Any) -> Any:
        return self.fc3(self.relu2(self.fc2(self.relu1(self.fc1(x)))))


class Attention(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """Softmax of scaled query-key matmuls, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q = _layers.Dense(WIDTH)
        self.k = _layers.Dense(WIDTH)
        self.v = _layers.Dense(WIDTH)
        self.proj = _layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        ops, (batch, length, _) = keras.ops, x.shape

        def heads(values: Any) -> Any:
            return ops.transpose(ops.reshape(values, (batch, length, HEADS, -1)), (0, 2, 1, 3))

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) / (WIDTH // HEADS) ** 0.5
        mixed = ops.matmul(ops.softmax(scores), v)
        return self.proj(ops.reshape(ops.transpose(mixed, (0, 2, 1, 3)), (batch, length, WIDTH)))


class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """Pre-norm, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = _layers.LayerNormalization(epsilon=EPS)
        self.attn = Attention()
        self.ln2 = _layers.LayerNormalization(epsilon=EPS)
        self.fc1 = _layers.Dense(2 * WIDTH)
        self.relu = _layers.ReLU()
        self.fc2 = _layers.Dense(WIDTH)

    def call(self, x: Any) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(self.relu(self.fc1(self.ln2(x))))


class Transformer(keras.Model):  # type: ignore[misc]  # Keras ships no types
    """Pixel values (batch, 64), whole numbers of 0 to 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _layers.Embedding(SYMBOLS, WIDTH)
        self.pos = _layers.Embedding(POSITIONS, WIDTH)
        self.blocks = [Block() for _ in range(BLOCKS)]
        self.ln = _layers.LayerNormalization(epsilon=EPS)
        self.head = _layers.Dense(10, dtype="float32")

    def call(self, symbols: Any) -> Any:
        x = self.embed(symbols) + self.pos(keras.ops.arange(symbols.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(keras.ops.mean(self.ln(x), axis=1))


_MODELS: dict[str, Callable[[], Any]] = {"lenet": Lenet, "mlp": Mlp, "transformer": Transformer}
# The word of a weight in PyTorch -> in Keras.
_DENSE = {"weight": "kernel", "bias": "bias"}
_NORM = {"weight": "gamma", "bias": "beta"}


def build(network: Network) -> keras.Model:
    """The model under the dtype policy that is set, with the network's weights."""
    model = _MODELS[network.name]()
    images, _ = next(network.batches())
    model(images)
    for name, value in network.weights.items():
        path, _, word = name.rpartition(".")
        _assign(_layer_at(model, path), word, value)
    return model


def _layer_at(model: Any, path: str) -> Any:
    found = model
    for part in path.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    return found


def _assign(layer: Any, word: str, value: Array) -> None:
    if isinstance(layer, _layers.Embedding):
        layer.embeddings.assign(value)
    elif isinstance(layer, _layers.LayerNormalization):
        getattr(layer, _NORM[word]).assign(value)
    elif isinstance(layer, _layers.Conv2D) and word == "weight":
        layer.kernel.assign(np.transpose(value, (2, 3, 1, 0)))
    else:
        getattr(layer, _DENSE[word]).assign(value.T if word == "weight" else value)
