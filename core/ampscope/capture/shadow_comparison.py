"""Half against fp32, tensor by tensor: three counts, and how far apart the values are.

All numbers of a step stay on the device until :meth:`Comparisons.records` fetches them in one
transfer. Distances are taken in fp64: squares of small gradients leave fp32's range, and autocast,
which may be on when an activation is compared, leaves fp64 alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ampscope.records import Role, ShadowRecord

_FP32_MIN_NORMAL = torch.finfo(torch.float32).tiny
_Owner = tuple[int, Role]  # module, role


class Comparisons:
    """The comparisons of one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._owners: list[tuple[_Owner, int]] = []  # and the number of elements
        self._numbers: list[Tensor] = []

    def add(self, module: int, role: Role, half: Tensor, reference: Tensor, scale: float) -> None:
        """Compare ``half``, which is ``scale`` times as large, with its fp32 ``reference``."""
        self._owners.append(((module, role), half.numel()))
        self._numbers.append(_numbers(half, reference, scale))

    def records(self) -> list[ShadowRecord]:
        """One record a module and role: counts add, the error is the worst tensor's."""
        if not self._numbers:
            return []
        device = self._numbers[0].device
        table = torch.stack([numbers.to(device) for numbers in self._numbers]).tolist()
        merged: dict[_Owner, ShadowRecord] = {}
        for (owner, total), row in zip(self._owners, table, strict=True):
            record = _record(self._step, owner, total, row)
            merged[owner] = _merged(merged[owner], record) if owner in merged else record
        return list(merged.values())


def _numbers(half: Tensor, reference: Tensor, scale: float) -> Tensor:
    """lost, subnormal, zero before, |reference|, |half - reference|, dot, |half|, max |reference|.

    Counts are exact in fp64 up to 2^53.
    """
    zero, reference_zero = half == 0, reference == 0  # -0 equals 0
    magnitude = reference.abs()
    subnormal = (half.abs() < torch.finfo(half.dtype).tiny) & ~zero
    subnormal &= magnitude >= _FP32_MIN_NORMAL
    value, wanted = half.double() / scale, reference.double()
    empty = torch.zeros((), dtype=torch.float64, device=half.device)
    parts = (
        (zero & ~reference_zero).sum(),
        subnormal.sum(),
        (zero & reference_zero).sum(),
        torch.linalg.vector_norm(wanted),
        torch.linalg.vector_norm(value - wanted),
        (value * wanted).sum(),
        torch.linalg.vector_norm(value),
        magnitude.max() if half.numel() else empty,
    )
    return torch.stack([part.double() for part in parts])


def _record(step: int, owner: _Owner, total: int, row: list[float]) -> ShadowRecord:
    lost, subnormal, zero_before, norm, error, dot, half_norm, largest = row
    length = norm * half_norm
    return ShadowRecord(
        step=step,
        module=owner[0],
        role=owner[1],
        total=total,
        lost=int(lost),
        subnormal=int(subnormal),
        zero_before=int(zero_before),
        relative_error=error / norm if norm else None,
        cosine=dot / length if length else None,
        max_abs_fp32=largest if total else None,
    )


def _merged(first: ShadowRecord, second: ShadowRecord) -> ShadowRecord:
    worse = max(first, second, key=lambda record: _badness(record.relative_error))
    largest = [r.max_abs_fp32 for r in (first, second) if r.max_abs_fp32 is not None]
    return ShadowRecord(
        step=first.step,
        module=first.module,
        role=first.role,
        total=first.total + second.total,
        lost=first.lost + second.lost,
        subnormal=first.subnormal + second.subnormal,
        zero_before=first.zero_before + second.zero_before,
        relative_error=worse.relative_error,
        cosine=worse.cosine,
        max_abs_fp32=max(largest, default=None),
    )


def _badness(error: float | None) -> float:
    """NaN is worst, no error at all is best."""
    if error is None:
        return -1.0
    return math.inf if math.isnan(error) else error
