"""A report of every diagnosis in a store, opened from disk in Chromium with the network off.

    python benchmarks/report_zoo.py STORE                     # results/report_zoo.json

STORE is copied first and only read. Of each report: its size, how long it took, and what the
browser did that it must not (a request, an error in the console, a dialog), after every detail was
opened, a curve was hovered over, zoomed and switched off, and the page was laid out for paper.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from ampscope.diagnosis.load import load_diagnosis
from ampscope.records import RunInfo
from ampscope.render.html import MAX_BYTES, to_html
from ampscope.render.markdown import to_markdown
from ampscope.store.reader import Reader
from ampscope.story.build import document, heads

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' way of starting a Chromium

from tests.helpers import browser, offline_page  # noqa: E402  - needs the path set above

OUT = ROOT / "benchmarks" / "results" / "report_zoo.json"
Row = dict[str, object]


def main() -> None:
    """Every diagnosis, and what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    chromium = browser.executable()
    assert chromium is not None, "Chromium is not installed"
    with (
        tempfile.TemporaryDirectory() as folder,
        browser.launched(chromium) as running,
    ):
        store = Path(shutil.copy(asked.store, Path(folder) / "runs.db"))
        with Reader(store) as reader:
            runs = [r for r in reader.runs(10_000) if r.spec.kind == "script"]
            rows = [_row(reader, run, running, Path(folder)) for run in heads(runs[::-1])]
    summary = {
        "reports": len(rows),
        "with_trouble": sum(bool(row["trouble"]) for row in rows),
        "causes": len({row["cause"] for row in rows}),
        "largest_bytes": max(int(str(row["bytes"])) for row in rows),
        "median_bytes": statistics.median(int(str(row["bytes"])) for row in rows),
        "longest_to_make_s": max(float(str(row["make_s"])) for row in rows),
        "limit_bytes": MAX_BYTES,
        "rows": rows,
    }
    asked.out.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({k: v for k, v in summary.items() if k != "rows"}, indent=1))


def _row(reader: Reader, run: RunInfo, running: browser.Browser, folder: Path) -> Row:
    started = time.perf_counter()
    made = document(reader, [run.id])
    content = to_html(made)
    elapsed = time.perf_counter() - started
    path = folder / "report.html"
    path.write_text(content, encoding="utf-8")
    diagnosis = load_diagnosis(reader, run.id).diagnosis
    cause = diagnosis.findings[0].cause if diagnosis.findings else diagnosis.verdict
    with offline_page.opened(running, path) as watched:
        offline_page.use(watched.page)
        trouble = watched.trouble
        charts = watched.page.locator("figure").count()
    print(f"{run.spec.label}: {cause}, {len(content) / 1e3:,.0f} kB, {trouble or 'fine'}")
    return {
        "script": run.spec.label,
        "cause": cause,
        "bytes": len(content.encode()),
        "markdown_characters": len(to_markdown(made)),
        "charts": charts,
        "make_s": round(elapsed, 3),
        "trouble": trouble,
    }


if __name__ == "__main__":
    main()
