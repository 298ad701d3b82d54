"""How much a running sum in half precision has lost so far: the rounding errors added up.

A single addition to a half-precision total is off by at most half an ulp, and errors of both signs
cancel. When the terms are below half an ulp of the total, every error has the sign of the term, and
their sum grows without bound: fp16 stops counting at 2,048, bf16 at 256.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ampscope.capture.tensors import HALF

IN_PLACE = ("add_", "sub_", "index_add_", "scatter_add_", "_index_put_impl_", "index_put_")
MAX_NUMEL = 1 << 20
MAX_SUMS = 200  # lines of a script that add up something; more are not followed
TOUCHED = 0.05  # share of a sum's elements that must be off: one outlier is no pattern


class RunningSums:
    """Errors so far, by line and shape."""

    def __init__(self) -> None:
        self._errors: dict[tuple[object, ...], Tensor] = {}

    def drift(
        self, line: object, func: Any, args: Any, kwargs: Any, before: Tensor, out: Tensor
    ) -> float | None:
        """Median over the elements that are off of |sum of errors| / |total|; None when few are.

        A total that was zero before starts anew.
        """
        if func._opname in ("lerp_", "copy_") or before.numel() > MAX_NUMEL:
            return None
        expected = _in_fp32(func, args, kwargs, before)
        if expected is None or expected.shape != out.shape:
            return None
        key = (line, tuple(out.shape))
        if key not in self._errors and len(self._errors) >= MAX_SUMS:
            return None
        known = self._errors.get(key)
        fresh = known is None or not bool(before.any())
        error = expected - out.float()
        total_error = error if fresh or known is None else known + error
        self._errors[key] = total_error
        total = out.float().abs()
        relative = total_error.abs()[total > 0] / total[total > 0]
        off = relative[relative > 0]
        if not off.numel() or off.numel() < TOUCHED * out.numel():
            return None
        return float(off.median())


def _in_fp32(func: Any, args: Any, kwargs: Any, before: Tensor) -> Tensor | None:
    rest = [a.float() if isinstance(a, Tensor) and a.dtype in HALF else a for a in args[1:]]
    try:
        result = func(before.float(), *rest, **kwargs)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    return result if isinstance(result, Tensor) else None
