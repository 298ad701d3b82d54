"""Diagnose public training repositories as they are, and keep what was said.

    python benchmarks/repositories/run.py --mirror DIR               # all recipes
    python benchmarks/repositories/run.py --mirror DIR nanogpt unet  # some
    python benchmarks/repositories/run.py nanogpt --only healthy --policy cuda
    python benchmarks/repositories/run.py --table  # docs/trials.md from the results
    python benchmarks/repositories/run.py --mirror DIR --recipes benchmarks/compiled/recipes \
        --policy auto --out benchmarks/results/repositories_compiled.json

``--mirror`` names a folder with a clone of each repository, bare or not, as ``OWNER+NAME``,
``OWNER+NAME/repo`` or ``NAME``; without it, each is cloned from GitHub. ``--packages`` names a
folder of installed packages that the repositories need (README.md says which).

Of each repository: its plain run and its recorded run must give the same weights after every step;
then it is diagnosed healthy, and with each of its two faults; all with ``--policy cuda`` and
without. Rows are written as they come; the rows of others stay.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import made_up

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "repositories.json"
PAGE = ROOT / "docs" / "trials.md"
BEGIN, END = "<!-- repositories -->", "<!-- /repositories -->"
POLICIES = ("cuda", "auto")
TIME_LIMIT_S = 1200  # of one run of a diagnosis
LIMIT_S = 7200

Recipe = dict[str, Any]
Row = dict[str, Any]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="recipes; all when none is named")
    parser.add_argument("--mirror", type=Path, help="folder with a clone of each repository")
    parser.add_argument("--packages", type=Path, help="folder with what the repositories import")
    parser.add_argument("--policy", choices=POLICIES, action="append", help="both without it")
    parser.add_argument("--only", nargs="*", help="cases: plain, healthy, or names of faults")
    parser.add_argument("--recipes", type=Path, default=HERE / "recipes", help="folder of recipes")
    parser.add_argument("--work", type=Path, help="a folder to work in, kept afterwards")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the rows are kept")
    parser.add_argument("--table", action="store_true", help="write docs/trials.md, run nothing")
    asked = parser.parse_args()
    if asked.table:
        PAGE.write_text(replaced(PAGE.read_text(), kept(asked.out)))
        return
    known = recipes(asked.recipes)
    if unknown := set(asked.names) - set(known):
        parser.error(f"no such recipe: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as temporary:
        for name in asked.names or known:
            place = (asked.work or Path(temporary)) / name
            shutil.rmtree(place, ignore_errors=True)
            Measured(name, known[name], asked, place).all()


def kept(results: Path) -> dict[str, Any]:
    """The document of earlier runs."""
    if not results.exists():
        return {"machine": "", "rows": []}
    document: dict[str, Any] = json.loads(results.read_text())
    return document


def keep(row: Row, results: Path) -> None:
    """Put a row in the place of the one with the same names."""
    document = kept(results)
    key = ("recipe", "policy", "case")
    rows = {tuple(r[k] for k in key): r for r in document["rows"]}
    rows[tuple(row[k] for k in key)] = row
    document["machine"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"
    )
    document["rows"] = [rows[k] for k in sorted(rows)]
    results.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(row), flush=True)


def fetch(recipe: Recipe, mirror: Path | None, to: Path) -> None:
    """The tree of the recipe's commit, without its history."""
    owner, name = recipe["repository"].split("/")
    places = [f"{owner}+{name}/repo", f"{owner}+{name}", f"{name}.git", name]
    found = next((mirror / p for p in places if (mirror / p).exists()), None) if mirror else None
    if found is None:
        found = to.with_name("clone")
        url = f"https://github.com/{recipe['repository']}"
        subprocess.run(["git", "clone", "-q", "--bare", url, str(found)], check=True)
    git = found / ".git" if (found / ".git").exists() else found
    command = ["git", "--git-dir", str(git), "archive", recipe["commit"], *recipe.get("paths", [])]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # Python before 3.11.4 has no filters; there the attribute does nothing.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(to)


