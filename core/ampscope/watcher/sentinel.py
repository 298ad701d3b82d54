"""Instrument: whether this rank's own backward pass was finite, before ranks add up gradients.

What ``.grad`` holds under DistributedDataParallel and FSDP is the sum over all ranks: one rank's
NaN is on every rank. The gradient of the first module's output is this rank's own, and it is
the last that backward reaches, so what went wrong further up has arrived there. It costs one sum
per forward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ampscope.capture.global_hooks import FORWARD, Subscription
from ampscope.capture.tensors import floating_tensors, readable
from ampscope.capture.user_objects import children
from ampscope.watcher.guard import Guard
from ampscope.watcher.models import WatchedModels


class Sentinel:
    """Watches while entered; :attr:`sums` are those of the present step, of which one is not finite
    where this rank's own gradients were not."""

    def __init__(self, models: WatchedModels, guard: Guard) -> None:
        self._guard = guard
        self._models = models
        self._leaves = {id(m) for m in models.modules if not children(m)}
        self.is_paused = False
        self._is_armed = True  # for the first module of the next forward
        self._roots = {id(m) for root in models.roots for m in (root.called, root.plain)}
        self.sums: list[Tensor] = []
        self._handle: Subscription | None = None

    def __enter__(self) -> Sentinel:
        self._handle = FORWARD.subscribe(self._guard.hook(self._after_forward))
        return self

    def __exit__(self, *error: object) -> None:
        if self._handle is not None:
            self._handle.remove()
        self.sums.clear()

    def take(self) -> list[Tensor]:
        """The sums of the step that is over. Begins anew."""
        sums, self.sums, self._is_armed = self.sums, [], True
        return sums

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if self.is_paused:
            return
        if id(module) in self._roots:
            self._is_armed = True
        if not self._is_armed or id(module) not in self._leaves:
            return
        for tensor in floating_tensors(output):
            if tensor.requires_grad and not tensor.is_leaf:
                self._is_armed = False
                tensor.register_hook(self._guard.hook(self._note))  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return

    def _note(self, gradient: Tensor | None) -> None:
        values = None if gradient is None else readable(gradient)  # a Function may give none
        if values is not None:
            # In fp32: a sum of finite fp16 numbers may overflow in fp16.
            self.sums.append(values.sum(dtype=torch.float32))
