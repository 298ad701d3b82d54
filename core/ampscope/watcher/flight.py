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
from collections import deque
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ampscope.capture.script.patches import Patches
from ampscope.capture.tensors import floating_tensors, in_backward, version
from ampscope.watcher.called_modules import CalledModule
from ampscope.watcher.containment import Guard
from ampscope.watcher.forwards import Forward, Past, autocast_now, random_now
from ampscope.watcher.memory import held_bytes, input_bytes
from ampscope.watcher.models import WatchedModels

RING = 32  # steps; a scale of 65536 has fallen to nothing after as many skips
MOST_FORWARDS = 32  # of one step, the last ones; micro-batches of an accumulation
MOST_STEPS = 8  # of other models, until their own comes: five steps of a critic to one are usual


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
        self.past: deque[Past] = deque(maxlen=RING)
        self.elapsed_s = 0.0
        self.is_paused = False
        self._models = models
        self._patches = Patches()
        self._is_inside = False
        self._places: dict[int, CalledModule] = {}
        self._held = 0  # bytes of gradients at outputs
        for root in models.roots:
            children = [] if root.is_compiled else list(root.plain.named_children())
            for path, module in [("", root.called), *children]:
                self._places.setdefault(id(module), CalledModule(root, path, module))
        self._by_path = {(p.root.name, p.path): p for p in self._places.values()}

    def __enter__(self) -> FlightRecorder:
        self.is_paused = False
        for kind in {type(place.module) for place in self._places.values()}:
            self._patches.replace(kind, "__call__", self._call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.is_paused = True  # a wrapper of ours may live on inside somebody else's
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

    def take_elapsed_s(self) -> float:
        """The instrument's own time since the last call."""
        elapsed, self.elapsed_s = self.elapsed_s, 0.0
        return elapsed

    def _call(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_inside or self.is_paused:
                return original(module, *args, **kwargs)
            place = self._places.get(id(module))
            # Checkpointing repeats a forward inside the backward pass.
            if place is None or not torch.is_grad_enabled() or in_backward():
                return original(module, *args, **kwargs)
            forward = self._guard.call(self._begun, place, args, kwargs)
            self._is_inside = True
            try:
                output = original(module, *args, **kwargs)
            finally:
                self._is_inside = False
            if forward is not None:
                self._guard.call(self._ended, place, forward, output)
            return output

        return wrapper

    def _begun(self, place: CalledModule, args: Any, kwargs: Any) -> Forward:
        started = time.perf_counter()
        self._threads.add(threading.get_ident())
        self._models.called(place.root)
        device = place.device
        forward = Forward(
            place.root.name,
            place.path,
            args,
            kwargs,
            [version(tensor) for tensor in floating_tensors((args, kwargs))],
            autocast_now(device.type),
            random_now(device),
            place.module.training,
            place.copies(),
        )
        self.forwards.append(forward)
        self._let_go(device)
        self.elapsed_s += time.perf_counter() - started
        return forward

    def _let_go(self, device: torch.device) -> None:
        """Of the earliest calls, where there are many or where they hold much: the training itself
        keeps one batch, and may have freed the others."""
        if len(self.forwards) == 1:  # the last is always kept
            return
        room = input_bytes(device)
        for place in range(len(self.forwards) - 1, -1, -1):
            forward = self.forwards[place]
            room -= forward.input_bytes
            later = len(self.forwards) - 1 - place
            if later and (room < 0 or later >= MOST_FORWARDS):
                del self.forwards[: place + 1]
                return

    def _ended(self, place: CalledModule, forward: Forward, output: Any) -> None:
        started = time.perf_counter()
        place.learn(forward.buffers)
        tensors = floating_tensors(output)
        forward.outputs = len(tensors)
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(self._guard.hook(partial(self._hold, forward, number)))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.elapsed_s += time.perf_counter() - started

    def _hold(self, forward: Forward, number: int, gradient: Tensor | None) -> None:
        if self.is_paused or gradient is None:  # a Function that gives none
            return
        size = gradient.numel() * gradient.element_size()
        if self._held + size > held_bytes(gradient.device):
            forward.missing.append(f"the gradient at output {number} ({size / 2**20:.0f} MiB)")
            return
        self._held += size
        forward.held_bytes += size
        # An output that is used twice gets its gradient whole, once: this hook runs on the sum.
        forward.gradients[number] = gradient.detach()
