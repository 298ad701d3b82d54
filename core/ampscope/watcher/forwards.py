"""One call of a watched model as it is kept: inputs, surroundings, what came back at its output."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.tensors import floating_tensors, version


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast region in which a model was called."""

    device: str
    dtype: torch.dtype | None  # None: none was open


@dataclass(frozen=True, slots=True)
class Randomness:
    """States of torch's generators; of CUDA's, the model's device."""

    cpu: Tensor
    cuda: Tensor | None = None


@dataclass(slots=True)
class Forward:
    """One call of a watched model and what came back at its output."""

    model: str
    module: str  # dotted path below the model; "" for the model itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]  # of the tensors among the inputs: tells whether one was overwritten
    autocast: Autocast
    randomness: Randomness
    training: bool
    buffers: dict[str, Tensor]  # as before the call; those that the model changes
    outputs: int = 0  # floating-point tensors
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by output
    missing: list[str] = field(default_factory=list)  # what could not be held, and why
    held_bytes: int = 0  # of the gradients
    steps_seen: int = 0  # steps of other models that it was kept through

    @property
    def input_bytes(self) -> int:
        """What its tensors among the inputs take."""
        tensors = floating_tensors((self.args, self.kwargs))
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def is_intact(self) -> bool:
        """Whether the inputs are still what the model was called with."""
        return self.versions == [version(t) for t in floating_tensors((self.args, self.kwargs))]


@dataclass(frozen=True, slots=True)
class Past:
    """The numbers of one step that is over."""

    step: int
    loss: float | None
    scale: float | None
    norms: NDArray[np.float64]  # one per parameter, unscaled; NaN where it had no gradient


def autocast_now(device: str) -> Autocast:
    """The autocast region that is open for ``device``."""
    if not torch.is_autocast_enabled(device):
        return Autocast(device, None)
    return Autocast(device, torch.get_autocast_dtype(device))


def random_now(device: torch.device) -> Randomness:
    """The generators' states; reading them waits for nothing."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Randomness(torch.get_rng_state(), cuda)
