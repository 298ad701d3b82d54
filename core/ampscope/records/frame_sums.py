"""Frames add: over steps, and over the ranks of one training. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ampscope.exponents import RAW_LEN, Raw

Table = tuple[tuple[int, ...], tuple[str, ...], Raw]  # modules, dtypes, rows of a frame


def summed(tables: Sequence[Table]) -> Table:
    """Rows of the same module and dtype added up, in the order in which they first appear."""
    if len({(modules, dtypes) for modules, dtypes, _ in tables}) == 1:
        modules, dtypes, _ = tables[0]
        if len(set(zip(modules, dtypes, strict=True))) == len(modules):
            return modules, dtypes, np.sum([rows for _, _, rows in tables], axis=0)
    keys = [key for modules, dtypes, _ in tables for key in zip(modules, dtypes, strict=True)]
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    total = np.zeros((len(places), RAW_LEN), np.int64)
    for modules, dtypes, rows in tables:
        at = [places[key] for key in zip(modules, dtypes, strict=True)]
        np.add.at(total, at, rows)  # a frame may hold a module and dtype twice
    return tuple(m for m, _ in places), tuple(d for _, d in places), total
