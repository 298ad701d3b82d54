"""A comparison as JSON: the verdict, what it rests on, and every measurement behind it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from ampscope.compare.claims import claims
from ampscope.compare.losses import loss_difference
from ampscope.compare.verdict import verdict
from ampscope.compare.views import BASES, base_of, by_precision, memory_ratio, speedup
from ampscope.finite_json import finite
from ampscope.records import Result, RunInfo

SCHEMA = 1


def comparison_json(info: RunInfo, results: Sequence[Result], spoiled: Sequence[str] = ()) -> str:
    """NaN and infinities are texts, because JSON has neither. ``spoiled`` names what disturbed the
    measurement."""
    measured = by_precision(results)
    base, judged = base_of(measured), verdict(measured)
    beside = [m for m in measured if base is not None and m is not base]
    content = {
        "schema": SCHEMA,
        "run": info.id,
        "workload": info.spec.workload,
        "size": info.spec.size,
        "machine": dataclasses.asdict(info.machine) if info.machine else None,
        "measured_at": info.started,
        "note": info.message,
        "spoiled": list(spoiled),
        "verdict": dataclasses.asdict(judged),
        "base": base.precision if base else None,
        "precisions": [dataclasses.asdict(m) for m in measured],
        "beside_the_base": [
            {
                "precision": m.precision,
                "speedup": dataclasses.asdict(speedup(base.times, m.times))
                if base.times and m.times
                else None,
                "memory_ratio": memory_ratio(base, m),
                "loss": dataclasses.asdict(loss_difference(base, m)),
                "claims": [dataclasses.asdict(c) for c in claims(base, m, info.machine)]
                if m.precision not in BASES
                else [],
            }
            for m in beside
            if base is not None
        ],
    }
    return json.dumps(finite(content), indent=2)
