"""Diagnose healthy scripts and count who is accused, as JSON.

    python benchmarks/healthy.py                       # all of tests/healthy
    python benchmarks/healthy.py ppo sam_amp --out -   # some of them, shown and not kept

Every script of ``tests/healthy`` trains as well under AMP as in fp32, though it does so in an
unusual way. Each is diagnosed by the command line, as a user does it; an accusation is an exit
status other than 0, a verdict other than no_fault, or any finding. Rows are written as they come;
where some scripts are named, the rows of the others stay as they are.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "healthy"
OUT = ROOT / "benchmarks" / "results" / "healthy.json"
MOST_AT_ONCE = 2  # every diagnosis runs two processes by itself


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("scripts", nargs="*", help="names without .py; all when none is named")
    parser.add_argument("--jobs", type=int, default=1, choices=range(1, MOST_AT_ONCE + 1))
    parser.add_argument("--out", default=str(OUT), help="a file, or - for none")
    parser.add_argument("--verify", action="store_true", help="run the fixes of what is found, too")
    asked = parser.parse_args()
    known = sorted(p.stem for p in SCRIPTS.glob("*.py") if p.stem != "__init__")
    if unknown := set(asked.scripts) - set(known):
        parser.error(f"no such script: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        work = ((name, Path(folder), asked.verify) for name in asked.scripts or known)
        rows = _kept(asked.out) if asked.scripts else {}
        summary = _summary(rows)
        for row in pool.map(lambda job: diagnosed(*job), work):
            rows[row["script"]] = row
            summary = _summary(rows)
            if asked.out != "-":
                document = {"summary": summary, "scripts": [rows[name] for name in sorted(rows)]}
                Path(asked.out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    sys.exit(bool(summary["accused"]))


def _kept(out: str) -> dict[str, dict[str, Any]]:
    """The rows of an earlier run, by script."""
    if out == "-" or not Path(out).exists():
        return {}
    return {row["script"]: row for row in json.loads(Path(out).read_text())["scripts"]}


def _summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "scripts": len(rows),
        "accused": sum(row["accused"] for row in rows.values()),
        "seconds": round(sum(row["seconds"] for row in rows.values()), 1),
        "machine": f"{platform.machine()}, {platform.python_version()}",
    }


def diagnosed(name: str, folder: Path, verify: bool = False) -> dict[str, Any]:
    """What ``ampscope diagnose`` says of one script."""
    out = folder / f"{name}.json"
    command = [sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet"]
    command += ["--store", str(folder / f"{name}.db"), "--json", str(out)]
    command += [] if verify else ["--no-verify"]
    started = time.monotonic()
    ended = subprocess.run(
        [*command, str(SCRIPTS / f"{name}.py")], capture_output=True, text=True, cwd=folder
    )
    seconds = round(time.monotonic() - started, 1)
    said = json.loads(out.read_text()) if out.exists() else {"verdict": "none", "findings": []}
    row = {
        "script": name,
        "exit_status": ended.returncode,
        "verdict": said["verdict"],
        "findings": [finding["cause"] for finding in said["findings"]],
        "said": [finding["explanation"] for finding in said["findings"]],
        "reason": said.get("reason", ""),
        "seconds": seconds,
    }
    row["accused"] = bool(ended.returncode or row["verdict"] != "no_fault" or row["findings"])
    word = "ACCUSED" if row["accused"] else "healthy"
    print(f"{word} {name:32} {seconds:6.1f} s {row['said'] or row['reason']}", flush=True)
    if row["accused"] and not row["findings"] and not row["reason"]:
        print(ended.stderr[-2000:] + ended.stdout[-500:], flush=True)
    return row


if __name__ == "__main__":
    main()
