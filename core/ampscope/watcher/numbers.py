"""Instrument: one 2-norm per parameter at every step, which also says who holds NaN or Inf.

A norm reads each gradient once. Norms of small dense tensors on a CPU are taken together by a
kernel in fp64, others by torch in fp32. One that is not finite is looked at again: squares of
finite fp32 numbers overflow above 2^64 in fp32, and that is no Inf in a gradient.

On CUDA a value that leaves the device makes the host wait. With a plain GradScaler the numbers are
read after its own wait; where the script calls ``unscale_`` itself, the watch waits there. Without
a scaler, and with a fused optimizer, for which GradScaler does not wait, they travel while the
training goes on and are read a step later (:class:`Readout`), when the gradients are gone: a norm
that overflowed fp32 then counts as not finite.

The training's own clip of the norm is noted here too (:class:`Clips`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import clip_grad

from ampscope.capture.failures import wait_for
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensor_table import UNKNOWN
from ampscope.capture.tensor_table import norms as small_norms
from ampscope.capture.tensors import all_finite, floats, is_traced
from ampscope.patches import Patches
from ampscope.watcher.guard import Guard

LARGE = 1 << 17  # elements: from here on torch's own threads are faster


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of one step's gradients; ``values[i]`` belongs to parameter ``positions[i]``."""

    positions: tuple[int, ...]
    values: NDArray[np.float64]
    suspects: tuple[int, ...]  # positions whose norm is not finite

    @property
    def total(self) -> float:
        """The 2-norm of all together."""
        values = self.values.tolist()
        total = math.hypot(*values)
        return math.nan if total == math.inf and any(map(math.isnan, values)) else total


class Readout:
    """Numbers of one step: those of small CPU tensors are here, the others are on their way to the
    host, as small tensors: here now from a CPU, later from CUDA."""

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
        self._positions = positions
        self._known = known
        self._missing = list(coming)
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
    def loss(self) -> float | None:
        """None where there was none. Waits for the device where it has to."""
        return float(self._read()[-1]) if self._has_loss else self._plain_loss

    @property
    def weights(self) -> list[float]:
        """Norms of the weights that were looked at. Waits for the device where it has to."""
        first, end = self._weights
        return self._known_weights + (self._read()[first:end].tolist() if end > first else [])

    @property
    def scaler(self) -> list[float]:
        """The GradScaler's numbers, in the order in which they were given. Waits for the device
        where it has to."""
        return self._read()[self._scaler].tolist() if self._scaler.stop > self._scaler.start else []

    @property
    def lr(self) -> float | None:
        """The learning rate, where it came along. Waits for the device where it has to."""
        return None if self._lr is None else float(self._read()[self._lr])

    @property
    def unclipped(self) -> float | None:
        """The norm before the training's own clip; None where that changed nothing. Waits for the
        device where it has to."""
        if self._clip is None:
            return None
        norm = float(self._read()[self._weights[1]] if self._has_clip else self._clip.norm)
        return None if norm <= self._clip.limit else norm

    def norms(self) -> Norms:
        """The norms. Waits for the device where it has to."""
        values = self._known
        if self._missing:
            values[self._missing] = self._read()[: len(self._missing)]
        # The sum of what is finite may overflow; that of others is never finite.
        bad = () if math.isfinite(sum(values.tolist())) else np.flatnonzero(~np.isfinite(values))
        return Norms(self._positions, values, tuple(self._positions[i] for i in bad))

    def _read(self) -> NDArray[np.float64]:
        if self._values is None:
            for event in self._events:
                wait_for(event)
            self._values = np.empty(len(self._order))
            if self._copies:
                self._values[self._order] = torch.cat([c.double() for c in self._copies]).numpy()
        return self._values


class PendingFlag:
    """Whether an optimizer left out its step, on its way from the device."""

    def __init__(self, found: Tensor) -> None:
        """``found``: one number, which is not zero where the step was left out."""
        self._copy = found.detach().reshape(()).to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if not found.is_cpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(found.device))

    @property
    def value(self) -> bool:
        """Waits for the device where it has to."""
        if self._event is not None:
            wait_for(self._event)
        return bool(self._copy)


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
    def lr(self) -> float | None:
        """That of the first."""
        return self._parts[0].lr

    @property
    def unclipped(self) -> None:
        """None: each of them saw a part of the gradients."""
        return None

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
    gradients: dict[int, Tensor],
    loss: Tensor | float | None,
    weights: Sequence[Tensor] = (),
    clip: Clip | None = None,
    scaler: Sequence[Tensor] = (),
    lr: Tensor | None = None,
) -> Readout:
    """Start reading the norms of gradients, by position, of some weights, the loss, what a ``clip``
    of these gradients found, numbers of a ``scaler``, and a learning rate. A gradient that cannot
    be read has no norm.

    On CUDA that launches, of tensors of one dtype, one norm of all and one op that puts the numbers
    into one tensor, which travels in one copy.
    """
    tensors = [*gradients.values(), *weights]
    known, unknown = small_norms(tensors, LARGE)
    if not unknown:
        own = len(gradients)
        return Readout(
            tuple(gradients), known[:own], {}, loss, known[own:].tolist(), (), clip, scaler, lr
        )
    others, unreadable = _Others(), set()
    for place in np.flatnonzero(known == UNKNOWN).tolist():
        if not others.add(place, tensors[place]):
            unreadable.add(place)
    with torch.no_grad():
        norms = others.norms()
    for place, norm in [*norms.items()]:
        if norm.is_cpu:
            known[place] = float(norm)
            del norms[place]
    kept = [place for place in range(len(gradients)) if place not in unreadable]
    places = {place: number for number, place in enumerate(kept)}
    positions = tuple(gradients)
    coming = {places[place]: norm for place, norm in norms.items() if place in places}
    later = range(len(gradients), len(tensors))
    return Readout(
        tuple(positions[place] for place in kept),
        known[kept],
        coming,
        loss,
        [norm for norm in known[len(gradients) :].tolist() if norm != UNKNOWN],
        [norms[place] for place in later if place in norms],
        clip,
        scaler,
        lr,
    )


