"""Waits and launches of a watched training step on a CUDA device, counted on a fake one.

    python benchmarks/device_price.py            # prints them
    python benchmarks/device_price.py --out      # also writes results/device_price.json

A small convolutional net trains bare and under `ampscope.watch`, in five kinds: without a scaler,
with a GradScaler, with one and a clip behind its ``unscale_``, with one and a fused optimizer, and
compiled. Counts are those beyond
the bare training's, a step, as means over ten rounds of the default schedule. The Triton kernel is
a launch here, and foreach calls are one launch each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ["AMPSCOPE_TELEMETRY"] = "0"

import ampscope
from tests.helpers.counted_device import Counts, net, steps

OUT = Path(__file__).parent / "results" / "device_price.json"
FIRST, COUNT = 10, 100  # the first step that counts, and how many do
MODES: dict[str, int | None] = {"asleep": 0, "default": None, "everything": 1}
KINDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "scaler": {"scaled": True},
    "clipped": {"scaled": True, "clipped": True},
    "fused": {"scaled": True, "fused": True},
    "compiled": {"compiled": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", action="store_true", help=f"write {OUT.name}")
    given = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="ampscope-benchmark-") as folder:
        for kind, options in KINDS.items():
            bare = steps(net(), None, count=FIRST + COUNT, **options)
            for mode, every in MODES.items():

                def watch(*args: Any, every: int | None = every) -> ampscope.Watch:
                    given = (a for a in args if a is not None)
                    return ampscope.watch(*given, store=Path(folder, "runs.db"), every=every)

                seen = steps(net(), watch, count=FIRST + COUNT, **options)
                found[f"{mode}, {kind}"] = added(bare[FIRST:], seen[FIRST:])
    for name, one in found.items():
        print(f"{name:22}", json.dumps(one))
    if given.out:
        OUT.write_text(json.dumps(found, indent=1) + "\n")


def added(bare: list[Counts], seen: list[Counts]) -> dict[str, object]:
    """What the steps of ``seen`` have beyond those of ``bare``, as means."""
    launches, waits, copies = Counter[str](), Counter[str](), 0
    for one, other in zip(bare, seen, strict=True):
        launches.update(other[0])
        launches.subtract(one[0])
        waits.update(other[1])
        waits.subtract(one[1])
        copies += other[2] - one[2]
    return {
        "waits": waits.total() / len(bare),
        "launches": launches.total() / len(bare),
        "copies": copies / len(bare),
        "waits_by_name": {name: n / len(bare) for name, n in sorted(waits.items()) if n},
        "launches_by_name": {name: n / len(bare) for name, n in sorted(launches.items()) if n},
    }


if __name__ == "__main__":
    main()
