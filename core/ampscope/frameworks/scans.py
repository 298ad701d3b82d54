"""A tensor that was looked at outside the layers: a batch, the weights at the start and end."""

from __future__ import annotations

import numpy as np

from ampscope.frameworks.tensors import Values
from ampscope.observations import Scan


def scan(moment: str, kind: str, name: str, values: Values, step: int) -> Scan:
    """What ``values`` hold, at attempt ``step``."""
    floats = values.floats()
    finite = floats[np.isfinite(floats)]
    return Scan(
        moment,
        kind,
        name,
        values.name,
        values.size,
        int(np.isnan(floats).sum()),
        int(np.isinf(floats).sum()),
        float(np.abs(finite).max()) if finite.size else None,
        step,
        std=float(finite.astype(np.float64).std()) if finite.size else None,
    )
