"""What other debugging tools say about the scripts of the fault zoo, as JSON.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/zoo_peers.py --peers DIR     # results/zoo_peers.json

Each script runs by itself under each tool, switched on as its documentation says and stopped at the
first thing that the tool reports: torch's `detect_anomaly` (a NaN that a backward function returns)
and transformers' `DebugUnderflowOverflow` (NaN or Inf in inputs, outputs or weights of a module).
The child knows NeuralDBG as well, which faults_peers.py asks.
`--peers DIR` adds a folder to look for transformers (pip install --target DIR transformers).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from contest import setting

from ampscope.zoo.answers import ANSWERS, HEALTHY, script_path

RESULTS = Path(__file__).parent / "results" / "zoo_peers.json"
LIMIT_S = 120.0
TOOLS = ("detect_anomaly", "DebugUnderflowOverflow")
_FUNCTION = re.compile(r"Function '(\w+)' returned nan values")
_HYPOTHESIS = re.compile(r"^NeuralDBG: (.* detected at (\S+) \(step \d+\))$", re.MULTILINE)
_FRAME = re.compile(r"^ {18}(\S*) (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Said:
    """What one tool said about one script; ``said`` is "" when it stayed silent."""

    script: str
    case: str  # "" for a healthy script
    tool: str
    said: str
    module: str | None  # the module that it points at
    module_expected: tuple[str, ...]  # any of them is right; none where no module is to blame
    how: str  # "reported", "silent", "the script failed", "time limit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--peers", type=Path, help="folder with transformers")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    found = [
        ask(tool, script_path(script), case, (module,) if module else (), policy, asked.peers)
        for script, case, module, policy in _scripts()
        for tool in TOOLS
    ]
    document = {
        "setting": setting(),
        "summary": summary(found, TOOLS),
        "said": [asdict(s) for s in found],
    }
    asked.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))


def summary(found: Sequence[Said], tools: Sequence[str]) -> dict[str, dict[str, int]]:
    """For each tool: how many failing scripts it stops at, how often at the module to blame; and
    how many healthy ones it stops."""
    lines = {}
    for tool in tools:
        own = [said for said in found if said.tool == tool]
        failing, healthy = [s for s in own if s.case], [s for s in own if not s.case]
        with_module = [s for s in failing if s.module_expected]
        lines[tool] = {
            "failing scripts": len(failing),
            "of these, said something": sum(s.how == "reported" for s in failing),
            "failing scripts with a module to blame": len(with_module),
            "of these, pointed at it": sum(s.module in s.module_expected for s in with_module),
            "healthy scripts": len(healthy),
            "of these, stopped": sum(s.how == "reported" for s in healthy),
            "of these, ended by an error of the tool": sum(
                s.how == "the script failed" for s in healthy
            ),
        }
    return lines


def _scripts() -> list[tuple[str, str, str | None, str]]:
    """(file, case, module to blame, policy) of every script of the zoo."""
    rows: list[tuple[str, str, str | None, str]] = []
    for answer in ANSWERS:
        fails = answer.cause != "no_fault"
        rows.append((answer.script, answer.id if fails else "", answer.module, answer.policy))
        if answer.twin is not None:
            rows.append((answer.twin, "", None, answer.policy))
    return rows + [(name, "", None, "any") for name in HEALTHY]


def ask(
    tool: str, script: Path, case: str, modules: tuple[str, ...], policy: str, peers: Path | None
) -> Said:
    """Run one script under one tool."""
    command = [sys.executable, str(Path(__file__).with_name("zoo_peers_child.py"))]
    command += [tool, str(script), policy, str(peers.absolute() if peers else "")]
    name = script.name
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return Said(name, case, tool, "", None, modules, "time limit")
    text = done.stdout + done.stderr
    said, place = _read(tool, text)
    how = "reported" if said else "silent" if done.returncode == 0 else "the script failed"
    print(f"{name:32} {tool:24} {how:18} {said}", flush=True)
    return Said(name, case, tool, said, place, modules, how)


def _read(tool: str, text: str) -> tuple[str, str | None]:
    """(what it said, the module that it named)."""
    if tool == "detect_anomaly":
        match = _FUNCTION.search(text)
        return (match[0], None) if match else ("", None)
    if tool == "NeuralDBG":
        found = _HYPOTHESIS.search(text)
        return (found[1], found[2].partition("_")[2] or None) if found else ("", None)
    if "DebugUnderflowOverflow: inf/nan detected" not in text:
        return "", None
    frames = _FRAME.findall(text)
    name, kind = frames[-1] if frames else ("", "")
    return f"inf/nan detected, last frame {name} {kind}", name


if __name__ == "__main__":
    main()
