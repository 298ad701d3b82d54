"""The section of docs/accuracy.md on the zoo, printed from the kept scores.

python benchmarks/print_accuracy.py
python benchmarks/print_accuracy.py --write  # puts it into docs/accuracy.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"
BEGIN, END = "<!-- zoo -->", "<!-- /zoo -->"
TOOLS = {
    "detect_anomaly": "torch's detect_anomaly",
    "DebugUnderflowOverflow": "transformers' DebugUnderflowOverflow",
}
COLUMNS = ("case", "expected", "found first", "module", "fix", "verified", "s", *TOOLS)


def section() -> str:
    """Everything between the two marks."""
    zoo = json.loads((RESULTS / "zoo.json").read_text())
    peers = json.loads((RESULTS / "zoo_peers.json").read_text())
    said = {(s["script"], s["tool"]): s for s in peers["said"]}
    rows = [_row(score, said) for score in zoo["scores"] if score["case"]]
    lines = [
        "`ampscope zoo` diagnoses 35 failures rebuilt from public issues, their healthy twins and",
        f"further healthy scripts ({zoo['machine'].partition(' · runs')[0]}; native autocast):",
        "",
        *(f"- {line}" for line in zoo["summary"]),
        "",
        "What other tools say of the same scripts",
        "([zoo_peers.json](../benchmarks/results/zoo_peers.json)). Each names a place where NaN or",
        "Inf appeared, and no cause:",
        "",
        *(_peer(name, found) for name, found in peers["summary"].items()),
        "",
        "<details><summary>Case by case</summary>",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|---" * len(COLUMNS) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def replaced(text: str) -> str:
    """The page with the section as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section()}\n{END}{rest.partition(END)[2]}"


def _row(score: dict[str, Any], said: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    module = {None: "", True: "right", False: f"{score['module_found']}"}[score["module_right"]]
    verified = {None: "", True: "yes", False: "no"}[score["verified"]]
    facts = [score["case"], score["expected"], score["found"], module, score["fix_kind"], verified]
    tools = [_said(said[score["script"], tool]) for tool in TOOLS]
    return [*facts, f"{score['elapsed_s']:.0f}", *tools]


def _said(said: dict[str, Any]) -> str:
    if said["how"] == "silent":
        return "silent"
    if said["how"] != "reported":
        return said["how"]
    if said["tool"] == "detect_anomaly":
        return str(said["said"]).split("'")[1]
    return f"module `{said['module'] or '(model)'}`"


def _peer(name: str, found: dict[str, int]) -> str:
    failed = found["of these, ended by an error of the tool"]
    more = f" and ended {failed} more by an error of its own" if failed else ""
    pointed = ""
    if found["of these, pointed at it"]:
        pointed = (
            f", at the module to blame in {found['of these, pointed at it']} of "
            f"{found['failing scripts with a module to blame']}"
        )
    return (
        f"- {TOOLS[name]}: reports something in {found['of these, said something']} of "
        f"{found['failing scripts']} failing ones{pointed}; stops {found['of these, stopped']} of "
        f"{found['healthy scripts']} healthy ones{more}"
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(replaced(PAGE.read_text()))
    else:
        print(section())
