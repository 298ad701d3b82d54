"""Processor time of ``ampscope diagnose`` over that of the plain script, and its runs, as JSON.

    python benchmarks/diagnose_cost.py                # a sample of the zoo and of the healthy set
    python benchmarks/diagnose_cost.py --every 1      # all of them
    python benchmarks/diagnose_cost.py --out -        # shown and not kept
    python benchmarks/diagnose_cost.py A.py B.py      # of these alone, likewise

Processor time of the process and of all that it started and waited for, so that other work on the
machine matters little; one thread each, because threads that wait for each other burn time as well.
Each script runs plain before and after its diagnosis, and the mean of both counts.
``python benchmarks/print_cost.py --write`` puts the table into docs/cost.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ampscope.zoo.answers import ANSWERS, script_path

ROOT = Path(__file__).resolve().parent.parent
HEALTHY = ROOT / "tests" / "healthy"
OUT = ROOT / "benchmarks" / "results" / "diagnose_cost.json"
GOALS = {"fault": 6.0, "healthy": 3.0}  # faults in the median; healthy scripts each
PER_PROCESS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    """One row for each script, written as it comes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=9, help="one script of so many")
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--out", default=str(OUT), help="a file, or - for none")
    asked = parser.parse_args()
    faults = [(script_path(a.script), a.policy) for a in ANSWERS if a.cause != "no_fault"]
    healthy = [(p, "any") for p in sorted(HEALTHY.glob("*.py")) if p.stem != "__init__"]
    if asked.scripts:
        faults, healthy = [(p.resolve(), "any") for p in asked.scripts], []
        asked.every, asked.out = 1, "-"
    rows: list[dict[str, Any]] = []
    for kind, scripts in (("fault", faults), ("healthy", healthy)):
        for path, policy in scripts[:: asked.every]:
            rows.append({"kind": kind, **measured(path, policy)})
            print(json.dumps(rows[-1]), flush=True)
            if asked.out != "-":
                document = {"machine": machine(), "summary": summary(rows), "scripts": rows}
                Path(asked.out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


def measured(path: Path, policy: str) -> dict[str, Any]:
    """Processor seconds of one script, plain and diagnosed, and what the diagnosis said."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        command = [sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet"]
        command += ["--store", str(Path(folder, "runs.db")), "--json", str(out)]
        command += ["--policy", "cuda"] if policy == "cuda" else []
        before = processor_s([sys.executable, str(path)], folder)
        taken = processor_s([*command, str(path)], folder)
        after = processor_s([sys.executable, str(path)], folder)
        said = json.loads(out.read_text())
    plain = (before + after) / 2
    causes = [finding["cause"] for finding in said["findings"]]
    return {
        "script": path.name,
        "said": causes[0] if causes else said["verdict"],
        "runs": list(said["runs"]),
        "plain_s": round(plain, 2),
        "diagnose_s": round(taken, 2),
        "ratio": round(taken / plain, 2),
    }


def processor_s(command: list[str], folder: str) -> float:
    """Of the process, and of all below it that was waited for."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **PER_PROCESS},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, _, used = os.wait4(process.pid, 0)
    return used.ru_utime + used.ru_stime


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Per kind: how many, and the ratios' median and largest."""
    found = {}
    for kind, goal in GOALS.items():
        own = [row for row in rows if row["kind"] == kind]
        if own:
            ratios = [row["ratio"] for row in own]
            found[kind] = {
                "scripts": len(own),
                "median": round(statistics.median(ratios), 2),
                "largest": max(ratios),
                "within_goal": sum(ratio <= goal for ratio in ratios),
                "median_runs": statistics.median(len(row["runs"]) for row in own),
                "median_plain_s": round(statistics.median(row["plain_s"] for row in own), 2),
            }
    return found


def machine() -> str:
    """What it was measured on."""
    return f"{platform.machine()}, Python {platform.python_version()}, one thread"


if __name__ == "__main__":
    main()
