"""What the Gradients page draws of one role at one step, and its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ampscope.exponents import EXPONENTS, NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, Raw
from ampscope.formats import NumberFormat
from ampscope.records import Frame
from app.gradients.gradient_terms import View

ZONE_COLUMNS = ("lost", "subnormal", "normal", "overflow", "zero", "not finite")


@dataclass(frozen=True, slots=True)
class Look:
    """One role at one step in one view: everything the page draws of it."""

    view: View
    frame: Frame  # one row a module, in the model's order
    fmt: NumberFormat
    counts: Raw  # [modules, 6]
    names: dict[int, str]
    ranks: tuple[int, ...] = (0,)  # whose counts these are
    left_out: tuple[int, ...] = ()


def counts_table(look: Look) -> pd.DataFrame:
    """One line a module: dtype and the six counts."""
    return pd.DataFrame(
        {
            "Module": [name_in(look, m) for m in look.frame.modules],
            "Recorded in": list(look.frame.dtypes),
            **{
                name.capitalize(): look.counts[:, column]
                for column, name in enumerate(ZONE_COLUMNS)
            },
            "Elements": look.counts.sum(axis=1),
        }
    )


def histogram_table(look: Look) -> pd.DataFrame:
    """One line a module and occupied bin, with magnitudes as drawn."""
    names = [name_in(look, module) for module in look.frame.modules]
    shifts = [look.view.shift] * len(names)
    return bins_table(
        [("step", [look.view.step] * len(names)), ("module", names)], look.frame.rows, shifts
    )


def bins_table(
    labels: Sequence[tuple[str, Sequence[object]]], rows: Raw, shifts: Sequence[int]
) -> pd.DataFrame:
    """One line an occupied bin of [n, RAW_LEN] rows; ``labels`` are columns with n values each."""
    which, column = np.nonzero(rows)
    special = {POS_ZERO: "+0", NEG_ZERO: "-0", NAN: "NaN", POS_INF: "+Inf", NEG_INF: "-Inf"}
    magnitudes = [
        special.get(c) or f"2^{int(EXPONENTS[c]) + shifts[i]}"
        for i, c in zip(which.tolist(), column.tolist(), strict=True)
    ]
    return pd.DataFrame(
        {
            **{title: [values[i] for i in which.tolist()] for title, values in labels},
            "magnitude": magnitudes,
            "count": rows[which, column],
        }
    )


def name_in(look: Look, module: int) -> str:
    """The module's name."""
    return look.names.get(module, f"module {module}")
