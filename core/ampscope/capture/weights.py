"""Instrument: histograms of weights, their gradients and their updates; who held NaN or Inf.

Gradients are read after the backward pass and before ``unscale_``, so they still carry the loss
scale. A hook on each parameter notes the order in which backward reached it, which is the order in
which a person should look for the first NaN or Inf.
"""

from __future__ import annotations

import time
from types import TracebackType

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.model_map import ModelMap
from ampscope.exponents import NAN, NEG_INF, POS_INF
from ampscope.records import Frame, NonFiniteRecord, Role


class WeightObserver:
    """Reads the parameters at the moments that the training loop names."""

    def __init__(self, names: ModelMap) -> None:
        self._parameters = names.parameters()
        self._order: list[int] = []
        self._before: list[Tensor] = []
        self._handles: list[RemovableHandle] = []
        self.elapsed_s = 0.0

    def __enter__(self) -> WeightObserver:
        for position, (_, _, parameter) in enumerate(self._parameters):
            if parameter.requires_grad:
                hook = self._note_order(position)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._before.clear()

    def start_step(self) -> None:
        """Forget the previous step's backward order."""
        self._order.clear()

    def gradients(self, step: int, scale: float) -> tuple[Frame | None, list[NonFiniteRecord]]:
        """Histograms of all gradients, a row a module, and the parameters that are not finite."""
        started = time.perf_counter()
        reached = list(dict.fromkeys(self._order))
        grads = [(position, self._parameters[position][2].grad) for position in reached]
        frame = self._count(step, Role.WEIGHT_GRAD, scale, grads)
        bad: list[NonFiniteRecord] = []
        if frame is not None:
            for order, position in enumerate(reached):
                row = frame.rows[frame.modules.index(position)]
                if row[NAN] or row[POS_INF] or row[NEG_INF]:
                    nan, pos, neg = (int(row[i]) for i in (NAN, POS_INF, NEG_INF))
                    name = self._parameters[position][1]
                    bad.append(NonFiniteRecord(step, name, order, int(row.sum()), nan, pos, neg))
            frame = self._by_module(frame)
        self.elapsed_s += time.perf_counter() - started
        return frame, bad

    def weights(self, step: int) -> Frame | None:
        """Histograms of the weights as they are now."""
        started = time.perf_counter()
        tensors = [(i, p.detach()) for i, (_, _, p) in enumerate(self._parameters)]
        frame = self._count(step, Role.WEIGHT, 1.0, tensors)
        self.elapsed_s += time.perf_counter() - started
        return None if frame is None else self._by_module(frame)

    def remember(self) -> None:
        """Keep a copy of the weights, to be compared after the optimizer's step."""
        started = time.perf_counter()
        with torch.no_grad():
            if len(self._before) == len(self._parameters):
                torch._foreach_copy_(self._before, [p.detach() for _, _, p in self._parameters])
            else:
                self._before = [p.detach().clone() for _, _, p in self._parameters]
        self.elapsed_s += time.perf_counter() - started

    def updates(self, step: int) -> tuple[Frame | None, float | None]:
        """Histograms of new minus old weights, and the share of weights that moved at all."""
        started = time.perf_counter()
        moved = total = 0
        changes: list[tuple[int, Tensor]] = []
        with torch.no_grad():
            for i, (_, _, parameter) in enumerate(self._parameters):
                before = self._before[i]
                if parameter.requires_grad:
                    # Whether a weight moved is a comparison: a difference can underflow to zero.
                    moved += int(torch.ne(parameter, before).sum())
                    total += parameter.numel()
                changes.append((i, parameter.detach().sub(before)))
        frame = self._count(step, Role.UPDATE, 1.0, changes)
        self.elapsed_s += time.perf_counter() - started
        by_module = None if frame is None else self._by_module(frame)
        return by_module, (moved / total if total else None)

    def _note_order(self, position: int):  # type: ignore[no-untyped-def]  # torch's hook type is private
        def hook(_: Tensor) -> None:
            self._order.append(position)

        return hook

    @staticmethod
    def _count(
        step: int, role: Role, scale: float, tensors: list[tuple[int, Tensor | None]] | list[tuple[int, Tensor]]
    ) -> Frame | None:
        counter = Accumulator(role)
        for position, tensor in tensors:
            if tensor is not None and tensor.is_floating_point():
                values = tensor.coalesce().values() if tensor.is_sparse else tensor
                counter.add(position, values)
        return counter.take(step, scale)

    def _by_module(self, frame: Frame) -> Frame:
        """Add up the parameters of each module: rows of (module, dtype)."""
        owners = [self._parameters[position][0] for position in frame.modules]
        keys = list(dict.fromkeys(zip(owners, frame.dtypes, strict=True)))
        at = {key: i for i, key in enumerate(keys)}
        rows = np.zeros((len(keys), frame.rows.shape[1]), np.int64)
        for i, key in enumerate(zip(owners, frame.dtypes, strict=True)):
            rows[at[key]] += frame.rows[i]
        modules = tuple(module for module, _ in keys)
        dtypes = tuple(dtype for _, dtype in keys)
        return Frame(frame.step, frame.role, modules, dtypes, rows, frame.scale)
