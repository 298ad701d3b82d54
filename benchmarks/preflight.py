"""How often preflight is right on public training loops, and how long it takes.

The loops are not kept: ``benchmarks/preflight_labels.json`` names repository, commit, path and the
hash of each file, with a judgement of each finding that was read there. They are fetched into
``--corpus OWNER+NAME/PATH`` for measuring.

    python -m benchmarks.preflight --corpus /tmp/loops --out benchmarks/results/preflight.json

- **Precision**: findings in the loops as they are, against the judgements; a finding without one
  counts as wrong.
- **Recall**: a fault of the protocol is planted (``benchmarks/faults/plants/protocol.py``, which
  knows nothing of preflight) into loops without a finding; it is found when a finding with one of
  its causes appears. Plants are not run there: whether the line is reached is the loop's.
- **Alarms**: look-alikes, planted likewise; a new finding is a false alarm.
- **Time**: ``ampscope preflight`` on a folder of 50 of the loops, start of the command included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ampscope.causes import CAUSES
from ampscope.errors import BadInput
from ampscope.hardware.describe import describe_machine, one_line
from ampscope.preflight.checks import Finding, check_source
from ampscope.preflight.source import Source, read_source
from benchmarks.faults import planting

LABELS = Path(__file__).parent / "preflight_labels.json"
FAMILIES = (
    "clip_before_unscale", "scaler_bypassed", "scaler_protocol_error",
    "accumulation_scale_mismatch", "fp16_params_with_scaler", "scaler_state_lost",
)  # fmt: skip
SEED = 5
DRAWN = (4, 2)  # faults and look-alikes for one loop
LOOPS_PER_REPOSITORY = 5  # that are planted into; some hold the same recipe many times
FILES = 50  # of the timed folder


def wilson(right: int, total: int) -> list[float]:
    """The 95 % interval of a share (Wilson 1927)."""
    if not total:
        return [0.0, 1.0]
    z, p = 1.959964, right / total
    middle = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return [round(middle - half, 4), round(middle + half, 4)]


def share(right: int, total: int) -> dict[str, Any]:
    """A share with its base and interval."""
    value = round(right / total, 4) if total else None
    return {"right": right, "of": total, "share": value, "interval": wilson(right, total)}


def blob(path: Path) -> str:
    """The hash by which git names a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def judged(corpus: Path, labels: dict[str, Any]) -> tuple[dict[str, Any], dict[str, list[Finding]]]:
    """Findings of the loops as they are, against the judgements."""
    found: dict[str, list[Finding]] = {}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    unlabelled = []
    for entry in labels["files"]:
        path = corpus / entry["file"]
        if not path.exists() or blob(path) != entry["blob"]:
            continue
        try:
            findings = check_source(read_source(path, entry["file"]))
        except BadInput:
            continue
        found[entry["file"]] = findings
        known = {(j["code"], j["line"]): j["right"] for j in entry.get("findings", ())}
        for f in findings:
            if f.code.code == "PRE001":  # a spelling, right by its definition
                counts["PRE001"]["right"] += 1
                continue
            right = known.get((f.code.code, f.line))
            if right is None:
                unlabelled.append(f"{f.path}:{f.line} {f.code.code}")
            counts[f.code.code]["right" if right else "wrong"] += 1
    total = sum(sum(c.values()) for code, c in counts.items() if code != "PRE001")
    right = sum(c["right"] for code, c in counts.items() if code != "PRE001")
    return {
        "loops": len(found),
        "loops_missing": len(labels["files"]) - len(found),
        "precision": share(right, total),
        "by_code": {code: dict(c) for code, c in sorted(counts.items())},
        "not_judged": unlabelled,
    }, found


def _plant(kind: planting.Kind, text: str) -> planting.Planted | None:
    """A plant; None where the transformation finds no place that it understands."""
    try:
        pair = planting.plant(kind, text, SEED)
    except (ValueError, IndexError, KeyError, AttributeError, AssertionError):
        return None
    return pair if pair is not None and pair.faulty != text else None


