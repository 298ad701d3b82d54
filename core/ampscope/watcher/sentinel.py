"""Instrument: whether this rank's own backward pass was finite, before ranks add up gradients.

What ``.grad`` holds under DistributedDataParallel and FSDP is the sum over all ranks: one rank's
NaN is in everybody's. The gradient of the first module's output is this rank's own, and it is the
last that backward reaches, so what went wrong further up has arrived there. One sum a forward.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch import Tensor, nn

from ampscope.capture.global_hooks import FORWARD, Subscription
from ampscope.capture.tensors import floating_tensors, readable
from ampscope.watcher.containment import Guard
from ampscope.watcher.models import WatchedModels


class Sentinel:
    """Watches while entered; :attr:`is_bad` says whether the step's own gradients were not
    finite."""

    def __init__(self, models: WatchedModels, guard: Guard) -> None:
        self._guard = guard
        self._models = models
        self._leaves = {id(m) for m in models.modules if not any(True for _ in m.children())}
        self.is_paused = False
        self._is_armed = True  # for the first module of the next forward
        self._roots = {id(m) for root in models.roots for m in (root.called, root.plain)}
        self._sums: list[Tensor] = []
        self._handle: Subscription | None = None

    def __enter__(self) -> Sentinel:
        self._handle = FORWARD.subscribe(self._guard.hook(self._after_forward))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._sums.clear()

    @property
    def is_bad(self) -> bool:
        """Waits for the device."""
        return any(not bool(torch.isfinite(total)) for total in self._sums)

    def end_step(self) -> None:
        """Begin anew."""
        self._sums.clear()
        self._is_armed = True

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
            self._sums.append(values.sum(dtype=torch.float32))
