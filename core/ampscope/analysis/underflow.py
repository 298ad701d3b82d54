"""Zeros and subnormals per module and step, from the fp32 shadow; what is known without one.

Only a reference tells a value that became zero from one that was zero already:

    lost         zero in half, not zero in the shadow; of these
      below_range  the fp32 value is below the format's smallest number: this alone is underflow
      cancelled    the format holds such values: a sum that cancelled, a ReLU that switched
                   otherwise, or values that were lost further up the pass
    subnormal    kept, with fewer mantissa bits
    zero_before  zero in both (ReLU, padding, unused rows)

Also here: which loss scales keep the gradients of every module within a format.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ampscope.analysis.op_precision import split
from ampscope.numerics import histogram
from ampscope.numerics.formats import FORMATS, NumberFormat
from ampscope.records import Frame

Counts = NDArray[np.int64]
COUNTS = ("total", "lost", "subnormal", "zero_before", "below_range")


@dataclass(frozen=True, slots=True)
class UnderflowOverTime:
    """Shadow counts of one role, each array [modules, steps]; ``total`` 0 where none was taken."""

    modules: tuple[int, ...]
    steps: tuple[int, ...]
    total: Counts
    lost: Counts
    subnormal: Counts
    zero_before: Counts
    below_range: Counts

    @property
    def cancelled(self) -> Counts:
        """Lost, and not below the format's range; 0 where that was not recorded."""
        return self.lost - self.below_range

    def only(self, row: int) -> UnderflowOverTime:
        """These counts of one module; ``row`` is its place in :attr:`modules`."""
        counts = {name: getattr(self, name)[[row]] for name in COUNTS}
        return replace(self, modules=(self.modules[row],), **counts)

    def share(self, name: str) -> NDArray[np.float64]:
        """``name`` as a share of all elements, NaN where no shadow was taken."""
        counts: Counts = getattr(self, name)
        out = np.full(counts.shape, np.nan)
        np.divide(counts, self.total, out=out, where=self.total > 0)
        return out


@dataclass(frozen=True, slots=True)
class WithoutShadow:
    """What a histogram alone says about one module's underflow.

    ``zero`` elements are zero; how many of them were lost is not known, between 0 and ``zero``.
    """

    total: int
    zero: int
    subnormal: int


def from_columns(columns: Counts) -> UnderflowOverTime:
    """Shadow records of one role as matrices, modules and steps ascending.

    ``columns`` is [records, 7]: step, module, total, lost, subnormal, zero_before, below_range.
    """
    steps, column = np.unique(columns[:, 0], return_inverse=True)
    modules, row = np.unique(columns[:, 1], return_inverse=True)

    counts = np.zeros((len(COUNTS), len(modules), len(steps)), np.int64)
    counts[:, row, column] = columns[:, 2:].T
    named = dict(zip(COUNTS, counts, strict=True))
    return UnderflowOverTime(tuple(modules.tolist()), tuple(steps.tolist()), **named)


def worst_modules(series: UnderflowOverTime, name: str, limit: int) -> list[int]:
    """Rows of ``series`` with the highest share of ``name`` at any step, highest first."""
    if not series.modules:
        return []
    peak = np.nan_to_num(series.share(name)).max(axis=1)
    return [int(i) for i in np.argsort(-peak, kind="stable")[:limit]]


def without_shadow(row: histogram.Raw, dtypes: str) -> WithoutShadow:
    """Counts of one module's row, recorded in ``dtypes`` (``"fp16"``, ``"fp16+fp32"``).

    A row of several dtypes is judged by the narrowest of them, the one that could have underflowed.
    """
    formats = [FORMATS[d] for d in split(dtypes) if d in FORMATS]
    subnormal = 0
    if formats:
        fmt = max(formats, key=lambda f: f.min_normal_exponent)
        first, end = (bin_of(e) for e in (fmt.min_subnormal_exponent, fmt.min_normal_exponent))
        subnormal = int(row[first:end].sum())
    return WithoutShadow(
        int(row.sum()), int(row[histogram.POS_ZERO] + row[histogram.NEG_ZERO]), subnormal
    )


def bin_of(exponent: int) -> int:
    """Index in a raw row of the bin of an exponent; the end bins take what lies beyond."""
    return min(max(exponent - histogram.LOWEST + histogram.FIRST, 0), histogram.ABOVE)


# Which loss scales keep the gradients of every module within a format, read off histograms.
#
# Where a frame has gradients in the format itself, those alone count: what autocast leaves in fp32
# takes any scale that fp16 does. Where it has none, the question is what the format would hold,
# and all count. Weight gradients, which autocast computes in fp16 and hands to fp32 weights, limit
# a scale from above: they sum over a batch, and may be far larger than what flows out of a module.


LOST_SHARE = 1e-3  # of a module's gradients: what a healthy run loses at any scale


