"""The parts of measure.py in their order, each a process with a limit of its own.

    python benchmarks/gpu/run.py first                    # see README.md beside this file
    python benchmarks/gpu/run.py again price --limit 30   # seconds a part, instead of its own

This process is the one that orphans are handed to (PR_SET_CHILD_SUBREAPER of Linux), so that it
finds what a part leaves, in whatever session it is, and ends it: what goes on with the GPU would
be in the next part's figures. It imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
MEASURE = Path(__file__).with_name("measure.py")
RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SCHEMA = 1
CLOCKS_S = {"first": 475.0, "again": 240.0}
DRY_FACTOR = 8  # two cores of a machine that does other things, too
LARGEST = 1_000_000  # bytes of a file
LOGGED = 20_000  # characters of each part's output
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Place:
    """How long a part may take, and the file that keeps it."""

    seconds: float
    file: str


# The first nine, in this order, are those of `first`.
PARTS = {
    "look": Place(45, "summary.json"),
    "tests": Place(45, "tests.json"),
    "diagnose": Place(55, "tests.json"),
    "rehearsed": Place(50, "rehearsed.json"),
    "price": Place(60, "price.json"),
    "overhead": Place(90, "overhead.json"),
    "ceilings": Place(45, "hardware.json"),
    "compare": Place(60, "hardware.json"),
    "cores": Place(25, "hardware.json"),
    "kernel": Place(25, "hardware.json"),
    "graphs": Place(40, "price.json"),
    "compiled-overhead": Place(60, "overhead.json"),
    "more-cores": Place(45, "hardware.json"),
    "zoo": Place(20, "tests.json"),
    "batch": Place(120, "hardware.json"),
    "compiled": Place(200, "tests.json"),
}
FIRST = tuple(PARTS)[:9]
# Work for the CPUs alone, beside the parts that time nothing.
HOST = {"host-tests": "tests.json", "host-rehearsals": "rehearsed.json"}
BESIDE_HOST_WORK = ("look", "tests", "diagnose", "rehearsed")

Document = dict[str, Any]


class Conductor:
    """Starts parts, ends their trees, keeps what they found."""

    def __init__(self, command: str, out: Path, dry: bool, limit: float | None) -> None:
        self._began = time.monotonic()
        self._dry, self._out, self._limit = dry, out, limit
        self._clock_s = CLOCKS_S[command] * (DRY_FACTOR if dry else 1)
        self._work = Path(tempfile.mkdtemp(prefix="ag-"))  # short: sockets lie below it
        self._host: dict[str, subprocess.Popen[bytes]] = {}
        self._log = ""
        self.summary: Document = {
            "schema": SCHEMA, "command": command, "dry": dry, "began": _now(),
            "limit_s": self._clock_s, "elapsed_s": 0.0, "card": {}, "parts": {}, "look": {},
        }  # fmt: skip
        before = _read(out / "summary.json")
        if command == "again":
            self.summary["look"] = before.get("look", {})
            self.summary["card"] = before.get("card", {})
            self.summary["parts"] = before.get("parts", {})
        out.mkdir(parents=True, exist_ok=True)

    def run(self, names: tuple[str, ...]) -> bool:
        """All parts in order; whether each of them worked."""
        try:
            if "rehearsed" in names:
                self._start_host("host-rehearsals")
            if "host-tests" in names or self.summary["command"] == "first":
                self._start_host("host-tests")
            for name in names:
                if name not in BESIDE_HOST_WORK:
                    self._end_host(waits=name in HOST)
                if name in PARTS:
                    self._part(name)
        finally:
            for part in self.summary["parts"].values():
                if part["status"] == "running":  # this process is being ended
                    part["status"] = "ended"
            self._end_host()
            end_trees(set())
            self._save()
            shutil.rmtree(self._work, ignore_errors=True)
        return all(self.summary["parts"][name]["status"] == "ok" for name in names)

    def _left_s(self) -> float:
        return self._clock_s - (time.monotonic() - self._began)

    def _part(self, name: str) -> None:
        limit_s = self._limit or PARTS[name].seconds * (DRY_FACTOR if self._dry else 1)
        state: Document = {"status": "running", "exit": None, "seconds": 0.0, "limit_s": limit_s,
                           "file": PARTS[name].file, "began": _now(), "failed": [],
                           "not_believable": []}  # fmt: skip
        self.summary["parts"][name] = state
        if self._left_s() < limit_s / 2:
            state["status"] = "no time left"
            self._save()
            print(f"== {name}: no time left", flush=True)
            return
        limit_s = min(limit_s, self._left_s())
        self._save()
        started = time.monotonic()
        process = self._started(name, limit_s)
        try:
            state["exit"] = process.wait(limit_s)
            state["status"] = "failed" if state["exit"] else "ok"
        except subprocess.TimeoutExpired:
            state["status"] = "time over"
        end_trees(self._host_processes())
        process.wait()
        state["seconds"] = round(time.monotonic() - started, 1)
        self._keep(name, PARTS[name].file, state)

    def _started(self, name: str, limit_s: float) -> subprocess.Popen[bytes]:
        """A part has a temporary folder of its own: locks of devices lie there, too."""
        own = self._work / name
        own.mkdir()
        path = os.pathsep.join([str(ROOT / "core"), os.environ.get("PYTHONPATH", "")])
        environment = {
            "TRITON_CACHE_DIR": str(self._work / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._work / "inductor"),
            "OMP_WAIT_POLICY": "PASSIVE",  # parts and host work share the cores
            **os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(own), "AMPSCOPE_STORE": str(own / "runs.db"),
        }  # fmt: skip
        if name in HOST:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, str(MEASURE), name, "--seconds", str(limit_s),
                   "--out", str(self._document(name)), "--shared", str(self._work)]  # fmt: skip
        with (own / "log").open("wb") as log:
            return subprocess.Popen(
                command + ["--dry"] * self._dry, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def _start_host(self, name: str) -> None:
        limit_s = sum(PARTS[part].seconds for part in BESIDE_HOST_WORK)
        self._host[name] = self._started(name, limit_s * (DRY_FACTOR if self._dry else 1))

    def _host_processes(self) -> set[int]:
        """Of the host's work, with what it has started and left to this process: that has its
        temporary folder."""
        found = {host.pid for host in self._host.values()}
        folders = tuple(str(self._work / name) for name in self._host)
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if folders and child.environ().get("TMPDIR", "").startswith(folders):
                    found.add(child.pid)
        return found

    def _end_host(self, *, waits: bool = False) -> None:
        """In a dry run it may take its time, too: nothing is timed there."""
        for name, process in self._host.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, self._left_s()) if waits or self._dry else 0)
            status = {None: "time over", 0: "ok"}.get(process.poll(), "failed")
            self.summary["parts"][name] = {
                "status": status,
                "exit": process.poll(),
                "file": HOST[name],
                "failed": [],
                "not_believable": [],
            }
        ended, self._host = list(self._host), {}
        if ended:
            end_trees(set())
        for name in ended:
            self._keep(name, HOST[name], self.summary["parts"][name])

    def _document(self, name: str) -> Path:
        return self._work / f"{name}.json"

    def _keep(self, name: str, file: str, state: Document) -> None:
        """What a part wrote goes into its file, and its last lines into the log."""
        found = _read(self._document(name))
        entries = found.get("entries", {})
        state["failed"] = [key for key, entry in entries.items() if entry.get("status")]
        state["not_believable"] = [
            key for key, figure in found.get("figures", {}).items() if not figure["believable"]
        ]
        if state["status"] == "ok" and not entries:
            state["status"] = "failed"
        self.summary["card"] = found.pop("card", {}) or self.summary["card"]
        if name == "look":
            self.summary["look"] = found
        elif found:
            path = self._out / file
            kept = _read(path).get("parts", {})
            _write(path, {"schema": SCHEMA, "parts": {**kept, name: found}})
        log = self._work / name / "log"
        text = log.read_text(errors="replace") if log.exists() else ""
        headline = f"== {name}: {state['status']} in {state.get('seconds', '')} s"
        self._log += f"{headline}\n{text[-LOGGED:]}\n"
        print(f"{headline}\n{text[-800:]}", flush=True)
        self._save()

    def _save(self) -> None:
        self.summary["elapsed_s"] = round(time.monotonic() - self._began, 1)
        _write(self._out / "summary.json", self.summary)
        (self._out / "log.txt").write_text(self._log)


def become_subreaper() -> None:
    """From here on orphaned descendants become children of this process. Only Linux has it."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_trees(spared: set[int], within_s: float = 10.0) -> list[int]:
    """Kill all descendants of this process except the trees of ``spared`` children; returns what
    is left. A child that is killed hands its own children over, so this looks again until there
    are none."""
    deadline = time.monotonic() + within_s
    while True:
        found = list(_descendants(spared))
        if not found or time.monotonic() > deadline:
            return [process.pid for process in found]
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _descendants(spared: set[int]) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        if child.pid not in spared:
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from child.children(recursive=True)
            yield child


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _read(path: Path) -> Document:
    try:
        found: Document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, document: Document) -> None:
    """Whole or not at all, and never larger than a file may be: the largest details go first."""
    while len(text := json.dumps(document, indent=1, default=str) + "\n") > LARGEST:
        details = [
            (len(json.dumps(entry, default=str)), key, entries)
            for part in (*document["parts"].values(), document.get("look", {}))
            for entries in [part.get("entries", {})]
            for key, entry in entries.items()
            if "left_out" not in entry
        ]
        if not details:
            break
        size, key, entries = max(details, key=lambda detail: detail[0])
        entries[key] = {"status": entries[key].get("status", 0), "left_out": f"{size} bytes"}
    whole = path.with_suffix(".whole")
    whole.write_text(text)
    whole.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", nargs="?", choices=tuple(CLOCKS_S))
    parser.add_argument("names", nargs="*", help="of again: the parts")
    parser.add_argument("--dry", action="store_true", help="without a GPU: that each part works")
    parser.add_argument("--limit", type=float, help="seconds a part, instead of its own")
    asked = parser.parse_intermixed_args()
    if asked.command is None:
        for name, place in PARTS.items():
            print(f"{name:18} {place.seconds:4.0f} s  {'first' if name in FIRST else ''}".rstrip())
        return 0
    unknown = [name for name in asked.names if name not in PARTS and name != "host-tests"]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; the parts are {', '.join(PARTS)}")
    if (asked.command == "again") != bool(asked.names):
        parser.error("again takes the names of parts, first takes none")
    out = Path(os.environ.get("OUT") or (tempfile.mkdtemp() if asked.dry else RESULTS))
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    become_subreaper()
    conductor = Conductor(asked.command, out.absolute(), asked.dry, asked.limit)
    worked = conductor.run(tuple(asked.names) or FIRST)
    for name, part in conductor.summary["parts"].items():
        print(f"{name:18} {part['status']:12} {part.get('seconds', ''):>6} {part['failed'] or ''}")
    print(f"{conductor.summary['elapsed_s']} s; {out}")
    return not worked


if __name__ == "__main__":
    sys.exit(main())
