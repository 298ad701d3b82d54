"""PaddlePaddle, as an :class:`ampscope.ext.frameworks.adapters.Adapter`.

A probe is a shared network trained as a Paddle script would, watched from outside. ``spec.args``:
``--level=O2`` for parameters in half with master weights; ``--loop=minimize`` for
``scaler.minimize`` in place of ``scaler.step`` and ``scaler.update``.
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
from ampscope.ext.frameworks.networks import Array, network
from ampscope.ext.frameworks.paddle import instruments
from ampscope.ext.frameworks.paddle.instruments import watching
from ampscope.ext.frameworks.paddle.regions import DTYPE_NAMES
from ampscope.ext.frameworks.paddle.shared_networks import model_of
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.records import Machine, RunSpec

PRECISIONS = ("fp32", "fp16", "fp16-noscaler", "bf16")
_VALUES = {"--level": ("O1", "O2"), "--loop": ("update", "minimize")}


def machine(spec: RunSpec) -> Machine:
    """Where and with what a run of ``spec`` takes place; Paddle is on that device then. On CUDA
    Paddle is as it is; on a CPU half precision is emulated and the scaler forced on."""
    instruments.choose_device(spec)
    return instruments.machine(spec)


def seed(seed: int) -> None:
    """Seed Paddle, NumPy and ``random``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    paddle.seed(seed)


def probe(spec: RunSpec, recorder: FrameworkRecorder, is_cancelled: Callable[[], bool]) -> str:
    """Train ``spec.steps`` steps under watch; the notes as one text. Raises Cancelled."""
    with watching(recorder, ControlSettings()) as notes:
        training = PaddleTraining(spec)
        for _ in range(spec.steps):
            if is_cancelled():
                raise Cancelled("Cancelled; the steps before are kept.")
            training.step(*next(training.batches))
    return " ".join(notes)


class PaddleTraining:
    """One training: model, optimizer and scaler made, one step a call."""

    def __init__(self, spec: RunSpec) -> None:
        if spec.precision not in PRECISIONS:
            raise BadInput(
                f"Paddle has no precision {spec.precision!r} here. Use one of:"
                f" {', '.join(PRECISIONS)}."
            )
        self.options = _options(spec.args)
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


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What ``spec.args`` say."""

    level: str = "O1"
    loop: str = "update"


def _options(args: tuple[str, ...]) -> ProbeOptions:
    """Raises BadInput for an unknown argument."""
    found = {}
    for arg in args:
        name, _, value = arg.partition("=")
        if value not in _VALUES.get(name, ()):
            known = ", ".join(f"{n}={v}" for n, values in _VALUES.items() for v in values)
            raise BadInput(f"A probe of Paddle does not know {arg!r}. It knows {known}.")
        found[name.lstrip("-")] = value
    return ProbeOptions(**found)
