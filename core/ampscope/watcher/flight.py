"""The flight recorder: what is needed to run the forward and backward of the present step again.

Inputs and the gradients at the model's output are held, not copied: they are dropped when the step
ends well. Buffers that a forward changes (BatchNorm's statistics) are copied before it, and the
random states are kept. Of the last :data:`RING` steps the numbers are kept, a norm per parameter
among them: whose gradient grew before the fall.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ampscope.capture.failures import OwnTime
from ampscope.capture.tensors import (
    floating_tensors,
    in_backward,
    is_fx_tracing,
    version,
)
from ampscope.capture.user_objects import children
from ampscope.patches import Patches
from ampscope.runner.device import peak_bytes
from ampscope.watcher.buffer_copies import CalledModule
from ampscope.watcher.guard import Guard
from ampscope.watcher.models import WatchedModels

RING = 32  # steps; a scale of 65536 has fallen to nothing after as many skips
MOST_FORWARDS = 32  # of one step, the last ones; micro-batches of an accumulation
MOST_STEPS = 8  # of other models, until their own comes: five steps of a critic to one are usual
MEMORY_SHARE = 0.005  # of the device's peak; two instruments hold that much at most
HOST_BYTES = 64 << 20  # where the peak is unknown (a CPU)
INPUT_SHARES = 4  # of that, for inputs of earlier calls besides the newest one's


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


@dataclass(slots=True, weakref_slot=True)
class Forward:
    """One call of a watched model and what came back at its output."""

    model: str
    module: str  # dotted path below the model; "" for the model itself
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[int]  # of the tensors among the inputs: shows whether one was overwritten
    autocast: Autocast
    randomness: Randomness
    training: bool
    buffers: dict[str, Tensor]  # as before the call; those that the model changes
    outputs: int = 0  # floating-point tensors
    gradients: dict[int, Tensor] = field(default_factory=dict)  # by output
    missing: list[str] = field(default_factory=list)  # what could not be held, and why
    held_bytes: int = 0  # of the gradients
    has_inputs: bool = True  # they were not let go
    steps_seen: int = 0  # steps of other models that it was kept through

    @property
    def input_bytes(self) -> int:
        """What its tensors among the inputs take."""
        tensors = floating_tensors((self.args, self.kwargs))
        return sum(t.numel() * t.element_size() for t in tensors)

    def without_inputs(self) -> Forward:
        """What is left of it when its inputs are let go."""
        return replace(self, args=(), kwargs={}, versions=[], has_inputs=False)

    @property
    def is_intact(self) -> bool:
        """Whether the inputs are still what the model was called with."""
        return self.versions == versions(self.args, self.kwargs)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """The numbers of one step that is over."""

    step: int
    loss: float | None
    scale: float | None
    norms: NDArray[np.float64]  # one per parameter, unscaled; NaN where it had no gradient


class FlightRecorder:
    """Holds the present step's forwards while entered; :meth:`drop` when it ended well.

    The call of a model is seen by a wrapper on its class: a hook on the model itself would go into
    every copy and every pickle that its owner makes of it. Where a model is never called as a whole
    (a LightningModule) its direct children are.
    """

    def __init__(self, models: WatchedModels, threads: set[int], guard: Guard) -> None:
        """Threads that call a watched model are added to ``threads``."""
        self._threads = threads
        self._guard = guard
        self.forwards: list[Forward] = []
        self.past: deque[Callable[[], StepSummary]] = deque(maxlen=RING)  # few are ever asked for
        self.time = OwnTime()
        self.peaks = Peaks()
        self.is_paused = False
        self._models = models
        self._patches = Patches()
        self._is_inside = False
        self._places: dict[int, CalledModule] = {}
        self._held = 0  # bytes of gradients at outputs
        for root in models.roots:
            below = [] if root.is_compiled else children(root.plain)
            for path, module in [("", root.called), *below]:
                self._places.setdefault(id(module), CalledModule(root, path, module))
        self._by_path = {(p.root.name, p.path): p for p in self._places.values()}

    def __enter__(self) -> FlightRecorder:
        self.is_paused = False
        for kind in {type(place.module) for place in self._places.values()}:
            inherits = next(k for k in kind.__mro__ if "__call__" in vars(k)) is nn.Module
            self._patches.replace(kind, "__call__", partial(self._call, inherits))
        return self

    def __exit__(self, *error: object) -> None:
        self.is_paused = True  # a wrapper of ours may live on inside another library's
        self._patches.undo()
        self.forwards.clear()
        self.past.clear()

    def drop(self, models: set[str], *, unread: bool = False) -> None:
        """The step of these models' parameters is over. What others did may still be needed.
        ``unread``: the forwards that go were handed to no one."""
        kept: list[Forward] = []
        for forward in self.forwards:
            if forward.model not in models and forward.steps_seen < MOST_STEPS:
                kept.append(forward)
                forward.steps_seen += 1
            elif unread and forward.buffers:
                self._by_path[forward.model, forward.module].reuse(forward.buffers)
        self.forwards = kept
        self._held = sum(f.held_bytes for f in self.forwards)

    def _call(self, inherits: bool, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(module, *args, **kwargs)
            if is_fx_tracing():  # by a function that its tracer has put on nn.Module meanwhile
                call = nn.Module.__call__ if inherits else original
                return call(module, *args, **kwargs)
            if self._is_inside or self.is_paused:
                return original(module, *args, **kwargs)
            place = self._places.get(id(module))
            # Checkpointing repeats a forward inside the backward pass.
            if place is None or not torch.is_grad_enabled() or in_backward():
                return original(module, *args, **kwargs)
            with self.time.spent("the inputs"):
                forward = self._guard.call(self._begun, place, args, kwargs)
            self._is_inside = True
            try:
                output = original(module, *args, **kwargs)
            finally:
                self._is_inside = False
            if forward is not None:
                with self.time.spent("the outputs"):
                    self._guard.call(self._ended, place, forward, output)
            return output

        return wrapper

    def _begun(self, place: CalledModule, args: Any, kwargs: Any) -> Forward:
        self._threads.add(threading.get_ident())
        self._models.called(place.root)
        device = place.device
        forward = Forward(
            place.root.name,
            place.path,
            args,
            kwargs,
            versions(args, kwargs),
            autocast_now(device.type),
            random_now(device),
            place.module.training,
            place.copies(),
        )
        self.forwards.append(forward)
        self._drop_earliest(device)
        return forward

    def _drop_earliest(self, device: torch.device) -> None:
        """Drop the earliest calls, where there are many or where they hold much: the training
        itself keeps one batch, and may have freed the others."""
        if len(self.forwards) == 1:  # the last is always kept
            return
        room = INPUT_SHARES * self.peaks.held_bytes(device)
        for place in range(len(self.forwards) - 1, -1, -1):
            forward = self.forwards[place]
            room -= forward.input_bytes
            later = len(self.forwards) - 1 - place
            if later and (room < 0 or later >= MOST_FORWARDS):
                del self.forwards[: place + 1]
                return

    def _ended(self, place: CalledModule, forward: Forward, output: Any) -> None:
        place.learn(forward.buffers)
        tensors = floating_tensors(output)
        forward.outputs = len(tensors)
        known = weakref.ref(forward)  # a loss that lives on keeps its hooks, and not the inputs
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._guard.hook(partial(self._hold, known, number)))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def _hold(self, known: weakref.ref[Forward], number: int, gradient: Tensor | None) -> None:
        forward = known()
        if self.is_paused or forward is None or gradient is None:  # a Function that gives none
            return
        size = gradient.numel() * gradient.element_size()
        if self._held + size > self.peaks.held_bytes(gradient.device):
            forward.missing.append(f"the gradient at output {number} ({size / 2**20:.0f} MiB)")
            return
        self._held += size
        forward.held_bytes += size
        # An output that is used twice gets its gradient whole, once: this hook runs on the sum.
        forward.gradients[number] = gradient.detach()


def versions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Of the floating-point tensors among the inputs of a call."""
    found: list[int] = []
    for value in (*args, *kwargs.values()):
        if type(value) is Tensor:  # nearly always
            found += [version(value)] if value.is_floating_point() else ()
        else:
            found += map(version, floating_tensors(value))
    return found


