"""Exponent counts of the step that is under way, one row a role, module and dtype."""

from __future__ import annotations

import numpy as np

from ampscope.exponents import NAN, NEG_INF, POS_INF, RAW_LEN, Raw
from ampscope.frameworks.tensors import Values, count_into
from ampscope.records import Frame, Role

_Key = tuple[Role, int, str]


class StepCounts:
    """:meth:`add` as tensors come by, :meth:`take` at the end of the step."""

    def __init__(self) -> None:
        self._rows: dict[_Key, Raw] = {}

    def add(self, role: Role, index: int, values: Values, *, keep: bool) -> int:
        """Count ``values`` into the step's frame where ``keep`` says so; how many are NaN or
        infinite."""
        row = self._rows.get((role, index, values.name)) if keep else None
        if row is None:
            row = np.zeros(RAW_LEN, np.int64)
            if keep:
                self._rows[role, index, values.name] = row
        before = _nonfinite(row)
        count_into(values, row)
        return _nonfinite(row) - before

    def take(self, step: int, scale: float) -> list[Frame]:
        """One frame a role that was counted; ``scale`` is what multiplies the gradients."""
        frames = []
        for role in Role:
            mine = [(key, row) for key, row in self._rows.items() if key[0] is role]
            if mine:
                modules, dtypes = tuple(k[1] for k, _ in mine), tuple(k[2] for k, _ in mine)
                rows = np.stack([row for _, row in mine])
                factor = scale if role.is_gradient else 1.0
                frames.append(Frame(step, role, modules, dtypes, rows, factor))
        self._rows.clear()
        return frames


def _nonfinite(row: Raw) -> int:
    return int(row[NAN]) + int(row[POS_INF]) + int(row[NEG_INF])
