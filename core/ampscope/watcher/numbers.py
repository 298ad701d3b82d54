"""Instrument: one 2-norm per parameter at every step, which also says who holds NaN or Inf.

A norm reads each gradient once; on a CPU that is 0.6 % of a step of a small GPT. Norms are taken
in fp32. One that is not finite is looked at again: squares of finite fp32 numbers overflow above
2^64, and that is no Inf in a gradient.

On CUDA a value that leaves the device makes the host wait. GradScaler waits at every step as it
is, so with a scaler the norms are read then. Without one they travel while the training goes on
and are read a step later (:class:`Readout`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.watcher.models import is_dtensor


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of one step's gradients; ``values[i]`` belongs to parameter ``positions[i]``."""

    positions: tuple[int, ...]
    values: NDArray[np.float64]
    suspects: tuple[int, ...]  # positions whose norm is not finite

    @property
    def total(self) -> float:
        """The 2-norm of all together."""
        return float(np.sqrt(np.square(self.values).sum())) if len(self.values) else 0.0


class Readout:
    """Small tensors on their way to the host: numbers now on a CPU, later on CUDA."""

    def __init__(self, positions: tuple[int, ...], parts: list[Tensor]) -> None:
        self._positions = positions
        self._event: torch.cuda.Event | None = None
        devices = {part.device for part in parts}
        self._copies: list[Tensor] = []
        self._order: list[int] = []
        for device in devices:
            places = [i for i, part in enumerate(parts) if part.device == device]
            self._order += places
            stacked = torch.stack([parts[i] for i in places])
            self._copies.append(stacked.to("cpu", non_blocking=True))
            if device.type == "cuda":
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._event.record(torch.cuda.current_stream(device))

    @property
    def is_immediate(self) -> bool:
        """Whether the numbers are here already: nothing came from a device."""
        return self._event is None

    def norms(self) -> Norms:
        """The numbers; waits for the device where it has to."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values = np.empty(len(self._positions))
        if self._copies:
            values[self._order] = torch.cat(self._copies).double().numpy()
        bad = np.flatnonzero(~np.isfinite(values))
        return Norms(self._positions, values, tuple(self._positions[i] for i in bad))


def read_norms(gradients: list[tuple[int, Tensor]]) -> Readout:
    """Start reading the norms of (position, gradient) pairs."""
    kept = [(position, stored(gradient)) for position, gradient in gradients]
    if not kept:
        return Readout((), [])
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, (_, gradient) in enumerate(kept):
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(place)
    norms: list[Tensor] = [torch.empty(0)] * len(kept)
    with torch.no_grad():
        for (_, dtype), places in by_kind.items():
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            some = torch._foreach_norm([kept[i][1] for i in places], 2, wide)
            for place, norm in zip(places, some, strict=True):
                norms[place] = norm.float() if wide is torch.float64 else norm
    return Readout(tuple(position for position, _ in kept), norms)


def checked(norms: Norms, gradients: dict[int, Tensor]) -> Norms:
    """With the norms of finite gradients that overflowed fp32 taken again in fp64, and only those
    that hold NaN or Inf left as suspects. Waits for the device; only called when there are any."""
    if not norms.suspects:
        return norms
    values, suspects = norms.values.copy(), []
    places = {position: place for place, position in enumerate(norms.positions)}
    for position in norms.suspects:
        gradient = gradients.get(position)
        if gradient is None or not bool(torch.isfinite(stored(gradient)).all()):
            suspects.append(position)
            continue
        wide = torch.linalg.vector_norm(stored(gradient).double())
        values[places[position]] = float(wide) if math.isfinite(float(wide)) else math.inf
    return Norms(norms.positions, values, tuple(suspects))


def stored(gradient: Tensor) -> Tensor:
    """The numbers that this process holds: a DTensor's part, a sparse gradient's values."""
    if is_dtensor(gradient):
        gradient = gradient._local_tensor  # type: ignore[attr-defined]  # of a DTensor
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
