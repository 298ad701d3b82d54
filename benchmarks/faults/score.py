"""Diagnose drawn pairs with ``ampscope diagnose`` and count how often it is right.

    python -m benchmarks.faults.score --set tuning --faults 80 --healthy 40 --cache runs.db --out rows.jsonl

The tuning set writes a row for each pair and keeps its scripts where ``--keep`` says. Of the sealed
set no script and no row is kept or printed: only counts, at most once a day.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.faults import planting
from benchmarks.faults.draw import Pair, Proof, drawn, key_modules
from benchmarks.faults.planting import FAULTS, LOOKALIKES
from benchmarks.faults.truth import MAIN, Runs

Row = dict[str, Any]
UNDETERMINED = ("undetermined", "inconclusive", "failed")


def diagnosed(script: Path, policy: str, limit_s: float) -> Row:
    """The JSON document of ``ampscope diagnose``; a verdict "failed" where there is none."""
    store = script.parent / "runs.db"
    command = [
        sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet", "--json", "-", "--store",
        str(store), "--policy", policy, "--time-limit", str(limit_s), script.name,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True,
            timeout=10 * limit_s, check=False,
        )  # fmt: skip
        document: Row = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        document = {"verdict": "failed", "findings": [], "elapsed_s": None, "reason": str(error)}
    for file in script.parent.glob("runs.db*"):
        file.unlink()
    return document


def row_of(pair: Pair, proof: Proof, found: Row, policy: str) -> Row:
    """What the key says and what was found."""
    planted = pair.planted
    harmed = bool(proof.damage and proof.damage.is_harmed)
    healthy = planted.cause == "no_fault"
    latent = [f for f in found.get("latent", []) if f["cause"] in planted.accept]
    findings = found["findings"]
    if not findings and not healthy and not harmed:  # numbers are lost, and that is what it says
        findings = latent
    causes = [f["cause"] for f in findings] or [found["verdict"]]
    first = findings[0] if findings else {}
    modules, lines = key_modules(pair, proof), planted.lines
    right = causes[0] in planted.accept
    file, number = _file_and_line(first.get("line") or "")
    return {
        "script": pair.name,
        "program": pair.program,
        "form": pair.form,
        "kind": planted.kind,
        "params": planted.params,
        "policy": policy,
        "cause": planted.cause,
        "accept": planted.accept,
        "found": causes[:3],
        "right": right,
        "among_three": any(c in planted.accept for c in causes[:3]),
        "wrong_cause": bool(findings) and not right,
        "undetermined": causes[0] in UNDETERMINED,
        "no_fault": causes[0] == "no_fault",
        "modules": modules,
        "module_found": first.get("module"),
        "module_right": (first.get("module") or "") in modules
        if modules and right and not healthy
        else None,
        "lines": lines,
        "line_found": number,
        "line_right": (file, number) in [(pair.file, n) for n in lines]
        if lines and right and number and not healthy
        else None,
        "fix": first.get("fix", {}).get("kind"),
        "verified": first.get("fix", {}).get("verified"),
        "damage": proof.damage.kinds if proof.damage else (),
        "harmed": harmed,
        "latent": [f["cause"] for f in found.get("latent", [])],
        "elapsed_s": found["elapsed_s"],
        "reason": found.get("reason", ""),
        "symptoms": found.get("symptoms", []),
        "explanation": first.get("explanation", ""),
    }


def _file_and_line(place: str) -> tuple[str, int | None]:
    """ "model.py", 41 of "project/model.py:41"."""
    match = re.search(r"([^/\s]+):(\d+)", place)
    return (match[1], int(match[2])) if match else ("", None)


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not of:
        return 0.0, 1.0
    z = 1.96
    share, spread = hits / of, z / (2 * of) * math.sqrt(4 * hits * (of - hits) / of + z * z)
    middle, divisor = share + z * z / (2 * of), 1 + z * z / of
    return max(0.0, (middle - spread) / divisor), min(1.0, (middle + spread) / divisor)


def rate(rows: Iterable[Row], of: str) -> str:
    """ "93.1 % (87.0 to 96.4), 108 of 116" of the rows in which ``of`` is not None."""
    values = [bool(r[of]) for r in rows if r[of] is not None]
    if not values:
        return "none"
    low, high = wilson(sum(values), len(values))
    share = sum(values) / len(values)
    return f"{share:.1%} ({low:.1%} to {high:.1%}), {sum(values)} of {len(values)}"


def summary(rows: list[Row]) -> Row:
    """The figures that count. Module and line count where the cause is right and a key has them.
    Where the training is not harmed, a latent finding of the planted cause is right."""
    faulty = [r for r in rows if r["cause"] != "no_fault"]
    healthy = [r for r in rows if r["cause"] == "no_fault"]
    seconds = [r["elapsed_s"] for r in rows if r["elapsed_s"] is not None]

    def grouped(by: str) -> Row:
        names = sorted({r[by] for r in faulty})
        return {n: rate([r for r in faulty if r[by] == n], "right") for n in names}

    return {
        "cause first": rate(faulty, "right"),
        "cause first, training harmed": rate([r for r in faulty if r["harmed"]], "right"),
        "cause among three": rate(faulty, "among_three"),
        "wrong cause": rate(faulty, "wrong_cause"),
        "undetermined": rate(faulty, "undetermined"),
        "no fault over damage": rate(faulty, "no_fault"),
        "module": rate(faulty, "module_right"),
        "line": rate(faulty, "line_right"),
        "fix cured, of those run": rate([r for r in faulty if r["right"]], "verified"),
        "false alarms": rate(healthy, "wrong_cause"),
        "healthy undetermined": rate(healthy, "undetermined"),
        "healthy with a latent finding": rate(
            [{**r, "has_latent": bool(r.get("latent"))} for r in healthy], "has_latent"
        ),
        "seconds, median and worst": [statistics.median(seconds), max(seconds)] if seconds else [],
        "by cause": grouped("cause"),
        "by program": grouped("program"),
        "by form": grouped("form"),
        "by policy": grouped("policy"),
        "confusion": {
            cause: dict(Counter(shown(r) for r in rows if r["cause"] == cause).most_common())
            for cause in sorted({r["cause"] for r in rows})
        },
    }


def shown(row: Row) -> str:
    """The column of a row: an accepted cause counts as the planted one."""
    if row["right"]:
        return str(row["cause"])
    return "undetermined" if row["undetermined"] else str(row["found"][0])


def confusion_svg(confusion: dict[str, dict[str, int]]) -> str:
    """The confusion matrix: planted causes as rows, verdicts as columns."""
    rows = sorted(confusion)
    columns = sorted({c for found in confusion.values() for c in found} | set(rows))
    cell, left, top = 22, 230, 190
    width, height = left + cell * len(columns) + 10, top + cell * len(rows) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="8" y="{top - 8}" font-weight="bold">planted, verdict on top</text>',
    ]
    for n, column in enumerate(columns):
        x = left + cell * n + cell / 2 + 4
        parts.append(
            f'<text transform="translate({x} {top - 6}) rotate(-60)">{escape(column)}</text>'
        )
    for m, cause in enumerate(rows):
        y = top + cell * m
        total = sum(confusion[cause].values())
        parts.append(
            f'<text x="{left - 6}" y="{y + 15}" text-anchor="end">{escape(cause)} ({total})</text>'
        )
        for n, column in enumerate(columns):
            count = confusion[cause].get(column, 0)
            colour = "26,122,76" if cause == column else "180,40,40"
            fill = f"rgba({colour},{0.15 + 0.85 * count / total:.2f})" if count else "#f2f2f2"
            x = left + cell * n
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{cell - 2}" fill="{fill}"/>'
            )
            if count:
                parts.append(f'<text x="{x + 10}" y="{y + 15}" text-anchor="middle">{count}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _interleaved(
    which: str, faults: int, healthy: int, runs: Runs, offset: int
) -> Iterator[tuple[Pair, Proof]]:
    """Both kinds from the start, so that a score that is cut short has both."""
    sources = [
        islice(drawn(which, FAULTS, runs, offset=offset), faults),
        islice(drawn(which, LOOKALIKES, runs, offset=offset), healthy),
    ]
    shares = [faults, healthy]
    given = [0, 0]
    while sum(given) < sum(shares):
        behind = min((0, 1), key=lambda n: given[n] / shares[n] if shares[n] else math.inf)
        given[behind] += 1
        yield next(sources[behind])


def scored(asked: argparse.Namespace, place: Path) -> Iterator[Row]:
    """Rows as they are done. Proving forks, so only this thread does it; diagnoses are processes."""
    runs = Runs(asked.cache, 1)
    pairs = _interleaved(asked.set, asked.faults, asked.healthy, runs, asked.offset)
    waiting: dict[Future[Row], tuple[Pair, Proof]] = {}
    known: dict[str, Row] = {}
    if asked.set == "tuning" and asked.out and asked.out.exists():  # a score that was cut short
        rows = map(json.loads, asked.out.read_text().splitlines())
        known = {r["script"]: r for r in rows}
    with ThreadPoolExecutor(asked.jobs) as pool:
        for pair, proof in pairs:
            if pair.name in known:
                yield {**known[pair.name], "kept": True}
                continue
            folder = place / pair.name
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in pair.source(pair.planted.faulty).items():
                (folder / name).write_text(text)
            if asked.set == "tuning":
                (folder / "repaired.txt").write_text(pair.planted.repaired)
            job = pool.submit(diagnosed, folder / MAIN, asked.policy, asked.time_limit)
            waiting[job] = (pair, proof)
            while len(waiting) > asked.jobs:
                yield from _done(waiting, asked.policy)
        while waiting:
            yield from _done(waiting, asked.policy)


def _done(waiting: dict[Future[Row], tuple[Pair, Proof]], policy: str) -> Iterator[Row]:
    finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for job in finished:
        yield row_of(*waiting.pop(job), job.result(), policy)


def _once_a_day(stamp: Path) -> None:
    today = datetime.date.today().isoformat()
    if stamp.exists() and stamp.read_text() == today:
        raise SystemExit("The sealed set has been drawn today; once a day is enough.")
    stamp.write_text(today)


def main() -> None:
    """Draw, diagnose, count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=("tuning", "sealed"), required=True)
    parser.add_argument("--faults", type=int, default=80)
    parser.add_argument("--healthy", type=int, default=40)
    parser.add_argument("--offset", type=int, default=0, help="of the tuning set's seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of a run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="take no more rows then")
    parser.add_argument("--policy", choices=("native", "cuda"), default="native")
    parser.add_argument("--cache", type=Path, required=True, help="file of kept plain runs")
    parser.add_argument("--keep", type=Path, help="folder for the tuning set's scripts")
    parser.add_argument("--out", type=Path, help="rows of the tuning set, counts of the sealed one")
    parser.add_argument("--svg", type=Path, help="the confusion matrix")
    asked = parser.parse_args()
    planting.load()
    sealed = asked.set == "sealed"
    if sealed:
        _once_a_day(asked.cache.with_suffix(".sealed"))
        asked.keep, asked.cache, asked.offset = None, None, 0
    until = time.monotonic() + 60 * asked.minutes
    with contextlib.ExitStack() as stack:
        place = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = []
        taken = stack.enter_context(contextlib.closing(scored(asked, place)))
        for row in taken:
            rows.append(row)
            if sealed and asked.out:  # counts alone, so that a score that is cut short has some
                asked.out.write_text(_counts(rows, asked))
            elif not row.get("kept"):
                print(
                    f"{'right' if row['right'] else 'WRONG':6}{row['script']:60}{row['found'][0]}",
                    flush=True,
                )
                if asked.out:
                    with asked.out.open("a") as out:
                        out.write(json.dumps(row) + "\n")
            if time.monotonic() > until:
                break
    print(_counts(rows, asked))
    if asked.svg:
        asked.svg.write_text(confusion_svg(summary(rows)["confusion"]))


def _counts(rows: list[Row], asked: argparse.Namespace) -> str:
    """The summary as JSON, with the day and how much of the draw it covers."""
    healthy = sum(r["cause"] == "no_fault" for r in rows)
    drawn_on = {
        "set": asked.set, "policy": asked.policy, "on": datetime.date.today().isoformat(),
        "faults": len(rows) - healthy, "healthy": healthy,
        "asked for": [asked.faults, asked.healthy],
    }  # fmt: skip
    return json.dumps({**summary(rows), "drawn": drawn_on}, indent=1) + "\n"


if __name__ == "__main__":
    main()
