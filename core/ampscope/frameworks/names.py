"""The frameworks beside PyTorch, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ampscope.errors import BadInput


@dataclass(frozen=True, slots=True)
class Framework:
    """One framework: what it is called, how it is found, installed and run."""

    name: str  # the word of options and records
    title: str
    modules: tuple[str, ...]  # top-level imports by which a script is known
    probe_module: str  # what a Python must be able to import
    requirements: tuple[str, ...]  # for pip
    variable: str  # environment variable that names a Python


KERAS = Framework(
    "keras",
    "TensorFlow/Keras",
    ("keras", "tensorflow", "tf_keras"),
    "tensorflow",
    ("tensorflow-cpu>=2.16,<3", "keras>=3.3,<4"),
    "AMPSCOPE_KERAS_PYTHON",
)
PADDLE = Framework(
    "paddle",
    "PaddlePaddle",
    ("paddle",),
    "paddle",
    # GradScaler.update() of Paddle 3.3 raises TypeError with NumPy 2.4 at the first overflow.
    ("paddlepaddle>=3.0,<4", "numpy<2.4"),
    "AMPSCOPE_PADDLE_PYTHON",
)
FRAMEWORKS: Mapping[str, Framework] = MappingProxyType({f.name: f for f in (KERAS, PADDLE)})
TORCH = "torch"  # in RunSpec.framework and Machine.framework


def framework(name: str) -> Framework:
    """The framework of that name. Raises BadInput for another."""
    if name not in FRAMEWORKS:
        raise BadInput(f"There is no framework {name!r}. Use torch, {', '.join(FRAMEWORKS)}.")
    return FRAMEWORKS[name]
