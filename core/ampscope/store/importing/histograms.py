"""Histograms of a file as frames: those of one role and step together."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ampscope.exponents import RAW_LEN
from ampscope.records import Frame
from ampscope.store.frames import DTYPE_CODES
from ampscope.store.importing import bounds
from ampscope.store.importing.refusal import Refusal
from ampscope.store.importing.tables import Counts, HistogramRow

Histograms = list[tuple[HistogramRow, Counts]]


def check(histograms: Histograms) -> None:
    """Those of one frame must agree on the loss scale and on the steps that they add up, and be of
    different modules or dtypes."""
    for places in _together(histograms):
        first = histograms[places[0]][0]
        if len(places) > bounds.MOST_HISTOGRAMS:
            why = (
                f"{len(places):,} are of one step and role, and {bounds.MOST_HISTOGRAMS:,} are read"
            )
            raise Refusal("size", f"{why} at most").inside("histogram")
        seen: dict[tuple[int, str], int] = {}
        for place in places:
            row = histograms[place][0]
            if row.dtype not in DTYPE_CODES:
                why = f"it is none of {', '.join(DTYPE_CODES)}"
                raise Refusal("value", why).inside("dtype").inside(place).inside("histogram")
            if repr(row.scale) != repr(first.scale) or row.last_step != first.last_step:
                why = f"its scale or last_step differ from those of histogram[{places[0]}]"
                raise Refusal("reference", why).inside(place).inside("histogram")
            key = (row.module, row.dtype)
            if key in seen:
                why = f"histogram[{seen[key]}] has the same step, role, module and dtype"
                raise Refusal("duplicate", why).inside(place).inside("histogram")
            seen[key] = place


def frames(histograms: Histograms) -> Iterator[Frame]:
    """One at a time: unpacked, all of a large file would take several times the memory."""
    for places in _together(histograms):
        own = [histograms[place] for place in places]
        rows = np.zeros((len(own), RAW_LEN), np.int64)
        for number, (_, counts) in enumerate(own):
            rows[number, counts[0]] = counts[1]
        first = own[0][0]
        yield Frame(
            first.step,
            first.role,
            tuple(row.module for row, _ in own),
            tuple(row.dtype for row, _ in own),
            rows,
            first.scale,
            first.last_step,
        )


def _together(histograms: Histograms) -> list[list[int]]:
    """Places of the histograms of each frame."""
    found: dict[tuple[str, int], list[int]] = {}
    for place, (row, _) in enumerate(histograms):
        found.setdefault((row.role, row.step), []).append(place)
    return list(found.values())