def processor_s() -> float:
    """Processor time of all processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def edit(folder: Path, change: dict[str, Any]) -> None:
    """One line of a file, or several: left out, or with some of its words replaced."""
    path = folder / change["file"]
    lines = path.read_text().split("\n")
    for number in change.get("lines", [change.get("line")]):
        before = lines[number - 1]
        if change.get("drop"):
            after = before[: len(before) - len(before.lstrip())] + "pass"
        else:
            after = re.sub(change["words"], change["by"], before)
        if after == before:
            raise SystemExit(f"{path}:{number} has no {change.get('words')!r}: {before}")
        lines[number - 1] = after
    path.write_text("\n".join(lines))


def contents(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Of every file its size, when it was written, and a hash of its content."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        state = path.stat()
        found[str(path.relative_to(folder))] = (state.st_size, state.st_mtime_ns, digest)
    return found


class Measured:
    """One repository: fetched and prepared once, copied for each run."""

    def __init__(self, name: str, recipe: Recipe, asked: argparse.Namespace, place: Path) -> None:
        self.name, self.recipe, self.asked, self.place = name, recipe, asked, place
        self.plain_s: float | None = None  # of the plain run in the same call
        self.folder = recipe.get("folder", ".")
        path = [str(HERE / "probe"), *([str(asked.packages.resolve())] if asked.packages else [])]
        self.environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
            **recipe.get("environment", {}),
        }  # fmt: skip
        self.time_limit_s = recipe.get("time_limit_s", TIME_LIMIT_S)
        self.runs = 0

    def all(self) -> None:
        """All that was asked for."""
        source = self.place / "source"
        source.mkdir(parents=True)
        fetch(self.recipe, self.asked.mirror, source)
        for change in self.recipe.get("changes", []):
            edit(source / self.folder, change)
        for data in self.recipe.get("data", []):
            to = source / self.folder / data.get("to", ".")
            to.mkdir(parents=True, exist_ok=True)
            made_up.KINDS[data["kind"]](to, **data.get("with", {}))
        for path, content in self.recipe.get("files", {}).items():
            to = source / self.folder / path
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_text(content)
        only = self.asked.only
        for policy in self.asked.policy or POLICIES:
            if not only or "plain" in only:
                self.compared(policy)
            if not only or "healthy" in only:
                self.diagnosed(policy, {"name": "healthy"})
            for fault in self.recipe["faults"]:
                if not only or fault["name"] in only:
                    self.diagnosed(policy, fault)

    def copy(self) -> Path:
        """A fresh working folder."""
        self.runs += 1
        place = self.place / f"run{self.runs}"
        shutil.copytree(self.place / "source", place, symlinks=True)
        return place

    def command(self, fault: dict[str, Any] | None = None) -> list[str]:
        """The user's own command line, without Python."""
        extra = (fault or {}).get("arguments", [])
        return [*self.recipe.get("launcher", []), *self.recipe["command"], *extra]

    def said(self, command: list[str], place: Path, **more: str) -> tuple[int, str, float, float]:
        """Run it: exit status, what it printed, seconds, seconds of the processor."""
        started, used = time.monotonic(), processor_s()
        folder = place / self.folder
        path = [str((folder / p).resolve()) for p in self.recipe.get("pythonpath", [])]
        more["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")  # all is compiled in this run
        more["PYTHONPATH"] = os.pathsep.join([*path, self.environment["PYTHONPATH"]])
        ended = subprocess.run(
            command, cwd=folder, env={**self.environment, **more}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, errors="replace",
        )  # fmt: skip
        seconds, used = time.monotonic() - started, processor_s() - used
        return ended.returncode, ended.stdout, round(seconds, 1), round(used, 1)

    def traced(self, command: list[str]) -> dict[str, Any]:
        """Weights after every step, by rank, and what the recipe compares of the output."""
        place = self.copy()
        for change in self.recipe.get("healthy", []):
            edit(place / self.folder, change)
        status, output, seconds, used = self.said(
            command, place, WEIGHTS_TRACE=str(place / "weights")
        )
        weights = {p.name: p.read_text().split("\n")[:-1] for p in place.glob("weights.*")}
        shutil.rmtree(place)
        said = sorted(re.findall(self.recipe.get("compare", "$^"), output))  # ranks print at will
        end = " ".join(output.strip().splitlines()[-1:])[-300:] if status else ""
        ran = {"status": status, "s": seconds, "processor_s": used, "end": end}
        return {**ran, "weights": weights, "said": said}

    def compared(self, policy: str) -> None:
        """The plain run against the recorded one."""
        how = "rehearsal" if policy == "cuda" else "native"
        launcher = self.recipe.get("launcher", [])
        by_torchrun = launcher[:1] == ["torchrun"]
        alone = [str(HERE / "alone.py"), how, *self.recipe["command"]]
        if by_torchrun:
            launch = [sys.executable, "-m", "torch.distributed.run", *launcher[1:]]
        else:
            launch = [sys.executable]
        plain = self.traced([*launch, *alone])
        own = "cuda" if policy == "cuda" else "native"
        tool = [sys.executable, "-m", "ampscope.cli.main", "run", "--policy", own]
        limits = ["--store", str(self.place / "run.db"), "--steps", "100000"]
        limits += ["--time-limit", str(self.time_limit_s)]
        recorded = self.traced([*tool, *limits, *self.command()])
        steps = sum(len(lines) for lines in plain["weights"].values())
        self.plain_s = plain["s"] if steps else None
        keep(
            {
                "recipe": self.name, "policy": policy, "case": "plain",
                "seconds": plain["s"], "recorded_seconds": recorded["s"], "steps": steps,
                "processor_s": plain["processor_s"],
                "recorded_processor_s": recorded["processor_s"],
                "exit_status": plain["status"], "ended": plain["end"],
                "recorded_ended": recorded["end"],
                "same_weights": plain["weights"] == recorded["weights"] if steps else None,
                "compared_lines": len(plain["said"]),
                "same_output": plain["said"] == recorded["said"],
            },
            self.asked.out,
        )  # fmt: skip

    def diagnosed(self, policy: str, fault: dict[str, Any]) -> None:
        """What ``ampscope diagnose`` says."""
        place = self.copy()
        for change in fault.get("edits", self.recipe.get("healthy", [])):
            edit(place / self.folder, change)
        out = self.place / "verdict.json"
        out.unlink(missing_ok=True)
        tool = [sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet"]
        limits = ["--store", str(self.place / "diagnose.db")]
        limits += ["--time-limit", str(self.time_limit_s)]
        policies = ["--policy", "cuda"] if policy == "cuda" else []
        command = [*tool, *policies, *limits, "--json", str(out), *self.command(fault)]
        before = contents(place)
        status, output, seconds, used = self.said(command, place)
        after = contents(place)
        found = json.loads(out.read_text()) if out.exists() else {"verdict": "none", "findings": []}
        first = found["findings"][0] if found["findings"] else None
        fix = first["fix"] if first else {}
        row: Row = {
            "recipe": self.name, "policy": policy, "case": fault["name"],
            "exit_status": status, "verdict": found["verdict"], "reason": found.get("reason", ""),
            "causes": [f["cause"] for f in found["findings"]],
            "latent": [f["cause"] for f in found.get("latent", [])],
            "module": first["module"] if first else "", "line": first["line"] if first else None,
            "said": first["explanation"] if first else "",
            "fix": fix.get("control"), "verified": fix.get("verified"),
            "precision": (found.get("precision") or {}).get("headline", ""),
            "rules": found.get("rules"), "notes": found.get("notes", []),
            "steps": (found.get("scope") or {}).get("steps"),
            "runs": len(found.get("runs", {})), "seconds": seconds, "plain_s": self.plain_s,
            "processor_s": used,
            "changed_files": [name for name in before if before[name] != after.get(name)],
        }  # fmt: skip
        if row["verdict"] == "none":
            row["reason"] = output.strip()[-400:]
        keep(row, self.asked.out)
        shutil.rmtree(place)


# The table of docs/trials.md: what was said, judged by the recipes.


def recipes(folder: Path = HERE / "recipes") -> dict[str, Recipe]:
    """All recipes by name."""
    paths = sorted(folder.glob("*.toml"))
    return {path.stem: tomllib.loads(path.read_text()) for path in paths}


def is_right(row: Row, fault: dict[str, Any]) -> tuple[bool, bool]:
    """Whether the first cause is the fault's; and its module or line, where one is named."""
    cause = row["causes"][:1] != [] and row["causes"][0] in fault["causes"]
    places = fault.get("places", [])
    return cause, cause and (not places or bool({row["module"], row["line"]} & set(places)))


def section(document: dict[str, Any]) -> str:
    """Everything between the two marks."""
    rows = {(r["recipe"], r["policy"], r["case"]): r for r in document["rows"]}
    known, lines, counts = recipes(), [], [0] * 6
    for (recipe, policy, case), row in rows.items():
        if case == "plain":
            continue
        plain = rows.get((recipe, policy, "plain")) or {}
        faults = {f["name"]: f for f in known[recipe]["faults"]}
        right = is_right(row, faults[case]) if case in faults else (False, False)
        healthy = case == "healthy"
        fine = row["verdict"] == "no_fault" and plain.get("same_weights")
        for n, counted in enumerate(
            (healthy, healthy and fine, not healthy, *right, row["verified"] is True)
        ):
            counts[n] += bool(counted)
        cells = _cells(row, plain, faults.get(case, {}), right)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(
        [
            f"Healthy: no alarm and the same weights in {counts[1]} of {counts[0]}. Faults: cause "
            f"first in {counts[3]} of {counts[2]}, its module or line right in {counts[4]}; a fix "
            f"that was run cured in {counts[5]}. {_changed(document, known)}",
            "",
            "| repository | rules | case | verdict | module, line | fix | s | of a plain run |",
            "|---|---|---|---|---|---|---|---|",
            *lines,
        ]
    )


def _changed(document: dict[str, Any], known: dict[str, Recipe]) -> str:
    """Lines that recipes change for this machine, and files that diagnoses changed."""
    needed = [
        sum(len(change.get("lines", [0])) for change in known[name].get("changes", []))
        for name in {row["recipe"] for row in document["rows"]}
    ]
    hashed = [row["changed_files"] for row in document["rows"] if "changed_files" in row]
    return (
        f"{sum(map(bool, needed))} of {len(needed)} repositories needed changes to run here, "
        f"{sum(needed)} lines in all. Files hashed before and after {len(hashed)} diagnoses: "
        f"{sum(map(len, hashed))} of them changed."
    )


def _cells(row: Row, plain: Row, fault: dict[str, Any], right: tuple[bool, bool]) -> list[str]:
    verdict = ", ".join(row["causes"][:1]) or row["verdict"]
    place = ", ".join(filter(None, (row["module"], row["line"])))
    if not fault:
        same = {True: "weights as without", False: "weights differ", None: "no step"}
        place = same[plain.get("same_weights")]
    elif not right[0]:
        verdict += f" (expected {' or '.join(fault['causes'])})"
    elif not right[1]:
        place += f" (expected {' or '.join(fault['places'])})"
    gone = "pattern gone" if row["fix"] else ""  # and no effect that could be measured
    verified = {True: "verified", False: "not verified", None: gone}[row["verified"]]
    seconds = row.get("plain_s") or (plain.get("seconds") if plain.get("steps") else None)
    return [
        row["recipe"], "CUDA" if row["policy"] == "cuda" else "own", row["case"], verdict, place,
        " ".join(filter(None, (_short(row["fix"]), verified))), f"{row['seconds']:.0f}",
        f"{row['seconds'] / seconds:.1f}" if seconds else "",
    ]  # fmt: skip


def _short(fix: str | None) -> str:
    """A control, without the names of many modules."""
    name, _, values = (fix or "").partition(":")
    count = values.count(",") + 1
    return f"{name} ({count} modules)" if count > 2 else fix or ""


def replaced(text: str, document: dict[str, Any]) -> str:
    """The page with the section as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{section(document)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    main()
