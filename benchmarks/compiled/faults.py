"""Is the cause of a planted fault found as often when the script compiles its model?

Draws faults of the generator (:mod:`benchmarks.faults`), proven by plain runs as for its own
score, and diagnoses each script twice: as it is, and with its model compiled (``net = Net();
net.compile()``). Programs whose model is made in another way are passed over.

    F=benchmarks/results/faults_compiled.json
    python -m benchmarks.compiled.faults --faults 20 --cache /tmp/plain.db --out $F
    python -m benchmarks.compiled.faults --table $F docs/compiled.md

A plain run of the compiled script, without ampscope, says whether the fault harms compiled code as
well: ``lost`` is the share of the repaired script's progress that is missing at its end. Rows are
kept after each pair; a score that was cut short goes on behind them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.compiled.score import compiled
from benchmarks.faults import planting
from benchmarks.faults.counts import rate
from benchmarks.faults.draw import Pair, Proof, drawing, prove
from benchmarks.faults.planting import FAULTS
from benchmarks.faults.score import diagnosed, row_of
from benchmarks.faults.truth import LOSS, MAIN, Run, Runs, Source

PLAIN_S = 300.0  # of a plain run, compilation included
BEGIN, END = "<!-- faults -->", "<!-- /faults -->"
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--offset", type=int, default=51_800, help="of the tuning set's seed")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds of a run")
    parser.add_argument("--cache", type=Path, help="file of plain runs")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", nargs=2, type=Path)
    asked = parser.parse_args()
    if asked.table:
        results, page = asked.table
        put(page, json.loads(results.read_text())["rows"])
        return
    planting.load()
    rows = json.loads(asked.out.read_text())["rows"] if asked.out and asked.out.exists() else []
    runs = Runs(asked.cache)
    for pair in drawing("tuning", FAULTS, asked.offset):
        if len(rows) >= asked.faults:
            return
        if pair.name in {row["script"] for row in rows}:
            continue
        if not with_compile(pair.source(pair.planted.faulty)):
            continue
        (proof,) = prove(runs, [pair])
        if proof.why_not:
            continue
        rows.append(measured(pair, proof, asked.time_limit))
        print(json.dumps(rows[-1]), flush=True)
        if asked.out:
            document = {"offset": asked.offset, "rows": rows}
            asked.out.write_text(json.dumps(document, indent=1) + "\n")


def with_compile(source: Source) -> Source:
    """The script's files with their model compiled; none where no line makes it. Lines keep their
    numbers."""
    made = {name: compiled(text, behind="; ") or text for name, text in source.items()}
    return made if made != dict(source) else {}


def measured(pair: Pair, proof: Proof, limit_s: float) -> Row:
    """Both diagnoses of a pair, and plain runs of both scripts."""
    eager = pair.source(pair.planted.faulty)
    row: Row = {"script": pair.name, "cause": pair.planted.cause}
    forms = {"eager": eager, "compiled": with_compile(eager)}
    for form, source in forms.items():
        with tempfile.TemporaryDirectory() as folder:
            for name, text in source.items():
                (Path(folder) / name).write_text(text)
            document = diagnosed(Path(folder) / MAIN, "native", limit_s)
        own = row_of(pair, proof, document, "native")
        row |= {"harmed": own["harmed"]}
        row[form] = {
            key: own[key]
            for key in (
                "found", "right", "undetermined", "no_fault", "module_found", "module_right",
                "line_right", "elapsed_s", "explanation",
            )
        }  # fmt: skip
        row[form]["notes"] = document.get("notes", [])
    repaired = plain(pair.source(pair.planted.repaired))
    row["lost"] = {form: lost(plain(source), repaired) for form, source in forms.items()}
    return row


def plain(source: Source) -> Run:
    """The losses that a script prints, without ampscope."""
    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in source.items():
            (Path(folder) / name).write_text(text)
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", MAIN], cwd=folder, capture_output=True, text=True,
                timeout=PLAIN_S, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            run.error = "died or took too long"
            return run
    run.losses = [float(x) for x in LOSS.findall(done.stdout)]
    if done.returncode:
        run.error = done.stderr.strip().rpartition("\n")[2][:300] or str(done.returncode)
    return run


def lost(run: Run, repaired: Run) -> float | str | None:
    """The share of the repaired script's progress that is missing, "error" where the run raised;
    None where nothing tells."""
    if run.error:
        return "error"
    fell = repaired.losses[0] - repaired.losses[-1] if len(repaired.losses) > 1 else 0.0
    if not run.losses or fell <= 0:
        return None
    share = (run.losses[-1] - repaired.losses[-1]) / fell
    return round(share, 3) if math.isfinite(share) else 1.0


def put(page: Path, rows: list[Row]) -> None:
    """Write the figures between the page's markers."""
    head, rest = page.read_text().split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{table(rows)}\n{END}{rest.split(END)[1]}")


def table(rows: list[Row]) -> str:
    """Both shares, and a line for each pair that is not the same both ways."""
    lines = [
        f"- {form}: cause first in {rate(sum(r[form]['right'] for r in rows), len(rows))}; "
        f"no fault: {sum(r[form]['no_fault'] for r in rows)}, "
        f"undetermined: {sum(r[form]['undetermined'] for r in rows)}"
        for form in ("eager", "compiled")
    ]
    apart = [r for r in rows if r["eager"]["found"][:1] != r["compiled"]["found"][:1]]
    if apart:
        lines += ["", "| planted | eager | compiled | progress lost: eager, compiled |"]
        lines += ["|---|---|---|---|"]
    lines += [
        f"| {r['cause']} ({r['script']}) | {r['eager']['found'][0]} | {r['compiled']['found'][0]} "
        f"| {r['lost']['eager']}, {r['lost']['compiled']} |"
        for r in apart
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
