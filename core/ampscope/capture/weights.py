"""Instrument: histograms of weights, their gradients and their updates; who held NaN or Inf.

Gradients are read after the backward pass and before ``unscale_``, so they still carry the loss
scale. A hook on each parameter notes the order in which backward reached it, which is the order in
which a person should look for the first NaN or Inf.

Whatever the training, its parameters are counted here: by :func:`count_weights`,
:func:`count_gradients` and :func:`count_updates`. :class:`WeightObserver` does it for a probe,
which also wants :func:`gradient_norm`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.model_map import ModelMap
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import floats, holds_numbers, numbers, opened
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, add_rows
from ampscope.records import Frame, NonFiniteRecord, Role


def count_weights(counts: Accumulator, owned: Iterable[tuple[int, Tensor]]) -> None:
    """Add weights to ``counts``, each under the number of its module."""
    for owner, weight in owned:
        counts.add(Role.WEIGHT, owner, weight, stable=True)
    counts.flush()


def count_gradients(counts: Accumulator, placed: Iterable[tuple[int, Tensor]]) -> None:
    """Add the gradients of parameters, each under the parameter's position."""
    for position, parameter in placed:
        if parameter.grad is not None:
            counts.add(Role.WEIGHT_GRAD, position, parameter.grad, stable=True)
    counts.flush()


def count_updates(counts: Accumulator, owned: Iterable[tuple[int, Tensor, Tensor]]) -> None:
    """Add new minus old weights: (number of the module, parameter, copy of its numbers before).
    The copies are used up."""
    with torch.no_grad(), own_ops():
        both = [
            (owner, now, before)
            for owner, parameter, before in owned
            if (now := opened(parameter)) is not None
            and now.shape == before.shape
            and now.is_floating_point()
            and now.itemsize > 1  # of 8 bits torch subtracts none
        ]
        if not both:
            return
        # In the old weights' own memory, as -old + new: new - old, and +0 where they agree.
        changes = [before for _, _, before in both]
        torch._foreach_neg_(changes)
        torch._foreach_add_(changes, [now for _, now, _ in both])
    for owner, _, change in both:
        counts.add(Role.UPDATE, owner, change, stable=True)
    counts.flush()


def moved_share(updates: Frame | None) -> float | None:
    """Share of the counted weights that moved at all; None without any. A difference of two numbers
    of one IEEE format is zero only if they are equal (gradual underflow), so the zeros are those
    that stayed."""
    total = 0 if updates is None else int(updates.rows.sum())
    if updates is None or not total:
        return None
    return (total - int(updates.rows[:, [POS_ZERO, NEG_ZERO]].sum())) / total


def nonfinite(
    gradients: Frame, reached: Iterable[int], name_of: Callable[[int], str]
) -> list[NonFiniteRecord]:
    """The parameters that hold NaN or Inf, in the order in which backward ``reached`` them.

    ``gradients.modules`` and ``reached`` are positions of parameters.
    """
    row_of = {position: row for row, position in enumerate(gradients.modules)}
    bad = []
    for order, position in enumerate(reached):
        row = gradients.rows[row_of[position]] if position in row_of else None
        if row is not None and row[[NAN, POS_INF, NEG_INF]].any():
            counts = (int(row.sum()), int(row[NAN]), int(row[POS_INF]), int(row[NEG_INF]))
            bad.append(NonFiniteRecord(gradients.step, name_of(position), order, *counts))
    return bad


def by_module(gradients: Frame, owner_of: Callable[[int], int]) -> Frame:
    """The frame with the parameters of each module added up."""
    owners = (owner_of(position) for position in gradients.modules)
    keys, rows = add_rows(zip(owners, gradients.dtypes, strict=True), gradients.rows)
    modules, dtypes = tuple(module for module, _ in keys), tuple(dtype for _, dtype in keys)
    return Frame(gradients.step, gradients.role, modules, dtypes, rows, gradients.scale)


class WeightObserver:
    """Reads the parameters at the moments that the training loop names."""

    def __init__(self, names: ModelMap, counts: Accumulator) -> None:
        self.counts = counts
        self._parameters = tuple(
            p for p in names.parameters if p.tensor.is_floating_point() and holds_numbers(p.tensor)
        )
        self._tensors: list[Tensor] = [p.tensor for p in self._parameters]
        self._order: list[int] = []  # positions of parameters, as backward reached them
        self._before: list[Tensor] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> WeightObserver:
        for position, parameter in enumerate(self._parameters):
            if parameter.tensor.requires_grad:
                note = partial(self._note, position)
                self._handles.append(parameter.tensor.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._before.clear()

    def start_step(self) -> None:
        """Forget the previous step's backward order."""
        self._order.clear()

    def count_weights(self) -> None:
        """Count the weights as they are now."""
        count_weights(self.counts, ((p.owner, p.tensor) for p in self._parameters))

    def count_gradients(self) -> None:
        """Count the gradients that this step's backward passes reached."""
        count_gradients(self.counts, ((i, self._tensors[i]) for i in self._reached()))

    def remember(self) -> None:
        """Keep a copy of the weights, to be compared after the optimizer's step."""
        try:
            with torch.no_grad(), own_ops():
                if not self._before:
                    self._before = [torch.empty_like(values) for values in self._values()]
                if self._before:
                    torch._foreach_copy_(self._before, self._values())
        except BaseException:
            self._before = []  # half a copy would make updates that never were
            raise

    def count_updates(self) -> None:
        """Count new minus old weights."""
        both = zip(self._parameters, self._before, strict=False)  # no copies: nothing to count
        count_updates(self.counts, ((p.owner, p.tensor, before) for p, before in both))

    def _values(self) -> list[Tensor]:
        return [numbers(tensor) for tensor in self._tensors]

    def nonfinite(self, gradients: Frame) -> list[NonFiniteRecord]:
        """The parameters of :meth:`count_gradients`'s frame that hold NaN or Inf, in backward
        order."""
        names = [parameter.name for parameter in self._parameters]
        return nonfinite(gradients, self._reached(), names.__getitem__)

    def by_module(self, gradients: Frame) -> Frame:
        """The frame of :meth:`count_gradients` with the parameters of each module added up."""
        owners = [parameter.owner for parameter in self._parameters]
        return by_module(gradients, owners.__getitem__)

    def _reached(self) -> list[int]:
        """Positions in the order of their first arrival; accumulation reaches them repeatedly."""
        return list(dict.fromkeys(self._order))

    def _note(self, position: int, _: Tensor) -> None:
        self._order.append(position)


def gradient_norm(names: ModelMap) -> float:
    """The 2-norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` defines it; 0
    without any. One transfer from the device.

    In fp32 whatever the gradients' dtype, because an fp16 norm overflows at 65504. Where fp32 is
    not finite the norm is taken again in fp64: squares of finite fp32 numbers overflow above 2^64.
    """
    held = (p.tensor.grad for p in names.parameters if p.tensor.grad is not None)
    gradients = [values for gradient in held if (values := floats(gradient)) is not None]
    if not gradients:
        return 0.0
    norm = _norm(gradients, torch.float32)
    return norm if math.isfinite(norm) else _norm(gradients, torch.float64)


def _norm(gradients: list[Tensor], dtype: torch.dtype) -> float:
    wide = [g.to(dtype) if g.dtype is torch.float64 else g for g in gradients]
    parts = torch._foreach_norm(wide, 2, dtype)
    device = parts[0].device
    return float(torch.linalg.vector_norm(torch.stack([part.to(device) for part in parts])))
