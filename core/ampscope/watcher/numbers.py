"""Instrument: one 2-norm per parameter at every step, which also says who holds NaN or Inf.

A norm reads each gradient once; on a CPU that is 0.6 % of a step of a small GPT. Norms are taken
in fp32. One that is not finite is looked at again: squares of finite fp32 numbers overflow above
2^64, and that is no Inf in a gradient.

On CUDA a value that leaves the device makes the host wait. GradScaler waits at every step as it
is (unless its optimizer is fused), so with a scaler the numbers are read then. Without one they
travel while the training goes on and are read a step later (:class:`Readout`), when the gradients
are gone: a norm that overflowed fp32 then counts as not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ampscope.capture.tensors import all_finite, floats


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of one step's gradients; ``values[i]`` belongs to parameter ``positions[i]``."""

    positions: tuple[int, ...]
    values: NDArray[np.float64]
    suspects: tuple[int, ...]  # positions whose norm is not finite

    @property
    def total(self) -> float:
        """The 2-norm of all together."""
        largest = float(self.values.max(initial=0.0))  # NaN when one of them is
        if largest == 0.0 or not math.isfinite(largest):
            return largest
        return largest * float(np.sqrt(np.square(self.values / largest).sum()))


class Readout:
    """Small tensors on their way to the host: numbers now on a CPU, later on CUDA."""

    def __init__(
        self,
        positions: tuple[int, ...],
        norms: list[Tensor],
        loss: Tensor | float | None,
        weights: Sequence[Tensor] = (),
    ) -> None:
        self._positions = positions
        self._plain_loss = None if isinstance(loss, Tensor) else loss
        self._has_loss = isinstance(loss, Tensor)
        parts = [*norms, *weights]
        parts += [loss.detach().reshape(())] if isinstance(loss, Tensor) else []
        self._weights = len(norms), len(norms) + len(weights)
        self._copies: list[Tensor] = []
        self._order: list[int] = []
        self._events: list[torch.cuda.Event] = []
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, part in enumerate(parts):
            kinds.setdefault((part.device, part.dtype), []).append(place)
        for (device, _), places in kinds.items():
            self._order += places
            stacked = torch.stack([parts[place] for place in places])
            self._copies.append(stacked.to("cpu", non_blocking=True))
            if device.type == "cuda":
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                event.record(torch.cuda.current_stream(device))
                self._events.append(event)
        self._values: NDArray[np.float64] | None = None

    @property
    def is_immediate(self) -> bool:
        """Whether the numbers are here already: nothing came from a device."""
        return not self._events

    @property
    def loss(self) -> float | None:
        """None where there was none. Waits for the device where it has to."""
        return float(self._read()[-1]) if self._has_loss else self._plain_loss

    @property
    def weights(self) -> list[float]:
        """Norms of the weights that were looked at. Waits for the device where it has to."""
        first, end = self._weights
        return self._read()[first:end].tolist() if end > first else []

    def norms(self) -> Norms:
        """The norms. Waits for the device where it has to."""
        values = self._read()[: len(self._positions)].copy()
        bad = np.flatnonzero(~np.isfinite(values))
        return Norms(self._positions, values, tuple(self._positions[i] for i in bad))

    def _read(self) -> NDArray[np.float64]:
        if self._values is None:
            for event in self._events:
                event.synchronize()
            self._values = np.empty(len(self._order))
            if self._copies:
                self._values[self._order] = torch.cat([c.double() for c in self._copies]).numpy()
        return self._values


class JoinedReadout:
    """Readouts of optimizers that stepped within one backward pass, as one."""

    def __init__(self, parts: Sequence[Readout]) -> None:
        self._parts = parts

    @property
    def is_immediate(self) -> bool:
        """Whether the numbers are here already."""
        return all(part.is_immediate for part in self._parts)

    @property
    def weights(self) -> list[float]:
        """Norms of some weights."""
        return [norm for part in self._parts for norm in part.weights]

    @property
    def loss(self) -> float | None:
        """All have the loss of the one backward pass."""
        return self._parts[0].loss

    def norms(self) -> Norms:
        """Of all gradients. Waits for the device where it has to."""
        return joined([part.norms() for part in self._parts])


def joined(parts: Sequence[Norms]) -> Norms:
    """Norms of different parameters as one."""
    return Norms(
        tuple(position for part in parts for position in part.positions),
        np.concatenate([part.values for part in parts]),
        tuple(position for part in parts for position in part.suspects),
    )


def read_numbers(
    gradients: dict[int, Tensor], loss: Tensor | float | None, weights: Sequence[Tensor] = ()
) -> Readout:
    """Start reading the norms of gradients, by position, of some weights, and the loss. A gradient
    that cannot be read has no norm."""
    kept = {
        position: values
        for position, gradient in gradients.items()
        if (values := floats(gradient)) is not None
    }
    by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for position, gradient in kept.items():
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(position)
    norms: dict[int, Tensor] = {}
    with torch.no_grad():
        for (_, dtype), positions in by_kind.items():
            wide = torch.float64 if dtype is torch.float64 else torch.float32
            some = torch._foreach_norm([kept[i] for i in positions], 2, wide)
            norms |= dict(zip(positions, some, strict=True))
        looked: dict[torch.device, list[Tensor]] = {}
        for weight in weights:
            if (values := floats(weight)) is not None:
                looked.setdefault(values.device, []).append(values)
        of_weights = [
            torch.stack([norm.double() for norm in torch._foreach_norm(some, 2, torch.float32)])
            for some in (
                [v for v in all_ if v.dtype is not torch.float64] for all_ in looked.values()
            )
            if some
        ]
        whole = [norms_.sum() for norms_ in of_weights]
    return Readout(tuple(kept), [norms[position] for position in kept], loss, whole)


def in_parts(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """``count`` groups of about as many elements each."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
        place = sizes.index(min(sizes))
        parts[place].append(tensor)
        sizes[place] += tensor.numel()
    return parts


def checked(norms: Norms, gradients: dict[int, Tensor]) -> Norms:
    """With the norms of finite gradients that overflowed fp32 taken again in fp64, and only those
    that hold NaN or Inf left as suspects. Waits for the device; only called when there are any."""
    if not norms.suspects:
        return norms
    values, suspects = norms.values.copy(), []
    places = {position: place for place, position in enumerate(norms.positions)}
    for position in norms.suspects:
        gradient = gradients.get(position)
        held = None if gradient is None else floats(gradient)
        if held is None or not bool(torch.isfinite(held).all()):
            suspects.append(position)
            continue
        wide = torch.linalg.vector_norm(held, dtype=torch.float64)
        values[places[position]] = float(wide) if math.isfinite(float(wide)) else math.inf
    return Norms(norms.positions, values, tuple(suspects))


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first of these that holds NaN or infinity; "" where none does. Waits for the
    device."""
    with torch.no_grad(), no_dispatch():
        return next((name for name, tensor in tensors.items() if not all_finite(tensor)), "")
