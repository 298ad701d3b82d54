"""Instrument: one 2-norm per parameter at every step, which also says who holds NaN or Inf.

A norm reads each gradient once. Norms of small dense tensors on a CPU are taken together by a
kernel in fp64, others by torch in fp32. One that is not finite is looked at again: squares of
finite fp32 numbers overflow above 2^64 in fp32, and that is no Inf in a gradient.

On CUDA a value that leaves the device makes the host wait. With a plain GradScaler the numbers are
read after its own wait; where the script calls ``unscale_`` itself, the watch waits there. Without
a scaler, and with a fused optimizer, for which GradScaler does not wait, they travel while the
training goes on and are read a step later (:class:`PendingNorms`), when the gradients are gone: a
norm that overflowed fp32 then counts as not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ampscope.capture.failures import wait_for
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensor_table import UNKNOWN
from ampscope.capture.tensor_table import norms as small_norms
from ampscope.capture.tensors import all_finite, floats
from ampscope.watcher.clips import Clip

LARGE = 1 << 17  # elements: from here on torch's own threads are faster


def start_norms(
    gradients: dict[int, Tensor],
    loss: Tensor | float | None,
    weights: Sequence[Tensor] = (),
    clip: Clip | None = None,
    scaler: Sequence[Tensor] = (),
    lr: Tensor | None = None,
) -> PendingNorms:
    """Start reading the norms of gradients, by position, of some weights, the loss, what a ``clip``
    of these gradients found, numbers of a ``scaler``, and a learning rate. A gradient that cannot
    be read has no norm.

    On CUDA that launches, of tensors of one dtype, one norm of all and one op that puts the numbers
    into one tensor, which travels in one copy.
    """
    tensors, own = [*gradients.values(), *weights], len(gradients)
    known, unknown = small_norms(tensors, LARGE)
    others, unreadable = dict[tuple[torch.device, torch.dtype], dict[int, Tensor]](), set[int]()
    for place in np.flatnonzero(known == UNKNOWN).tolist() if unknown else ():
        if (values := floats(tensors[place])) is None:
            unreadable.add(place)
        else:
            others.setdefault((values.device, values.dtype), {})[place] = values
    coming: dict[int, Tensor] = {}
    for (_, dtype), some in others.items():
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        with torch.no_grad():
            norms = torch._foreach_norm(list(some.values()), 2, kind)
        if norms[0].is_cpu:
            known[list(some)] = [float(norm) for norm in norms]
        else:
            coming |= zip(some, norms, strict=True)
    positions, kept = tuple(gradients), list(range(own))
    if unreadable:
        kept = [place for place in kept if place not in unreadable]
        positions = tuple(positions[place] for place in kept)
    return PendingNorms(
        positions,
        known[kept] if unreadable else known[:own],
        {number: coming[place] for number, place in enumerate(kept) if place in coming},
        loss,
        [norm for norm in known[own:].tolist() if norm != UNKNOWN],
        [norm for place, norm in coming.items() if place >= own],
        clip,
        scaler,
        lr,
    )


class PendingNorms:
    """Norms of one optimizer's gradients, and the numbers that are read with them. Those of small
    CPU tensors are here; the others are on their way to the host, as small tensors: here now from a
    CPU, later from CUDA. Every property but :attr:`is_immediate` waits for the device where it has
    to."""

    def __init__(
        self,
        positions: tuple[int, ...],
        known: NDArray[np.float64],
        coming: Mapping[int, Tensor],
        loss: Tensor | float | None,
        known_weights: Sequence[float] = (),
        weights: Sequence[Tensor] = (),
        clip: Clip | None = None,
        scaler: Sequence[Tensor] = (),
        lr: Tensor | None = None,
    ) -> None:
        """``known`` has a norm for each of ``positions``; ``coming`` those that are not known, by
        their place among these. ``scaler``: numbers of the GradScaler that come along; ``lr``: a
        learning rate that does."""
        self.positions = positions  # of the parameters whose gradients these are
        self._norms = known
        self._missing = list(coming)
        self._suspects: tuple[int, ...] | None = None  # before they were asked for
        self._known_weights = list(known_weights)
        if isinstance(loss, Tensor) and loss.is_cpu:
            loss = loss.item()
        self._plain_loss = None if isinstance(loss, Tensor) else loss
        self._has_loss = isinstance(loss, Tensor)
        self._clip = clip
        self._events: list[torch.cuda.Event] = []
        self._values: NDArray[np.float64] | None = None
        parts = [*coming.values(), *weights]
        self._weights = len(coming), len(parts)
        self._has_clip = clip is not None and not clip.norm.is_cpu
        if clip is not None and self._has_clip:
            parts.append(clip.norm.reshape(()))
        self._scaler = slice(len(parts), len(parts) + len(scaler))
        parts += [number.detach().reshape(()) for number in scaler]
        self._lr = None if lr is None else len(parts)
        parts += [] if lr is None else [lr.detach().reshape(())]
        parts += [loss.detach().reshape(())] if isinstance(loss, Tensor) else []
        self._copies: list[Tensor] = []
        self._order: list[int] = []
        if not parts:  # all is here
            return
        kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, part in enumerate(parts):
            kinds.setdefault((part.device, part.dtype), []).append(place)
        for (device, _), places in kinds.items():
            self._order += places
            if len(places) == 1 and device.type == "cuda":  # the copy is all that it takes
                together = parts[places[0]].reshape(1)
            else:
                together = torch.stack([parts[place] for place in places])
            self._copies.append(together.to("cpu", non_blocking=True))
        for device in dict.fromkeys(device for device, _ in kinds if device.type == "cuda"):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    @property
    def is_immediate(self) -> bool:
        """Whether the numbers are here already: nothing came from a device."""
        return not self._events

    @property
    def values(self) -> NDArray[np.float64]:
        """The norm of each of :attr:`positions`."""
        if self._missing:
            self._norms[self._missing] = self._read()[: len(self._missing)]
            self._missing = []
        return self._norms

    @property
    def suspects(self) -> tuple[int, ...]:
        """Positions whose norm is not finite; after :meth:`check`, whose gradient is not."""
        if self._suspects is None:
            values, bad = self.values, np.empty(0, np.intp)
            # The sum of what is finite may overflow; that of others is never finite.
            if not math.isfinite(sum(values.tolist())):
                bad = np.flatnonzero(~np.isfinite(values))
            self._suspects = tuple(self.positions[i] for i in bad)
        return self._suspects

    def check(self, gradients: dict[int, Tensor], scale: float = 1.0) -> None:
        """Take the norms of finite gradients that overflowed fp32 again, in fp64, and leave those
        alone that hold NaN or Inf as suspects. ``scale``: by which the gradients were divided since
        their norms were taken."""
        if not self.suspects:
            return
        suspects, places = [], {position: i for i, position in enumerate(self.positions)}
        for position in self.suspects:
            gradient = gradients.get(position)
            held = None if gradient is None else floats(gradient)
            if held is None or not bool(torch.isfinite(held).all()):
                suspects.append(position)
                continue
            wide = float(torch.linalg.vector_norm(held, dtype=torch.float64)) * scale
            self.values[places[position]] = wide if math.isfinite(wide) else math.inf
        self._suspects = tuple(suspects)

    @property
    def loss(self) -> float | None:
        """None where there was none."""
        return float(self._read()[-1]) if self._has_loss else self._plain_loss

    @property
    def weights(self) -> list[float]:
        """Norms of the weights that were looked at."""
        first, end = self._weights
        return self._known_weights + (self._read()[first:end].tolist() if end > first else [])

    @property
    def scaler(self) -> list[float]:
        """The GradScaler's numbers, in the order in which they were given."""
        return self._read()[self._scaler].tolist() if self._scaler.stop > self._scaler.start else []

    @property
    def lr(self) -> float | None:
        """The learning rate, where it came along."""
        return None if self._lr is None else float(self._read()[self._lr])

    @property
    def unclipped(self) -> float | None:
        """The norm before the training's own clip; None where that changed nothing."""
        if self._clip is None:
            return None
        norm = float(self._read()[self._weights[1]] if self._has_clip else self._clip.norm)
        return None if norm <= self._clip.limit else norm

    def _read(self) -> NDArray[np.float64]:
        if self._values is None:
            for event in self._events:
                wait_for(event)
            self._values = np.empty(len(self._order))
            if self._copies:
                self._values[self._order] = torch.cat([c.double() for c in self._copies]).numpy()
        return self._values


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first of these that holds NaN or infinity; "" where none does. Waits for the
    device."""
    with torch.no_grad(), own_ops():
        return next((name for name, tensor in tensors.items() if not all_finite(tensor)), "")


def in_parts(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """``count`` groups of about as many elements each."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
        place = sizes.index(min(sizes))
        parts[place].append(tensor)
        sizes[place] += tensor.numel()
    return parts
