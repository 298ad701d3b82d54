"""PaddlePaddle, as :class:`ampscope.frameworks.adapters.Adapter` asks for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import paddle

from ampscope.frameworks.paddle.probe import train
from ampscope.frameworks.paddle.versions import choose_device, machine
from ampscope.frameworks.paddle.watching import watching
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings
from ampscope.records import Machine, RunSpec


class PaddleAdapter:
    """Paddle on CUDA as it is; on a CPU half precision is emulated and the scaler forced on."""

    def machine(self, spec: RunSpec) -> Machine:
        """Where and with what a run of ``spec`` takes place; Paddle is on that device then."""
        choose_device(spec)
        return machine(spec)

    def probe(self, spec: RunSpec, recorder: Recorder, is_cancelled: Callable[[], bool]) -> str:
        """Train a shared network."""
        return train(spec, recorder, is_cancelled)

    def watching(self, recorder: Recorder, settings: Settings) -> AbstractContextManager[list[str]]:
        """Watch a script."""
        return watching(recorder, settings)

    def seed(self, seed: int) -> None:
        """Seed Paddle, NumPy and ``random``."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        paddle.seed(seed)


ADAPTER = PaddleAdapter()