@dataclass(frozen=True, slots=True)
class ScaleWindow:
    """log2 of the lowest and highest loss scale that suit every module, and which module sets each.

    ``low`` > ``high``: no single scale suits all. ``spans``: modules that no scale suits at all.
    """

    low: int
    high: int
    lowest: int  # module that needs at least 2^low
    highest: int  # module that can take at most 2^high
    spans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleWindow:
    """log2 of the lowest and highest loss scale that suit one module; ``low`` > ``high``: none."""

    module: int
    low: int
    high: int


def module_windows(
    frame: Frame, fmt: NumberFormat, weights: Frame | None = None
) -> tuple[ModuleWindow, ...]:
    """Of every row of a frame of finite gradients that counts, in the frame's order; a module that
    is there in two dtypes has two. ``weights`` are the weight gradients of the same step."""
    found = _limits(frame, fmt, weights)
    if found is None:
        return ()
    modules, low, high = found
    pairs = zip(modules, low.tolist(), high.tolist(), strict=True)
    return tuple(ModuleWindow(module, a, b) for module, a, b in pairs)


def common_window(
    frame: Frame, fmt: NumberFormat, weights: Frame | None = None
) -> ScaleWindow | None:
    """The window of all modules of a frame of gradients; None where a gradient is not finite, or
    none is there."""
    found = _limits(frame, fmt, weights)
    if found is None:
        return None
    modules, low, high = found
    spans = tuple(modules[i] for i in np.flatnonzero(low > high))
    if spans:
        return ScaleWindow(1, 0, spans[0], spans[0], spans)
    lowest, highest = int(low.argmax()), int(high.argmin())
    return ScaleWindow(int(low[lowest]), int(high[highest]), modules[lowest], modules[highest], ())


def _limits(
    frame: Frame, fmt: NumberFormat, weights: Frame | None
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]] | None:
    """Modules with gradients, and the lowest and highest exponent of a scale for each."""
    if not all(_is_finite(f) for f in (frame, weights) if f is not None):
        return None
    finite = frame.rows[:, : histogram.ABOVE + 1]
    there = np.flatnonzero(finite.any(axis=1) & _counts(frame, fmt))
    if not there.size:
        return None
    # For all rows at once: 500 modules take 1 ms and not 300.
    finite, modules = finite[there], [frame.modules[i] for i in there]
    allowed = (LOST_SHARE * finite.sum(axis=1)).astype(np.int64)
    first = histogram.EXPONENTS[(np.cumsum(finite, axis=1) > allowed[:, None]).argmax(axis=1)]
    low = fmt.zero_below_exponent - first + round(math.log2(frame.scale))
    high = _highest(finite, frame.scale, fmt)
    if weights is not None:
        highest = _highest_by_weights(weights, fmt)
        high = np.array([min(h, highest.get(m, h)) for m, h in zip(modules, high, strict=True)])
    return modules, low, high


def excluded_modules(frame: Frame, fmt: NumberFormat) -> dict[int, str]:
    """Modules with gradients that no window counts, because none of them is in the format, with the
    dtypes that they are in: fp32 for a loss under autocast. Empty where all modules count."""
    counted = _counts(frame, fmt)
    inside = {module for module, counts in zip(frame.modules, counted, strict=True) if counts}
    found: dict[int, str] = {}
    for module, dtype, row in zip(frame.modules, frame.dtypes, frame.rows, strict=True):
        if module not in inside and row[: histogram.ABOVE + 1].any():
            found[module] = f"{found[module]}+{dtype}" if module in found else dtype
    return found


def _is_finite(frame: Frame) -> bool:
    """Whether all its gradients are, and its scale: 165 skipped steps in a row take that to 0."""
    bad = frame.rows[:, [histogram.NAN, histogram.POS_INF, histogram.NEG_INF]].any()
    return not bad and 0 < frame.scale < math.inf


def _counts(frame: Frame, fmt: NumberFormat) -> NDArray[np.bool_]:
    """Which rows count."""
    own = np.array([name == fmt.name for name in frame.dtypes], np.bool_)
    return own if own.any() else ~own


def _highest(finite: histogram.Raw, scale: float, fmt: NumberFormat) -> NDArray[np.int64]:
    """log2 of the highest scale for each row that has any. The format's top bin stays free, as
    values in it may exceed the largest number by rounding."""
    top = histogram.EXPONENTS[histogram.ABOVE - (finite[:, ::-1] > 0).argmax(axis=1)]
    return np.asarray(fmt.max_exponent - 1 - top + round(math.log2(scale)))


def _highest_by_weights(weights: Frame, fmt: NumberFormat) -> dict[int, int]:
    """log2 of the highest scale at which each module's weight gradients stay finite."""
    finite = weights.rows[:, : histogram.ABOVE + 1]
    there = np.flatnonzero(finite.any(axis=1))
    highest = _highest(finite[there], weights.scale, fmt).tolist()
    pairs = zip((weights.modules[i] for i in there), highest, strict=True)
    lowest: dict[int, int] = {}
    for module, high in pairs:
        lowest[module] = min(high, lowest.get(module, high))
    return lowest
