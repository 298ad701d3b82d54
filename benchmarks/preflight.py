"""How often preflight is right on public training loops, and how long it takes.

The loops are not kept: ``benchmarks/preflight_labels.json`` names repository, commit, path and the
hash of each file, with a judgement of each finding that was read there. They are fetched into
``--corpus OWNER+NAME/PATH`` for measuring.

    python -m benchmarks.preflight --corpus /tmp/loops --out benchmarks/results/preflight.json

- **Precision**: findings in the unchanged loops, against the judgements; a finding without one
  counts as wrong.
- **Recall of real faults**: of the second set of loops all faults are labelled that a reader found
  in them, before preflight looked at them; one is found when a finding has its code. ``--set 2``
  measures these loops alone, ``--as NAME`` keeps the result under another name.
- **Recall**: a fault of the protocol is planted (``benchmarks/faults/plants/protocol.py``, which
  knows nothing of preflight) into loops without a finding; it is found when a finding with one of
  its causes appears. Plants are not run there: whether the line is reached is the loop's.
- **Alarms**: look-alikes, planted likewise; a new finding is a false alarm.
- **Recall by code** (``--parts keyed``, which needs no corpus): the scripts of the zoo and of
  ``benchmarks/unseen``, which were written without knowledge of preflight, against their keys; and
  every fault that ``benchmarks/faults`` can plant into its programs. A finding whose cause is not
  in the key is wrong, in a healthy script as in a faulty one.
- **Time**: ``ampscope preflight`` on a folder of 50 of the loops, start of the command included;
  wall time, processor time, and the machine's load meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ampscope.zoo
from ampscope.causes import CAUSES
from ampscope.errors import BadInput
from ampscope.ext.preflight.checks import check_source
from ampscope.ext.preflight.source import SourceFile, read_source
from ampscope.hardware.describe import describe_machine, one_line
from benchmarks.faults import planting

LABELS = Path(__file__).parent / "preflight_labels.json"
FAMILIES = (
    "clip_before_unscale", "scaler_bypassed", "scaler_protocol_error",
    "accumulation_scale_mismatch", "fp16_params_with_scaler", "scaler_state_lost",
)  # fmt: skip
SEED = 5
DRAWN = (3, 1)  # faults and look-alikes for one loop
LOOPS_PER_REPOSITORY = 1  # that are planted into; some hold the same recipe many times
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


def judged(corpus: Path, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Findings of the unchanged loops, against the judgements."""
    looked, real, missed = 0, 0, []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    unlabelled = []
    for entry in entries:
        path = corpus / entry["file"]
        if not path.exists() or blob(path) != entry["blob"]:
            continue
        try:
            findings = check_source(read_source(path, entry["file"]))
        except BadInput:
            continue
        looked += 1
        known = {(j["code"], j["line"]): j["right"] for j in entry.get("findings", ())}
        codes = {f.code.code for f in findings}
        real += len(entry.get("faults", ()))
        missed += [
            f"{entry['file']}:{fault['line']} {fault['code']}"
            for fault in entry.get("faults", ())
            if fault["code"] not in codes
        ]
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
        "loops": looked,
        "loops_missing": len(entries) - looked,
        "precision": share(right, total),
        "real_faults_found": share(real - len(missed), real),
        "real_faults_missed": missed,
        "by_code": {code: dict(c) for code, c in sorted(counts.items())},
        "not_judged": unlabelled,
    }


def _plant(kind: planting.Kind, text: str, seed: int) -> planting.Planted | None:
    """A plant; None where the transformation finds no place that it understands."""
    try:
        pair = planting.plant(kind, text, seed)
    except (ValueError, IndexError, KeyError, AttributeError, AssertionError):
        return None
    return pair if pair is not None and pair.faulty != text else None


