"""How long each lesson's measurement takes, and what the diagnoses of lesson 13 say.

    python benchmarks/lessons.py                 # results/lessons.json, the default settings
    python benchmarks/lessons.py --all           # every setting
    python benchmarks/lessons.py --diagnoses     # the sixteen scripts as well

`total_s` is from the click to the last result in the store: Python and torch are loaded in it.
`measured_s` is from the moment at which the run has the machine to its end; `cpu_s` is the child's
processor time, loading included, which other programs hardly change. `again_s` is a second total
of the default setting, with the files of Python and torch in the system's cache; `ready_s` a third,
as in the dashboard, where a child loads torch while the question is read (8 s here). `load` is the
system's load average of a minute before the run: above the number of cores, wall times are others'.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from contest import setting

from ampscope.ext.lessons.catalog import LESSONS, LessonInfo, lesson_spec
from ampscope.ext.lessons.mistakes import MISTAKES, STEPS, script_path
from ampscope.launcher.children import expect
from ampscope.launcher.launch import follow, launch
from ampscope.launcher.plan import run_diagnosis
from ampscope.records import RunSpec

RESULTS = Path(__file__).resolve().parent / "results" / "lessons.json"
GOAL_S = 5.0  # of a measurement, on two cores
READING_S = 8.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--diagnoses", action="store_true")
    arguments.add_argument("--all", action="store_true")
    given = arguments.parse_args()
    result: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        measured = [one for one in LESSONS.values() if one.is_measured]
        result["lessons"] = {one.id: lesson(store, one, every=given.all) for one in measured}
        if given.diagnoses:
            result["mistakes"] = {m.id: mistake(store, m.id, m.policy) for m in MISTAKES}
    slowest = max(row["measured_s"] for rows in result["lessons"].values() for row in rows)
    ready = max(rows[0]["ready_s"] for rows in result["lessons"].values())
    result |= {"goal_s": GOAL_S, "slowest_measured_s": slowest, "slowest_ready_s": ready}
    result["setting"] = setting()
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def lesson(store: Path, info: LessonInfo, *, every: bool) -> list[dict[str, Any]]:
    """A row a setting, the default first."""
    rows = []
    combinations = itertools.product(*info.settings.values())
    for values in combinations if every else itertools.islice(combinations, 1):
        asked = dict(zip(info.settings, values, strict=True))
        rows.append({"settings": asked, **timed(store, lesson_spec(info.id, **asked))})
    rows[0]["again_s"] = timed(store, lesson_spec(info.id))["total_s"]
    expect(store)
    time.sleep(READING_S)
    rows[0]["ready_s"] = timed(store, lesson_spec(info.id))["total_s"]
    return rows


def timed(store: Path, spec: RunSpec) -> dict[str, float]:
    """One run of it."""
    cpu_before, load = _child_cpu_s(), os.getloadavg()[0]
    began = time.perf_counter()
    *_, last = follow(store, launch(spec, store), poll_s=0.02)
    total_s = time.perf_counter() - began
    if last.started is None or last.ended is None or last.state != "finished":
        raise SystemExit(f"{spec.workload} {spec.settings}: {last.state}. {last.message}")
    for thread in threading.enumerate():  # that wait for the child: its time counts once it is gone
        if thread.name.startswith("ampscope-run-"):
            thread.join()
    return {
        "total_s": round(total_s, 2),
        "measured_s": round(last.ended - last.started, 2),
        "cpu_s": round(_child_cpu_s() - cpu_before, 2),
        "load": round(load, 1),
    }


def _child_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def mistake(store: Path, name: str, policy: str) -> dict[str, Any]:
    """Causes and times of its script and of the fixed one."""
    found: dict[str, Any] = {}
    for key, is_fixed in (("script", False), ("mended", True)):
        path = script_path(name, is_fixed=is_fixed)
        spec = RunSpec(
            workload=str(path), kind="script", precision="as_is", steps=STEPS, policy=policy,
            time_limit_s=300.0, group=path.stem,
        )  # fmt: skip
        began = time.perf_counter()
        diagnosis = run_diagnosis(spec, store).diagnosis
        found[key] = {
            "verdict": diagnosis.verdict,
            "causes": [finding.cause for finding in diagnosis.findings],
            "elapsed_s": round(time.perf_counter() - began, 1),
        }
    return found


if __name__ == "__main__":
    main()
