"""Diagnose the scripts of an unseen test set and compare with its key, as JSON.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/unseen.py second --out second.json

A test set is a folder under ``unseen``, whose ``key.json`` has the cause of each script, further
causes that count as right, and the module to blame (its README lists the fields). The scripts,
written without knowledge of the rules, lie in one archive and are unpacked for the run. The kept
results (results/unseen_*.json) are those of the first run, before any rule was changed because of a
script.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from ampscope.launcher.plan import run_diagnosis
from ampscope.pythons import framework_of
from ampscope.records import RunSpec
from ampscope.render.contract import document

FOLDER = Path(__file__).parent / "unseen"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("test_set", choices=sorted(p.name for p in FOLDER.iterdir() if p.is_dir()))
    parser.add_argument("scripts", nargs="*", help="some of them; all when none is named")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    key = _key(FOLDER / asked.test_set)
    wanted = [entry for entry in key if not asked.scripts or entry["script"] in asked.scripts]
    with tempfile.TemporaryDirectory() as place, tarfile.open(FOLDER / "scripts.tar.xz") as archive:
        archive.extractall(place, filter="data")
        folder = Path(place) / asked.test_set
        lines = [score(entry, _diagnosed(folder, entry, Path(place))) for entry in wanted]
    document_ = {"summary": summary(lines), "scripts": lines}
    if asked.out is not None:
        asked.out.write_text(json.dumps(document_, indent=1) + "\n")
    print(json.dumps(document_["summary"], indent=1))


def _key(folder: Path) -> list[dict[str, Any]]:
    """One of the sets has its key by script, and calls a healthy one so."""
    key = json.loads((folder / "key.json").read_text())
    if isinstance(key, list):
        return key
    causes = {"healthy": "no_fault"}
    return [
        {"script": script, **entry, "cause": causes.get(entry["cause"], entry["cause"])}
        for script, entry in key.items()
    ]


def score(entry: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """One script: what the key says, what the diagnosis ``found`` says."""
    causes = [finding["cause"] for finding in found["findings"]] or [found["verdict"]]
    first = found["findings"][0] if found["findings"] else {}
    module = entry.get("module")
    line = {
        "script": entry["script"],
        "expected": entry["cause"],
        "accepted": entry.get("accept", []),
        "found": causes[:3],
        "right": causes[0] == entry["cause"],
        "module_expected": module,
        "module_found": first.get("module"),
        "module_right": None if module is None else first.get("module") == module,
        "fix": first.get("fix", {}).get("kind"),
        "verified": first.get("fix", {}).get("verified"),
        "elapsed_s": found["elapsed_s"],
    }
    print(f"{'right' if line['right'] else 'WRONG':6} {entry['script']:28} {causes[0]}", flush=True)
    return line


def summary(lines: list[dict[str, Any]]) -> dict[str, str]:
    """The figures that count, each with its base."""
    healthy = [line for line in lines if line["expected"] == "no_fault"]
    failing = [line for line in lines if line["expected"] != "no_fault"]
    with_module = [line for line in failing if line["module_right"] is not None]
    tried = [line for line in failing if line["verified"] is not None]
    accepted = [x for x in failing if x["right"] or x["found"][0] in x["accepted"]]
    return {
        "root cause first": f"{sum(x['right'] for x in failing)} of {len(failing)}",
        "first or accepted": f"{len(accepted)} of {len(failing)}",
        "module right": f"{sum(x['module_right'] for x in with_module)} of {len(with_module)}",
        "fix verified, of those run": f"{sum(x['verified'] for x in tried)} of {len(tried)}",
        "healthy": f"{sum(x['found'][0] == 'no_fault' for x in healthy)} of {len(healthy)}",
    }


def _diagnosed(folder: Path, entry: dict[str, Any], place: Path) -> dict[str, Any]:
    script = folder / entry["script"]
    spec = RunSpec(
        workload=str(script),
        framework=framework_of(script),
        kind="script",
        precision="as_is",
        steps=200,
        grace_s=12.0,
        time_limit_s=120.0,
        args=tuple(entry.get("args", ())),
        group=secrets.token_hex(4),
    )
    return document(run_diagnosis(spec, place / "runs.db"))


if __name__ == "__main__":
    main()
