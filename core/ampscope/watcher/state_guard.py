"""Whether a checkpoint taken now would be healthy: weights, averages, buffers, optimizer state.

With ``watch(guard=True)`` optimizer state and buffers are looked at after every step, averages of
weights (``ema=``) before the next backward, as a training updates them after the step. One pass of
norms, as for gradients; a norm that is not finite is looked at again, number by number.

What is no poison: a buffer that was not finite when the watch began, or when it got its present
shape; and -Inf alone, which attention masks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import floats
from ampscope.capture.user_objects import IdSet, buffers, parameters, state_of
from ampscope.errors import BadInput
from ampscope.watcher.gradient_norms import first_nonfinite, start_norms
from ampscope.watcher.models import WatchedModels

TEXTS = {
    "optimizer_state_poisoned": "The optimizer's state {} is not finite: every later update of its "
    "parameter is lost.",
    "buffer_poisoned": "The buffer {} is not finite, and was before: evaluation and later forward "
    "passes use it. Checkpoints from here on hold it.",
    "ema_poisoned": "The average of weights {} is not finite, and cannot recover. Checkpoints from "
    "here on hold it.",
}


class StateGuard:
    """Looks at what a checkpoint would hold. ``ema`` is a module, a dict of tensors, a list of
    these, or a function that returns one."""

    def __init__(self, models: WatchedModels, ema: Any = None) -> None:
        self._models = models
        self._ema = ema if callable(ema) and not isinstance(ema, nn.Module) else lambda: ema
        self._ringing: set[str] = set()
        self._stepping: IdSet[Optimizer] = IdSet()  # have stepped so far
        self._known: dict[str, tuple[int, ...]] = {}  # buffers that were finite, in this shape
        self._buffers()
        dict(_tensors(self._ema(), "ema"))  # BadInput for what is none

    def after_step(self, optimizers: Iterable[Optimizer]) -> list[tuple[str, str]]:
        """Alarms that begin: names and texts; ``optimizers`` have stepped. Waits for the device."""
        for optimizer in optimizers:
            self._stepping.add(optimizer)
        return [
            *self._ring("optimizer_state_poisoned", self._optimizer_state()),
            *self._ring("buffer_poisoned", self._buffers()),
        ]

    def before_backward(self) -> list[tuple[str, str]]:
        """Alarms of the averages of weights that begin: names and texts. Waits for the device."""
        return self._ring("ema_poisoned", self._averages())

    def problem(self) -> str:
        """What is not finite now; "" where all is. Waits for the device."""
        found = {
            "the weight": _bad({p.name: p.tensor for p in self._models.parameters}),
            "the average": self._averages(),
            "the buffer": self._buffers(),
            "the optimizer's": self._optimizer_state(),
        }
        return next((f"{what} {name} is not finite" for what, name in found.items() if name), "")

    def _optimizer_state(self) -> str:
        return _bad(dict(self._states()))

    def _averages(self) -> str:
        return _bad(dict(_tensors(self._ema(), "ema")))

    def _buffers(self) -> str:
        """The first buffer that went bad; "" without any."""
        now: dict[str, Tensor] = {}
        for root in self._models.roots:
            prefix = f"{root.name}." if len(self._models.roots) > 1 else ""
            now |= {prefix + name: buffer for name, buffer in buffers(root.plain)}
        if all(self._known.get(name) == tuple(b.shape) for name, b in now.items()) and not _bad(
            now
        ):
            return ""
        bad = ""
        for name, buffer in now.items():  # each alone: seldom, when one is new or bad
            shape = tuple(buffer.shape)
            if not _is_poisoned(buffer):
                if not _bad({name: buffer}):
                    self._known[name] = shape
            elif self._known.get(name) == shape:
                bad = bad or name
        return bad

    def _states(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(p.tensor): p.name for p in self._models.parameters}
        for optimizer in self._stepping:
            for parameter, state in state_of(optimizer):
                name = names.get(id(parameter), "a parameter")
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.numel():
                        yield f"{key} of {name}", value

    def _ring(self, alarm: str, bad: str) -> list[tuple[str, str]]:
        if not bad:
            self._ringing.discard(alarm)
            return []
        if alarm in self._ringing:
            return []
        self._ringing.add(alarm)
        return [(alarm, TEXTS[alarm].format(bad))]


def _bad(tensors: Mapping[str, Tensor]) -> str:
    """The name of the first that is not finite. One pass of norms; a second look only where one of
    them is not finite, as a sum of squares in fp32 overflows above 2^64."""
    with torch.no_grad(), own_ops():
        some = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
        norms = start_norms({}, None, list(some.values())).weights
        if all(norm - norm == 0.0 for norm in norms):
            return ""
        return first_nonfinite(some)


def _is_poisoned(buffer: Tensor) -> bool:
    values = floats(buffer)
    if values is None:
        return False
    return bool((values.isnan() | (values == torch.inf)).any())


def _tensors(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        for key, tensor in (*parameters(value), *buffers(value)):
            yield key, tensor
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, str(key))
    elif isinstance(value, list | tuple):
        for place, part in enumerate(value):
            yield from _tensors(part, f"{name}.{place}")
    elif value is not None and not isinstance(value, int | float | str):
        raise BadInput(
            "ema is a module, a dict or list of tensors, or a function that returns one; it is of "
            f"type {type(value).__name__}."
        )