def planted(corpus: Path, found: dict[str, list[Finding]]) -> dict[str, Any]:
    """Faults and look-alikes planted into the loops that have a scaler and no finding."""
    planting.load()
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    misses, alarms = [], []
    looked, of_repository = 0, Counter[str]()
    rng = random.Random(SEED)
    every = {**planting.FAULTS, **planting.LOOKALIKES}
    faults = [k for k in every.values() if k.cause in FAMILIES]
    harmless = [k for k in every.values() if k.cause == "no_fault"]
    for file, before in found.items():
        repository = file.partition("/")[0]
        if of_repository[repository] >= LOOPS_PER_REPOSITORY:
            continue
        text = read_source(corpus / file).text
        if "GradScaler" not in text or any(f.code.code != "PRE001" for f in before):
            continue
        spelled = {f.code.code for f in before}
        drawn = [(k, p) for k in rng.sample(faults, len(faults)) if (p := _plant(k, text))]
        drawn = drawn[: DRAWN[0]]
        others = [(k, p) for k in rng.sample(harmless, len(harmless)) if (p := _plant(k, text))]
        looked += bool(drawn)
        of_repository[repository] += bool(drawn)
        for kind, pair in [*drawn, *others[: DRAWN[1]]]:
            name, fault = kind.name, kind.cause in FAMILIES
            codes = {f.code.code for f in check_source(Source(file, pair.faulty))} - spelled
            if fault:
                wanted = {CAUSES[cause].code for cause in pair.accept if cause in CAUSES}
                rows[name]["found" if codes & wanted else "missed"] += 1
                rows[name]["other"] += bool(codes - wanted)
                if not codes & wanted:
                    misses.append(f"{name} {file}")
            else:
                rows["look-alikes"]["silent" if not codes else "alarm"] += 1
                if codes:
                    alarms.append(f"{name} {file} {sorted(codes)}")
    kinds = {k: c for k, c in rows.items() if k != "look-alikes"}
    hits = sum(c["found"] for c in kinds.values())
    total = hits + sum(c["missed"] for c in kinds.values())
    silent = rows["look-alikes"]["silent"]
    return {
        "loops": looked,
        "recall": share(hits, total),
        "by_kind": {name: dict(c) for name, c in sorted(kinds.items())},
        "lookalikes_silent": share(silent, silent + rows["look-alikes"]["alarm"]),
        "misses": misses,
        "alarms": alarms,
    }


def timed(corpus: Path, files: list[str]) -> dict[str, Any]:
    """Seconds of the command on a folder of FILES loops: wall, and of this process's child."""
    with tempfile.TemporaryDirectory() as folder:
        for n, file in enumerate(sorted(files)[:: max(1, len(files) // FILES)][:FILES]):
            shutil.copy(corpus / file, Path(folder, f"{n:02d}_{Path(file).name}"))
        count = len(list(Path(folder).iterdir()))
        size = sum(p.stat().st_size for p in Path(folder).iterdir())
        command = [sys.executable, "-m", "ampscope.cli.main", "preflight", folder]
        walls = []
        for _ in range(3):
            start = time.perf_counter()
            subprocess.run(command, check=False, capture_output=True)
            walls.append(round(time.perf_counter() - start, 2))
    return {"files": count, "bytes": size, "wall_s": sorted(walls)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    labels = json.loads(LABELS.read_text())
    as_they_are, found = judged(asked.corpus, labels)
    document = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": one_line(describe_machine()),
        "as_they_are": as_they_are,
        "time": timed(asked.corpus, list(found)),
        "planted": planted(asked.corpus, found),
    }
    text = json.dumps(document, indent=1) + "\n"
    if asked.out:
        asked.out.write_text(text)
    print(json.dumps({k: document[k] for k in ("as_they_are", "time")}, indent=1))
    print(json.dumps(document["planted"]["recall"]), document["planted"]["lookalikes_silent"])


if __name__ == "__main__":
    main()
