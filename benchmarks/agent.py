"""Planted faults given to a scripted client of ``ampscope mcp`` and to the command line, as JSON.

    python -m benchmarks.agent --faults 30 --cache /tmp/runs.db           # results/agent.json
    python -m benchmarks.agent --faults 2 --cache /tmp/runs.db --out -    # shown and not kept

The client may only call the tools, over stdio: preflight, diagnose, read_verdict by the run that
the diagnosis named, and try_fix with the change that the first finding names. It reaches a fix
where the verdict's first finding has one that is verified. The command line diagnoses the same
script with the same limits in a store of its own. ``--steps`` makes the runs of both shorter.
Rows are written as they come, and rows that are there already are kept: a measurement goes on
behind the last of them, whose pairs are not proven again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters, stdio_client

from benchmarks.faults import planting
from benchmarks.faults.draw import Pair, drawing, drawn
from benchmarks.faults.planting import FAULTS
from benchmarks.faults.score import diagnosed
from benchmarks.faults.truth import MAIN, Runs

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "results" / "agent.json"
OFFSET = 719_401  # of this measurement's own draw
POLICY, LIMIT_S = "native", 60.0

Row = dict[str, Any]


def main() -> None:
    """Draw, ask both, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after that")
    parser.add_argument("--steps", type=int, help="optimizer steps per run at most")
    parser.add_argument("--cache", type=Path, required=True, help="file of kept plain runs")
    parser.add_argument("--out", default=str(OUT), help="a file, or - for none")
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    planting.load()
    out = None if asked.out == "-" else Path(asked.out)
    rows: list[Row] = json.loads(out.read_text())["rows"] if out and out.exists() else []
    known, after = {row["script"] for row in rows}, 0
    candidates = enumerate(drawing("tuning", FAULTS, OFFSET), 1)
    while known:
        after, pair = next(candidates)
        known.discard(pair.name)
    pairs = drawn("tuning", FAULTS, Runs(asked.cache, 1), ahead=1, offset=OFFSET, after=after)
    for _ in range(asked.faults - len(rows)):
        if time.monotonic() > until:
            break
        rows.append(_row(next(pairs).pair, asked.steps))
        last = rows[-1]
        print("alike" if last["alike"] else "OTHER", last["script"], last["cli"], last["client"])
        sys.stdout.flush()
        if out:
            out.write_text(json.dumps(_result(rows, asked.faults), indent=1) + "\n")
    print(json.dumps(_result(rows, asked.faults)["summary"], indent=1))


def _row(pair: Pair, steps: int | None) -> Row:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        for file, text in pair.source(pair.planted.faulty).items():
            (folder / file).write_text(text)
        begun = time.monotonic()
        by_cli = _reached(diagnosed(folder / MAIN, POLICY, LIMIT_S, steps))
        between = time.monotonic()
        by_client, tried, calls, progress = anyio.run(_ask, folder, steps)
        ended = time.monotonic()
    return {
        "script": pair.name,
        "cause": pair.planted.cause,
        "steps": steps,
        "cli": by_cli,
        "client": by_client,
        "alike": by_cli == by_client,
        "tried": tried,
        "calls": calls,
        "progress": progress,
        "cli_s": round(between - begun, 1),
        "client_s": round(ended - between, 1),
    }


async def _ask(folder: Path, steps: int | None) -> tuple[Row, Row | None, list[str], int]:
    """What the tools lead to, what try_fix said of the fix (None where no change is named), which
    tools were called, and how many notifications of progress came."""
    command = ["-P", "-m", "ampscope.cli.main", "mcp", "--scripts", str(folder)]
    command += ["--store", str(folder / "agent.db")]
    heard: list[float] = []
    calls: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)

    async with Client(
        stdio_client(StdioServerParameters(command=sys.executable, args=command))
    ) as client:

        async def call(tool: str, **arguments: Any) -> Row:
            calls.append(tool)
            result = await client.call_tool(tool, arguments, progress_callback=hear)
            if result.is_error or result.structured_content is None:
                return {"error": " ".join(getattr(part, "text", "") for part in result.content)}
            return result.structured_content

        await call("preflight", paths=[MAIN])
        limits = {"policy": POLICY, "time_limit_s": LIMIT_S, "steps": steps}
        tried = None
        found = await call("diagnose", script=MAIN, **limits)
        if "error" not in found:
            found = await call("read_verdict", run_id=found["run"])
        if "error" not in found and (control := _reached(found)["control"]):
            told = await call("try_fix", run_id=found["run"], control=control)
            tried = {"control": control, "cured": told.get("cured"), "error": told.get("error")}
    if "error" in found:
        return {"verdict": "failed", "reason": found["error"]}, tried, calls, len(heard)
    return _reached(found), tried, calls, len(heard)


def _reached(found: Row) -> Row:
    """Of a diagnosis' document or a verdict of the tools: they have these fields in common."""
    first = found["findings"][0] if found["findings"] else None
    fix = first["fix"] if first else {}
    return {
        "verdict": found["verdict"],
        "cause": first["cause"] if first else None,
        "verified": fix.get("verified"),
        "control": fix.get("control"),
        "patched": bool(fix.get("patch")),
    }


def _result(rows: list[Row], wanted: int) -> Row:
    reached = [row for row in rows if row["cli"]["verified"]]
    tried = [row for row in rows if row.get("tried")]
    return {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "drawn": {"set": "tuning", "offset": OFFSET, "policy": POLICY, "limit_s": LIMIT_S},
        "summary": {
            "faults asked for": wanted,
            "faults measured": len(rows),
            "command line reaches a verified fix": len(reached),
            "client reaches one there": sum(bool(r["client"].get("verified")) for r in reached),
            "client reaches one": sum(bool(r["client"].get("verified")) for r in rows),
            "same verdict, cause, fix and proof": sum(row["alike"] for row in rows),
            "fixes given to try_fix": len(tried),
            "try_fix says of them what the verdict says": sum(
                row["tried"]["cured"] == row["client"]["verified"] for row in tried
            ),
        },
        "rows": rows,
    }


if __name__ == "__main__":
    main()