def _drawn(
    kinds: list[planting.Kind], text: str, most: int, seed: int
) -> list[tuple[planting.Kind, planting.Planted]]:
    """The first plants that find a place."""
    found: list[tuple[planting.Kind, planting.Planted]] = []
    for kind in kinds:
        if len(found) < most and (pair := _plant(kind, text, seed)) is not None:
            found.append((kind, pair))
    return found


def planted(
    corpus: Path, files: list[str], known: set[str], seed: int,
    keep: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """Faults and look-alikes planted into loops that have a scaler, not one that is switched off
    for good, and no finding (``known`` are those with one); ``keep`` is given the counts after each
    loop."""
    planting.load()
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    misses: list[str] = []
    alarms: list[str] = []
    looked, of_repository = 0, Counter[str]()
    rng = random.Random(seed)
    every = {**planting.FAULTS, **planting.LOOKALIKES}
    faults = [k for k in every.values() if k.cause in FAMILIES]
    harmless = [k for k in every.values() if k.cause == "no_fault"]
    for file in rng.sample(files, len(files)):
        repository = file.partition("/")[0]
        path = corpus / file
        if of_repository[repository] >= LOOPS_PER_REPOSITORY or file in known or not path.exists():
            continue
        text = read_source(path).text
        if "GradScaler" not in text or "GradScaler(enabled=False)" in text:
            continue
        drawn = _drawn(rng.sample(faults, len(faults)), text, DRAWN[0], seed)
        others = _drawn(rng.sample(harmless, len(harmless)), text, DRAWN[1], seed)
        looked += bool(drawn)
        of_repository[repository] += bool(drawn)
        for kind, pair in [*drawn, *others]:
            codes = {f.code.code for f in check_source(SourceFile(file, pair.faulty))} - {"PRE001"}
            if kind.cause in FAMILIES:
                wanted = {CAUSES[cause].code for cause in pair.accept if cause in CAUSES}
                rows[kind.name]["found" if codes & wanted else "missed"] += 1
                if not codes & wanted:
                    misses.append(f"{kind.name} {file}")
            else:
                rows["look-alikes"]["silent" if not codes else "alarm"] += 1
                if codes:
                    alarms.append(f"{kind.name} {file} {sorted(codes)}")
        kinds = {k: c for k, c in rows.items() if k != "look-alikes"}
        hits = sum(c["found"] for c in kinds.values())
        total = hits + sum(c["missed"] for c in kinds.values())
        silent = rows["look-alikes"]["silent"]
        keep(
            {
                "seed": seed,
                "loops": looked,
                "recall": share(hits, total),
                "by_kind": {name: dict(c) for name, c in sorted(kinds.items())},
                "lookalikes_silent": share(silent, silent + rows["look-alikes"]["alarm"]),
                "misses": misses,
                "alarms": alarms,
            }
        )


def _accepted(causes: Iterable[str]) -> list[str]:
    """Codes of the causes of a key, the script's own first; none of a healthy script's."""
    return [CAUSES[name].code for name in causes if name in CAUSES and name != "no_fault"]


def _keyed_scripts(place: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Name, file and accepted codes of each script that has a key; ``place`` is an empty folder."""
    zoo = Path(ampscope.zoo.__file__).parent
    answers = tomllib.loads((zoo / "answers.toml").read_text())
    key = {answer["script"]: answer for answer in answers.values()}
    for path in sorted((zoo / "scripts").glob("*.py")):
        answer = key.get(path.stem, {"cause": "no_fault"})
        yield f"zoo/{path.name}", path, _accepted([answer["cause"], *answer.get("accept", ())])
    unseen = Path(__file__).parent / "unseen"
    with tarfile.open(unseen / "scripts.tar.xz") as archive:
        archive.extractall(place, filter="data")
    for file in sorted(unseen.glob("*/key.json")):
        entries = json.loads(file.read_text())
        if isinstance(entries, dict):
            entries = [{"script": script, **entry} for script, entry in entries.items()]
        for entry in entries:
            name = f"{file.parent.name}/{entry['script']}"
            yield name, place / name, _accepted([entry["cause"], *entry.get("accept", ())])


def keyed() -> dict[str, Any]:
    """What is found, by code, of what scripts with a key have, and of what is planted."""
    planting.load()
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    healthy, wrong = Counter[str](), []

    def count(name: str, source: SourceFile, accepted: list[str], where: str) -> None:
        codes = {f.code.code for f in check_source(source)} - {"PRE001"}
        if accepted:
            rows[accepted[0]][where] += 1
            rows[accepted[0]][f"{where}_found"] += bool(codes & set(accepted))
        else:
            healthy[where] += 1
        wrong.extend(f"{name} {code}" for code in sorted(codes - set(accepted)))

    with tempfile.TemporaryDirectory() as place:
        for name, path, accepted in _keyed_scripts(Path(place)):
            count(name, read_source(path, name), accepted, "scripts")
    for path in sorted((Path(__file__).parent / "faults" / "programs").rglob("*.py")):
        text = read_source(path).text
        for kind in (*planting.FAULTS.values(), *planting.LOOKALIKES.values()):
            if (pair := _plant(kind, text, SEED)) is not None:
                name = f"{kind.name} {path.stem}"
                count(name, SourceFile(name, pair.faulty), _accepted(pair.accept), "planted")
    found = {code: dict(row) for code, row in sorted(rows.items()) if any(
        row[f"{where}_found"] for where in ("scripts", "planted")
    )}  # fmt: skip
    return {"healthy": dict(healthy), "by_code": found, "wrong": wrong}


def timed(corpus: Path, files: list[str]) -> dict[str, Any]:
    """Seconds of the command on a folder of FILES loops: wall, and of this process's child."""
    with tempfile.TemporaryDirectory() as folder:
        for n, file in enumerate(sorted(files)[:: max(1, len(files) // FILES)][:FILES]):
            shutil.copy(corpus / file, Path(folder, f"{n:02d}_{Path(file).name}"))
        count = len(list(Path(folder).iterdir()))
        size = sum(p.stat().st_size for p in Path(folder).iterdir())
        command = [sys.executable, "-m", "ampscope.cli.main", "preflight", folder]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=False, capture_output=True)
        wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "files": count,
        "bytes": size,
        "wall_s": round(wall, 2),
        "cpu_s": round(spent, 2),
        "load": [round(x, 1) for x in os.getloadavg()],
    }


def main() -> None:
    """Measure and write; each part takes the place of what the file had of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--corpus", type=Path, help="needed by all parts but keyed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="*", default=("unchanged", "time", "planted"))
    parser.add_argument("--set", type=int, choices=(1, 2), help="of the loops; default: all")
    parser.add_argument("--as", dest="name", default="{part}", help="such as '{part}_second_set'")
    parser.add_argument("--seed", type=int, default=SEED, help="of the plants")
    asked = parser.parse_args()
    labels = json.loads(LABELS.read_text())
    entries = [e for e in labels["files"] if asked.set in (None, e.get("set", 1))]
    files = [entry["file"] for entry in entries]
    document: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}

    def keep(part: str, value: dict[str, Any]) -> None:
        document.update(
            schema=1,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=one_line(describe_machine()),
        )
        document[asked.name.format(part=part)] = value
        asked.out.write_text(json.dumps(document, indent=1) + "\n")

    if "keyed" in asked.parts:
        keep("keyed", keyed())
    if asked.corpus is None and {*asked.parts} != {"keyed"}:
        parser.error("--corpus is needed by all parts but keyed.")
    if "unchanged" in asked.parts:
        keep("unchanged", judged(asked.corpus, entries))
    if "time" in asked.parts:
        keep("time", timed(asked.corpus, files))
    if "planted" in asked.parts:
        known = {entry["file"] for entry in entries if entry.get("findings")}
        planted(asked.corpus, files, known, asked.seed, lambda value: keep("planted", value))


if __name__ == "__main__":
    main()