class _Others:
    """Tensors whose norms torch takes, all of one device and dtype together."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}

    def add(self, place: int, tensor: Tensor) -> bool:
        """Whether ``tensor`` can be read."""
        values = floats(tensor)
        if values is None:
            return False
        self._kinds.setdefault((values.device, values.dtype), {})[place] = values
        return True

    def norms(self) -> dict[int, Tensor]:
        """By place: of fp64 in fp64, else in fp32."""
        wide, found = torch.float64, dict[int, Tensor]()
        for (_, dtype), some in self._kinds.items():
            kind = wide if dtype is wide else torch.float32
            found |= zip(some, torch._foreach_norm(list(some.values()), 2, kind), strict=True)
        return found


def in_parts(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """``count`` groups of about as many elements each."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    sizes = [0] * count
    for tensor in sorted(tensors, key=Tensor.numel, reverse=True):
        place = sizes.index(min(sizes))
        parts[place].append(tensor)
        sizes[place] += tensor.numel()
    return parts


def checked(norms: Norms, gradients: dict[int, Tensor], scale: float = 1.0) -> Norms:
    """With the norms of finite gradients that overflowed fp32 taken again in fp64, and only those
    that hold NaN or Inf left as suspects. ``scale``: by which the gradients were divided since
    their norms were taken. Waits for the device where there are suspects."""
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
        wide = float(torch.linalg.vector_norm(held, dtype=torch.float64)) * scale
        values[places[position]] = wide if math.isfinite(wide) else math.inf
    return Norms(norms.positions, values, tuple(suspects))


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first of these that holds NaN or infinity; "" where none does. Waits for the
    device."""
    with torch.no_grad(), own_ops():
        return next((name for name, tensor in tensors.items() if not all_finite(tensor)), "")


# Instrument: the training's own `torch.nn.utils.clip_grad_norm_`, so that a step has both norms.
#
# Without a scaler a clip comes before the gradients are read, and the norm before it is the one
# that the clip itself took. After ``scaler.unscale_`` it comes behind the reading, and the limit
# alone says what was left of the norm. Only clips by the 2-norm, of all gradients that the
# optimizer steps, are taken note of.


@dataclass(frozen=True, slots=True)
class Clip:
    """One call: the 2-norm that it found (a tensor, perhaps still to be computed) and its limit."""

    norm: Tensor
    limit: float
    parameters: frozenset[int]  # their ids


class Clips:
    """Clips of the threads that train, since the last :meth:`take`."""

    def __init__(self, threads: set[int], guard: Guard) -> None:
        self._threads = threads
        self._guard = guard
        self._patches = Patches()
        self._norm_type = 2.0  # of the norm that was taken last
        self._last: Clip | None = None

    def __enter__(self) -> Clips:
        # What the public function calls: a script may have imported that before the watch began.
        for name, call in (("_get_total_norm", self._norm), ("_clip_grads_with_norm_", self._clip)):
            if hasattr(clip_grad, name):
                self._patches.wrap(clip_grad, name, call)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.undo()
        self._last = None

    def take(self, parameters: Iterable[Tensor]) -> Clip | None:
        """The last clip, where it was of all these ``parameters``."""
        clip, self._last = self._last, None
        if clip is None or any(id(p) not in clip.parameters for p in parameters):
            return None
        return clip

    def _norm(
        self, original: Any, tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_traced():
            self._norm_type = norm_type
        return original(tensors, norm_type, *args, **kwargs)

    def _clip(
        self, original: Any, parameters: Any, limit: Any, norm: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not is_traced():
            parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            self._guard.call(self._note, parameters, limit, norm)
        return original(parameters, limit, norm, *args, **kwargs)

    def _note(self, parameters: list[Tensor], limit: Any, norm: Any) -> None:
        here = threading.get_ident() in self._threads
        if here and self._norm_type == 2.0 and type(norm) is Tensor and norm.numel() == 1:
            self._last = Clip(norm.detach(), float(limit), frozenset(map(id, parameters)))
