"""Gradients counted parameter by parameter: who held NaN or Inf, and the same rows a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ampscope.exponents import NAN, NEG_INF, POS_INF
from ampscope.records import Frame, NonFiniteRecord


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
    keys = list(zip(owners, gradients.dtypes, strict=True))
    at = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    rows = np.zeros((len(at), gradients.rows.shape[1]), np.int64)
    np.add.at(rows, [at[key] for key in keys], gradients.rows)
    modules = tuple(module for module, _ in at)
    dtypes = tuple(dtype for _, dtype in at)
    return Frame(gradients.step, gradients.role, modules, dtypes, rows, gradients.scale)
