"""Products and verdicts as JSON for programs: what was recorded, and what was made of it."""

from __future__ import annotations

import dataclasses
import json

from ampscope.analysis.core_use import CoreUse, ProductUse
from ampscope.analysis.core_verdict import Verdict
from ampscope.analysis.core_words import answer, signs_words
from ampscope.analysis.padding_gains import padding_gains
from ampscope.records import RunInfo

VERSION = 1


def cores_json(info: RunInfo, use: CoreUse) -> str:
    """One object; numbers as measured, times in seconds."""
    machine = dataclasses.asdict(info.machine) if info.machine else None
    return json.dumps(
        {
            "schema": VERSION,
            "run": info.id,
            "started": info.started,
            "spec": {k: getattr(info.spec, k) for k in ("workload", "size", "precision", "seed")},
            "machine": machine,
            "sentence": answer(use),
            "step": dataclasses.asdict(use.step),
            "calls": {v.value: use.calls(v) for v in Verdict},
            "flops": {v.value: use.flops(v) for v in Verdict},
            "ceilings": [dataclasses.asdict(rate) for rate in use.rates],
            "products": [_product(one) for one in use.uses],
            "padding": [
                {**dataclasses.asdict(gain), "gain": gain.gain}
                for gain in padding_gains([one.product for one in use.uses])
            ],
        },
        indent=2,
    )


def _product(one: ProductUse) -> dict[str, object]:
    return {
        **dataclasses.asdict(one.product),
        "intensity": one.product.intensity,
        "flops_s": one.product.flops_s,
        "eligible": one.eligibility.fit.value,
        "eligible_reason": one.eligibility.reason,
        "sign_of_names": one.names.value,
        "sign_of_rate": one.rate.sign.value,
        "speedup": one.rate.speedup,
        "verdict": one.verdict.value,
        "verdict_reason": signs_words(one),
    }
