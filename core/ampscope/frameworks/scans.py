"""A tensor that was looked at outside the layers: a batch, the weights at the start and end."""

from __future__ import annotations

import numpy as np

from ampscope.frameworks.tensors import Values
from ampscope.observations import Scan


def scan(moment: str, kind: str, name: str, values: Values, step: int) -> Scan:
    """What ``values`` hold, at attempt ``step``."""
    floats = values.floats()
    is_finite = np.isfinite(floats)
    finite = floats if is_finite.all() else floats[is_finite]
    return Scan(
        moment,
        kind,
        name,
        values.name,
        values.size,
        0 if finite is floats else int(np.isnan(floats).sum()),
        0 if finite is floats else int(np.isinf(floats).sum()),
        float(max(finite.max(), -finite.min())) if finite.size else None,
        step,
        std=float(finite.std(dtype=np.float64)) if finite.size else None,
    )