def autocast_now(device: str) -> Autocast:
    """The autocast region that is open for ``device``."""
    if not torch.is_autocast_enabled(device):
        return Autocast(device, None)
    return Autocast(device, torch.get_autocast_dtype(device))


def random_now(device: torch.device) -> Randomness:
    """The generators' states; reading them waits for nothing."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return Randomness(torch.get_rng_state(), cuda)


class Peaks:
    """Peak memory of each device so far. A look at it takes as long as several launches, or reads
    a file, so all that is asked within :data:`EVERY_S` shares one."""

    EVERY_S = 0.1

    def __init__(self) -> None:
        self._known: dict[torch.device, tuple[int, float]] = {}  # bytes, and when to look again

    def bytes(self, device: torch.device) -> int:
        """Of the device, or on a CPU of the process."""
        peak, due = self._known.get(device, (0, 0.0))
        if (now := time.perf_counter()) >= due:
            peak = peak_bytes(device)
            self._known[device] = peak, now + self.EVERY_S
        return peak

    def held_bytes(self, device: torch.device) -> int:
        """What may be held on to through a backward pass, where the peak is."""
        if device.type != "cuda":
            return HOST_BYTES
        return int(MEMORY_SHARE * self.bytes(device))


def free_bytes(device: torch.device, step_bytes: int) -> int:
    """What may be allocated before an optimizer's step without raising the device's peak by more
    than the share; the step itself may take ``step_bytes`` besides (temporaries as large as the
    parameters, in torch's foreach optimizers)."""
    if device.type != "cuda":
        return HOST_BYTES
    allocated = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]
    free = allocated["peak"] - allocated["current"] - step_bytes
    return int(max(0, free) + MEMORY_SHARE * allocated["peak"])
