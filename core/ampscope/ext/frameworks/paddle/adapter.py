"""PaddlePaddle, as an :class:`ampscope.ext.frameworks.adapters.Adapter`.

Also here: the probe, and the shared networks as Paddle layers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import paddle

from ampscope.errors import BadInput, Cancelled
from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.networks import (
    BLOCKS,
    EPS,
    HEADS,
    POSITIONS,
    SYMBOLS,
    WIDTH,
    Array,
    Network,
    network,
)
from ampscope.ext.frameworks.paddle import watch
from ampscope.ext.frameworks.paddle.regions import DTYPE_NAMES
from ampscope.ext.frameworks.paddle.watch import watching
from ampscope.ext.frameworks.recorder import Recorder
from ampscope.records import Machine, RunSpec


def machine(spec: RunSpec) -> Machine:
    """Where and with what a run of ``spec`` takes place; Paddle is on that device then. On CUDA
    Paddle is as it is; on a CPU half precision is emulated and the scaler forced on."""
    watch.choose_device(spec)
    return watch.machine(spec)


def seed(seed: int) -> None:
    """Seed Paddle, NumPy and ``random``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    paddle.seed(seed)


# A probe: a shared network trained as a Paddle script would, watched from outside.
#
# ``spec.args``: ``--level=O2`` for parameters in half with master weights; ``--loop=minimize`` for
# ``scaler.minimize`` in place of ``scaler.step`` and ``scaler.update``.


PRECISIONS = ("fp32", "fp16", "fp16-noscaler", "bf16")
_OPTIONS = {"--level": ("O1", "O2"), "--loop": ("update", "minimize")}


@dataclass(frozen=True, slots=True)
class Options:
    """What ``spec.args`` say."""

    level: str = "O1"
    loop: str = "update"


def options(args: tuple[str, ...]) -> Options:
    """Raises BadInput for an unknown argument."""
    found = {}
    for arg in args:
        name, _, value = arg.partition("=")
        if value not in _OPTIONS.get(name, ()):
            known = ", ".join(f"{n}={v}" for n, values in _OPTIONS.items() for v in values)
            raise BadInput(f"A probe of Paddle does not know {arg!r}. It knows {known}.")
        found[name.lstrip("-")] = value
    return Options(**found)


class Training:
    """One training: model, optimizer and scaler made, one step a call."""

    def __init__(self, spec: RunSpec) -> None:
        if spec.precision not in PRECISIONS:
            raise BadInput(
                f"Paddle has no precision {spec.precision!r} here. Use one of:"
                f" {', '.join(PRECISIONS)}."
            )
        self.options = options(spec.args)
        self.half = "" if spec.precision == "fp32" else spec.precision.partition("-")[0]
        chosen = network(spec.workload, spec.seed)
        self.batches = chosen.batches()
        self.model = model_of(chosen)
        self.loss_factor = spec.loss_factor
        self.optimizer: Any = paddle.optimizer.SGD(chosen.lr, parameters=self.model.parameters())
        if self.half and self.options.level == "O2":
            self.model, self.optimizer = paddle.amp.decorate(
                self.model, self.optimizer, level="O2", dtype=DTYPE_NAMES[self.half]
            )
        self.scaler: Any = None
        if spec.precision == "fp16":
            self.scaler = paddle.amp.GradScaler(
                init_loss_scaling=spec.scaler.init_scale,
                incr_ratio=spec.scaler.growth_factor,
                decr_ratio=spec.scaler.backoff_factor,
                incr_every_n_steps=spec.scaler.growth_interval,
            )

    def step(self, images: Array, labels: Array) -> None:
        """Forward, backward, update."""
        loss = self._loss(paddle.to_tensor(images), paddle.to_tensor(labels))
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            scaled = self.scaler.scale(loss)
            scaled.backward()
            if self.options.loop == "minimize":
                self.scaler.minimize(self.optimizer, scaled)
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.optimizer.clear_grad()

    def _loss(self, images: Any, labels: Any) -> Any:
        if not self.half:
            return self._forward(images, labels)
        with paddle.amp.auto_cast(level=self.options.level, dtype=DTYPE_NAMES[self.half]):
            return self._forward(images, labels)

    def _forward(self, images: Any, labels: Any) -> Any:
        loss = paddle.nn.functional.cross_entropy(self.model(images), labels)
        return loss if self.loss_factor == 1.0 else loss * self.loss_factor


def probe(spec: RunSpec, recorder: Recorder, is_cancelled: Callable[[], bool]) -> str:
    """Train ``spec.steps`` steps under watch; the notes as one text. Raises Cancelled."""
    with watching(recorder, ControlSettings()) as notes:
        training = Training(spec)
        for _ in range(spec.steps):
            if is_cancelled():
                raise Cancelled("Cancelled; the steps before are kept.")
            training.step(*next(training.batches))
    return " ".join(notes)


# The shared networks (``frameworks/networks.py``) as Paddle layers, with the same paths.


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
