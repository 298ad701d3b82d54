"""The shared networks (``frameworks/networks.py``) as Paddle layers, with the same paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from ampscope.ext.frameworks.networks import (
    BLOCKS,
    EPS,
    HEADS,
    POSITIONS,
    SYMBOLS,
    WIDTH,
    Network,
)

_nn: Any = paddle.nn
_F: Any = paddle.nn.functional
_Layer: Any = paddle.nn.Layer


class _Parts(_Layer):  # type: ignore[misc]  # Paddle has no types
    """Layers by name, called one after the other."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        """Through all of them, in the order in which they were named."""
        for part in self.children():
            x = part(x)
        return x


class _Attention(_Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "proj"):
            setattr(self, name, _nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        """(batch, positions, width) to the same."""
        shape = [x.shape[0], POSITIONS, HEADS, WIDTH // HEADS]
        q, k, v = (
            part(x).reshape(shape).transpose([0, 2, 1, 3]) for part in (self.q, self.k, self.v)
        )
        scores = paddle.matmul(q, k, transpose_y=True) * (WIDTH // HEADS) ** -0.5
        mixed = paddle.matmul(_F.softmax(scores, axis=-1), v)
        return self.proj(mixed.transpose([0, 2, 1, 3]).reshape([x.shape[0], POSITIONS, WIDTH]))


class _Block(_Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn = _nn.LayerNorm(WIDTH, epsilon=EPS), _Attention()
        self.ln2 = _nn.LayerNorm(WIDTH, epsilon=EPS)
        self.fc1, self.relu = _nn.Linear(WIDTH, 2 * WIDTH), _nn.ReLU()
        self.fc2 = _nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """Pre-norm, with residuals."""
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(self.relu(self.fc1(self.ln2(x))))


class _Transformer(_Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = _nn.Embedding(SYMBOLS, WIDTH), _nn.Embedding(POSITIONS, WIDTH)
        self.blocks = _nn.LayerList([_Block() for _ in range(BLOCKS)])
        self.ln, self.head = _nn.LayerNorm(WIDTH, epsilon=EPS), _nn.Linear(WIDTH, 10)

    def forward(self, x: Any) -> Any:
        """(batch, positions) of symbols to (batch, 10)."""
        x = self.embed(x) + self.pos(paddle.arange(POSITIONS))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x).mean(axis=1))


def model_of(network: Network) -> Any:
    """The network with its weights."""
    model = {"lenet": _lenet, "mlp": _mlp, "transformer": _Transformer}[network.name]()
    own = dict(model.named_parameters())
    for name, weight in network.weights.items():
        # Paddle's Linear keeps (inputs, outputs).
        is_linear = weight.ndim == 2 and name.partition(".")[0] not in ("embed", "pos")
        own[name].set_value(np.ascontiguousarray(weight.T) if is_linear else weight)
    return model


def _lenet() -> Any:
    return _Parts(
        conv1=_nn.Conv2D(1, 8, 5), relu1=_nn.ReLU(), pool1=_nn.MaxPool2D(2),
        conv2=_nn.Conv2D(8, 16, 5), relu2=_nn.ReLU(), pool2=_nn.MaxPool2D(2),
        flatten=_nn.Flatten(), fc1=_nn.Linear(256, 64), relu3=_nn.ReLU(), fc2=_nn.Linear(64, 10),
    )  # fmt: skip


def _mlp() -> Any:
    return _Parts(
        fc1=_nn.Linear(64, 128),
        relu1=_nn.ReLU(),
        fc2=_nn.Linear(128, 64),
        relu2=_nn.ReLU(),
        fc3=_nn.Linear(64, 10),
    )
