"""Instrument: how many of a script's FLOPs ran in which dtype, forward and backward, in all steps.

fp16 1,204,224   fp32 16,384   and 310 other ops on half-precision numbers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampscope.analysis.op_precision import NO_ARITHMETIC, SCALER_PREFIX
from ampscope.capture.failures import Failures
from ampscope.capture.op_trace import Flops
from ampscope.numerics.formats import dtype_name

HALF_BYTES = 2  # fp16, bf16 and the narrower float8 formats


class OpPrecision:
    """Counts every op that it is shown; an optimizer's own ops are not for it."""

    def __init__(self) -> None:
        self.half_ops = 0  # ops without a FLOP formula that compute on half-precision numbers
        self._flops = Flops(Failures())
        self._by_dtype: dict[torch.dtype, int] = defaultdict(int)
        self._computes: dict[int, bool] = {}

    def record(self, func: Any, args: Sequence[Any], kwargs: Any, out: Any) -> None:
        """Count one call."""
        flops = self._flops.of(func, args, kwargs, out)
        if flops:
            if (dtype := _compute_dtype(args)) is not None:
                self._by_dtype[dtype] += flops
        elif self._is_arithmetic(func) and any(map(_is_half, args)):
            self.half_ops += 1

    @property
    def ran_half(self) -> bool:
        """Whether any op computed on half-precision numbers."""
        narrow = (d.is_floating_point and d.itemsize <= HALF_BYTES for d in self._by_dtype)
        return self.half_ops > 0 or any(narrow)

    def flops(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Names of dtypes, most FLOPs first, and the FLOPs of each."""
        named: dict[str, int] = defaultdict(int)
        for dtype, flops in self._by_dtype.items():
            named[dtype_name(dtype)] += flops
        pairs = sorted(named.items(), key=lambda pair: (-pair[1], pair[0]))
        return tuple(name for name, _ in pairs), tuple(flops for _, flops in pairs)

    def _is_arithmetic(self, func: Any) -> bool:
        known = self._computes.get(id(func))
        if known is None:
            name = getattr(func, "_opname", "")
            known = name not in NO_ARITHMETIC and not name.startswith(SCALER_PREFIX)
            self._computes[id(func)] = known
        return known


def _compute_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """Of the operands, not of a bias or of the scales of a float8 matmul: the narrowest of those
    with two dimensions or more."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    operands = [t for t in tensors if t.dim() > 1] or tensors
    return min((t.dtype for t in operands), key=lambda d: d.itemsize, default=None)


def _is_half(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.itemsize <= HALF_BYTES
    return isinstance(value, list | tuple) and any(map(_is_half, value))
