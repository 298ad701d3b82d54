"""What other debugging tools say about planted faults and look-alikes, as JSON.

    export OMP_WAIT_POLICY=PASSIVE
    python benchmarks/faults_peers.py --rows rows.jsonl --scripts scripts --peers DIR

``--rows`` and ``--scripts`` are what benchmarks.faults.score kept of a tuning draw (``--out`` and
``--keep``). Each script runs by itself under each tool, as in zoo_peers.py: torch's
`detect_anomaly`, transformers' `DebugUnderflowOverflow` and NeuralDBG. ``--peers DIR`` is a folder
with the last (pip install --no-deps --target DIR neuraldbg). Beside them stands what ampscope said.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contest import setting
from zoo_peers import TOOLS, Said, ask, summary

RESULTS = Path(__file__).parent / "results" / "faults_peers.json"
ALL_TOOLS = (*TOOLS, "NeuralDBG")
NO_FAULT = "no_fault"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--scripts", type=Path, required=True)
    parser.add_argument("--peers", type=Path, help="folder with neuraldbg")
    parser.add_argument("--at-most", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600.0, help="ask no more then")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    until = time.monotonic() + 60 * asked.minutes
    rows: list[dict[str, Any]] = []
    found: list[Said] = []
    for line in asked.rows.read_text().splitlines()[: asked.at_most]:
        row = json.loads(line)
        if time.monotonic() > until:
            break
        rows.append(row)
        found += [_ask(tool, row, asked.scripts, asked.peers) for tool in ALL_TOOLS]
        document = {
            "setting": setting(),
            "summary": {**summary(found, ALL_TOOLS), "ampscope": _own(rows)},
            "said": [asdict(s) for s in found],
        }
        asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))


def _ask(tool: str, row: dict[str, Any], scripts: Path, peers: Path | None) -> Said:
    script = scripts.absolute() / row["script"] / "train.py"
    case = "" if row["cause"] == NO_FAULT else row["cause"]
    modules = tuple(row["modules"]) if case else ()
    said = ask(tool, script, case, modules, row["policy"], peers)
    return Said(**{**asdict(said), "script": row["script"]})


def _own(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The same of ampscope's verdicts on these scripts."""
    failing = [r for r in rows if r["cause"] != NO_FAULT]
    healthy = [r for r in rows if r["cause"] == NO_FAULT]
    with_module = [r for r in failing if r["modules"]]
    return {
        "failing scripts": len(failing),
        "of these, said something": sum(
            not r["no_fault"] and not r["undetermined"] for r in failing
        ),
        "failing scripts with a module to blame": len(with_module),
        "of these, pointed at it": sum(
            (r["module_found"] or "") in r["modules"] for r in with_module
        ),
        "of these, named the cause": sum(r["right"] for r in failing),
        "healthy scripts": len(healthy),
        "of these, stopped": sum(r["wrong_cause"] for r in healthy),
    }


if __name__ == "__main__":
    main()
