"""The sections of docs/accuracy.md on the sealed planted faults and on the zoo, printed from the
kept scores.

python -m benchmarks.print_accuracy
python -m benchmarks.print_accuracy --write  # into docs/accuracy.md and docs/images/confusion.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.faults.counts import Counts, added, confusion_svg, rate, seconds, wilson

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "accuracy.md"
CONFUSION = ROOT / "docs" / "images" / "confusion.svg"
GOALS = {  # what a share should be, and in which direction
    "cause first": ("≥", 0.93),
    "module": ("≥", 0.92),
    "line": ("≥", 0.92),
    "wrong cause": ("≤", 0.02),
    "undetermined": ("", None),
    "no fault over damage": ("≤", 0.01),
    "false alarms": ("≤", 0.005),
    "fix cured, of those run": ("≥", 0.92),
}
EACH_CAUSE = 0.80  # right first
MEDIAN_S, WORST_S = 10, 90
TOOLS = {
    "detect_anomaly": "torch's detect_anomaly",
    "DebugUnderflowOverflow": "transformers' DebugUnderflowOverflow",
}
COLUMNS = ("case", "expected", "found first", "module", "fix", "verified", "s", *TOOLS)


def sealed() -> str:
    """The sealed set: the sum of its drawings, one table for each policy."""
    file = RESULTS / "faults_sealed.json"
    drawings = json.loads(file.read_text())["drawings"] if file.exists() else []
    if not drawings:
        return "The sealed set has not been drawn."
    lines = [
        "Each drawing takes the next part of the sealed set's sequence"
        " ([faults_sealed.json](../benchmarks/results/faults_sealed.json)); only counts are kept.",
        "",
        "| drawing | rules | policy | faults | cause first | healthy | false alarms |",
        "|---" * 7 + "|",
        *map(_drawing, drawings),
    ]
    for policy in dict.fromkeys(d["policy"] for d in drawings):
        lines += ["", *_sum(policy, added(d["counts"] for d in drawings if d["policy"] == policy))]
    lines += ["", f"![Confusion matrix]({CONFUSION.relative_to(PAGE.parent)})"]
    return "\n".join(lines)


def confusion() -> str:
    """The confusion matrix of all drawings as SVG; "" where there is none."""
    file = RESULTS / "faults_sealed.json"
    drawings = json.loads(file.read_text())["drawings"] if file.exists() else []
    return confusion_svg(added(d["counts"] for d in drawings)["confusion"]) if drawings else ""


def _drawing(drawing: dict[str, Any]) -> str:
    found = drawing["counts"]
    rules = f"{drawing['rules']}, commit {drawing['commit']}"
    first, alarms = (found["shares"][name] for name in ("cause first", "false alarms"))
    cells = [drawing["on"], rules, drawing["policy"], found["faults"], f"{first[0]} right"]
    return "| " + " | ".join(map(str, [*cells, found["healthy"], alarms[0]])) + " |"


def _sum(policy: str, found: Counts) -> list[str]:
    by_cause = found["by cause"]
    low = sorted(by_cause.items(), key=lambda item: (item[1][0] / item[1][1], item[0]))
    times = seconds(found)
    return [
        f"All drawings under {policy} autocast, {found['faults']} faults and {found['healthy']}"
        " healthy scripts (95 % intervals):",
        "",
        "| figure | goal | measured |",
        "|---|---|---|",
        *(_goal(name, *goal, *found["shares"][name]) for name, goal in GOALS.items()),
        f"| lowest cause | ≥ {EACH_CAUSE * 100:.0f} % | "
        + (f"{low[0][0]}: {low[0][1][0]} of {low[0][1][1]}" if low else "none")
        + " |",
        f"| seconds, median and worst | ≤ {MEDIAN_S}, ≤ {WORST_S} | "
        + (f"{times[0]}, {times[1]}" if times else "none")
        + " |",
        "",
        "<details><summary>By cause and by program</summary>",
        "",
        *_table("cause", low),
        "",
        *_table("program", sorted(found["by program"].items())),
        "",
        "</details>",
    ]


def _goal(name: str, sign: str, limit: float | None, hits: int, of: int) -> str:
    goal = "" if limit is None else f"{sign} {limit:.1%}".replace(".0%", "%")
    return f"| {name} | {goal} | {rate(hits, of)} |".replace("%", " %")


def _table(what: str, shares: list[tuple[str, list[int]]]) -> list[str]:
    rows = [f"| {name} | {hits} of {of} | {_interval(hits, of)} |" for name, (hits, of) in shares]
    return [f"| {what} | right first | 95 % interval |", "|---|---|---|", *rows]


def _interval(hits: int, of: int) -> str:
    low, high = wilson(hits, of)
    return f"{low:.0%} to {high:.0%}".replace("%", " %")


def planted_peers() -> str:
    """What other tools say of the scripts of a tuning draw."""
    file = RESULTS / "faults_peers.json"
    if not file.exists():
        return ""
    found = json.loads(file.read_text())["summary"]
    lines = [
        "What other tools say of scripts of the fifth draw"
        " ([faults_peers.json](../benchmarks/results/faults_peers.json)), each switched on as its",
        "documentation says and run by itself. Beside them stands ampscope's verdict of the draw.",
        "",
        "| tool | says something of a fault | at the module to blame | stops a healthy script |",
        "|---|---|---|---|",
    ]
    for name, counts in found.items():
        told, pointed, stopped = (
            f"{counts[hits]} of {counts[of]}"
            for hits, of in (
                ("of these, said something", "failing scripts"),
                ("of these, pointed at it", "failing scripts with a module to blame"),
                ("of these, stopped", "healthy scripts"),
            )
        )
        lines.append(f"| {TOOLS.get(name, name)} | {told} | {pointed} | {stopped} |")
    return "\n".join(lines)


def zoo_section() -> str:
    """`ampscope zoo`, and what other tools say of its scripts."""
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


SECTIONS = {"sealed": sealed, "peers": planted_peers, "zoo": zoo_section}


def replaced(text: str) -> str:
    """The page with its sections, each between two marks, as they are now."""
    for name, section in SECTIONS.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{section()}\n{end}{rest.partition(end)[2]}"
    return text


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
        if drawing := confusion():
            CONFUSION.write_text(drawing)
    else:
        print(*(section() for section in SECTIONS.values()), sep="\n\n")
