"""Instrument: exponent histograms of what modules put out and of the gradients that come back.

One global forward hook sees every module's output; a tensor hook on that output sees its gradient,
in the dtype in which it really flows and still multiplied by the loss scale. Modules that hand on a
child's very output (``Sequential``) are not counted twice.
"""

from __future__ import annotations

import time
from functools import partial
from types import TracebackType

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.model_map import ModelMap
from ampscope.capture.tensors import floating_tensors
from ampscope.records import Role

_SEEN = "_ampscope_seen"  # attribute on an output tensor: the step in which it was counted


class HistogramHooks:
    """Counts activations and grad_outputs while :attr:`active`; asleep it costs one check a call."""

    def __init__(self, names: ModelMap) -> None:
        self.names = names
        self.active = False
        self.step = -1
        self.activations = Accumulator(Role.ACTIVATION)
        self.grad_outputs = Accumulator(Role.GRAD_OUTPUT)
        self.elapsed_s = 0.0  # time spent counting, since the loop last reset it
        self._handle: RemovableHandle | None = None

    def __enter__(self) -> HistogramHooks:
        self._handle = register_module_forward_hook(self._after_forward)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
        self.active = False

    def _after_forward(self, module: nn.Module, inputs: object, output: object) -> None:
        if not self.active:
            return
        index = self.names.index(module)
        if index is None:
            return
        started = time.perf_counter()
        for tensor in (output,) if isinstance(output, Tensor) else floating_tensors(output):
            if getattr(tensor, _SEEN, None) == self.step or not tensor.is_floating_point():
                continue
            setattr(tensor, _SEEN, self.step)
            self.activations.add(index, tensor.detach())
            if tensor.requires_grad:
                tensor.register_hook(partial(self._count_gradient, index))
        self.elapsed_s += time.perf_counter() - started

    def _count_gradient(self, index: int, gradient: Tensor) -> None:
        if not self.active:
            return
        started = time.perf_counter()
        self.grad_outputs.add(index, gradient)
        self.elapsed_s += time.perf_counter() - started
