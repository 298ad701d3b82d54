"""What the probe and script processes ask of Keras; see :mod:`ampscope.frameworks.adapters`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import keras

from ampscope.frameworks.keras.probe import probe
from ampscope.frameworks.keras.versions import choose_device, machine
from ampscope.frameworks.keras.watching import watching
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings
from ampscope.records import Machine, RunSpec


class KerasAdapter:
    """TensorFlow/Keras."""

    def machine(self, spec: RunSpec) -> Machine:
        choose_device(spec)
        return machine(spec)

    def probe(self, spec: RunSpec, recorder: Recorder, is_cancelled: Callable[[], bool]) -> str:
        return probe(spec, recorder, is_cancelled)

    def watching(self, recorder: Recorder, settings: Settings) -> AbstractContextManager[list[str]]:
        return watching(recorder, settings)

    def seed(self, seed: int) -> None:
        keras.utils.set_random_seed(seed)  # Python's, NumPy's and TensorFlow's


ADAPTER = KerasAdapter()
