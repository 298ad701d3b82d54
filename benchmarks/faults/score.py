"""Diagnose drawn pairs with ``ampscope diagnose`` and count how often it is right.

    python -m benchmarks.faults.score --set tuning --faults 80 --healthy 40 --cache runs.db --out rows.jsonl
    python -m benchmarks.faults.score --set sealed --minutes 240 --jobs 2

The tuning set writes a row for each pair and keeps its scripts where ``--keep`` says. Of the sealed
set no script and no row is kept or printed: only counts (:mod:`.counts`). Each day's drawing takes
the next part of its sequence; one that was cut short goes on where it was cut, on the same day only
while the rules are the same.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ampscope.diagnosis.load import rules_version
from ampscope.files import write_whole
from benchmarks.faults import planting
from benchmarks.faults.counts import (
    NO_FAULT,
    Counts,
    Row,
    added,
    confusion_svg,
    counts,
    summary,
)
from benchmarks.faults.draw import Drawn, Pair, Proof, drawn, key_modules
from benchmarks.faults.planting import FAULTS, LOOKALIKES, MECHANISMS, ROUNDING, TWINS
from benchmarks.faults.truth import MAIN, Runs

RESULTS = Path(__file__).parent.parent / "results"
UNDETERMINED = ("undetermined", "inconclusive", "failed")


def diagnosed(script: Path, policy: str, limit_s: float, steps: int | None = None) -> Row:
    """The JSON document of ``ampscope diagnose``; a verdict "failed" where there is none."""
    store = script.parent / "runs.db"
    command = [
        sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet", "--json", "-", "--store",
        str(store), "--policy", policy, "--time-limit", str(limit_s),
        *(() if steps is None else ("--steps", str(steps))), script.name,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    try:
        done = subprocess.run(
            command, cwd=script.parent, env=environment, capture_output=True, text=True,
            timeout=10 * limit_s, check=False,
        )  # fmt: skip
        document: Row = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        document = {"verdict": "failed", "findings": [], "elapsed_s": None, "reason": str(error)}
    for file in script.parent.glob("runs.db*"):
        file.unlink()
    return document


def row_of(pair: Pair, proof: Proof, found: Row, policy: str) -> Row:
    """What the key says and what was found."""
    planted = pair.planted
    harmed = bool(proof.damage and proof.damage.is_harmed)
    healthy = planted.cause == "no_fault"
    what = planted.mechanism
    at_its_line = what.at_line if what else ()
    latent = [f for f in found.get("latent", []) if f["cause"] in (*planted.accept, *at_its_line)]
    findings = found["findings"]
    if not findings and not healthy and not harmed:  # numbers are lost, and that is what it says
        findings = latent
    causes = [f["cause"] for f in findings] or [found["verdict"]]
    first = findings[0] if findings else {}
    modules, lines = key_modules(pair, proof), planted.lines
    file, number = _file_and_line(first.get("line") or "")
    at_line = number is not None and (file, number) in [(pair.file, n) for n in lines]
    named = [c for c in planted.accept if c != ROUNDING]  # rounding elsewhere is another verdict
    site_right = at_line and causes[0] in (*named, *at_its_line, ROUNDING)
    right = causes[0] in named or (what is not None and not healthy and site_right)
    return {
        "script": pair.name,
        "program": pair.program,
        "form": pair.form,
        "kind": planted.kind,
        "params": planted.params,
        "policy": policy,
        "cause": planted.cause,
        "accept": planted.accept,
        "found": causes[:3],
        "right": right,
        "among_three": right or any(c in named for c in causes[:3]),
        "wrong_cause": bool(findings) and not right,
        "undetermined": causes[0] in UNDETERMINED,
        "no_fault": causes[0] == "no_fault",
        "modules": modules,
        "module_found": first.get("module"),
        "module_right": (first.get("module") or "") in modules
        if modules and right and not healthy
        else None,
        "lines": lines,
        "line_found": number,
        "line_right": at_line if lines and right and number and not healthy else None,
        "site_right": None if healthy else site_right,
        "site": what and what.site,
        "role": what and what.role,
        "place": what and what.place,
        "has_rule": what.has_rule if what else planted.cause != ROUNDING,
        "loud": bool(proof.damage and (proof.damage.error or proof.damage.nonfinite)),
        "healed": _is_healed(first) if site_right and not healthy else None,
        "fix": first.get("fix", {}).get("kind"),
        "verified": first.get("fix", {}).get("verified"),
        "damage": proof.damage.kinds if proof.damage else (),
        "harmed": harmed,
        "latent": [f["cause"] for f in found.get("latent", [])],
        "elapsed_s": found["elapsed_s"],
        "reason": found.get("reason", ""),
        "symptoms": found.get("symptoms", []),
        "explanation": first.get("explanation", ""),
    }


def _is_healed(finding: Row) -> bool:
    """Whether the run in which the site was lifted trained, by the fix of the finding."""
    return finding.get("fix", {}).get("verified") is True


def _file_and_line(place: str) -> tuple[str, int | None]:
    """ "model.py", 41 of "project/model.py:41"."""
    match = re.search(r"([^/\s]+):(\d+)", place)
    return (match[1], int(match[2])) if match else ("", None)


# ---- rows in the order of the draw -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """How much is drawn, and from which places of the two sequences."""

    which: str
    faults: int
    healthy: int
    offset: int = 0
    after: tuple[int, int] = (0, 0)  # faults and look-alikes that were tried before
    mechanisms: bool = False  # these and their twins instead


def pairs_of(part: Part, runs: Runs) -> Iterator[Drawn]:
    """Both kinds from the start, so that a score that is cut short has both."""
    shares = (part.faults, part.healthy)
    both = (MECHANISMS, TWINS) if part.mechanisms else (FAULTS, LOOKALIKES)
    sources = [
        islice(drawn(part.which, kinds, runs, offset=part.offset, after=after), share)
        for kinds, after, share in zip(both, part.after, shares, strict=True)
    ]
    given = [0, 0]
    while sum(given) < sum(shares):
        behind = min((0, 1), key=lambda n: given[n] / shares[n] if shares[n] else math.inf)
        given[behind] += 1
        yield next(sources[behind])


Diagnose = Callable[[Drawn], Row]


def in_order(
    pairs: Iterator[Drawn], diagnose: Diagnose, jobs: int, is_over: Callable[[], bool]
) -> Iterator[tuple[Drawn, Row]]:
    """Each pair with its row, in the order of the draw: what was given so far is then all up to a
    place, and a score that is killed can go on from there. Once ``is_over``, nothing more is drawn,
    and what is under way is waited for. Proving forks, so only this thread does it; diagnoses are
    processes of their own."""
    waiting: deque[tuple[Drawn, Future[Row]]] = deque()
    with ThreadPoolExecutor(jobs) as pool:
        while True:
            found = None if is_over() else next(pairs, None)
            if found is not None:
                waiting.append((found, pool.submit(diagnose, found)))
            running = [job for _, job in waiting if not job.done()]
            while running and (found is None or len(running) > jobs):
                wait(running, return_when=FIRST_COMPLETED)
                running = [job for job in running if not job.done()]
            while waiting and waiting[0][1].done():
                first, job = waiting.popleft()
                yield first, job.result()
            if found is None:
                return


def scored(part: Part, asked: argparse.Namespace, place: Path) -> Iterator[tuple[Drawn, Row]]:
    """Draw, prove and diagnose."""
    known: dict[str, Row] = {}
    if part.which == "tuning" and asked.out and asked.out.exists():  # a score that was cut short
        rows = map(json.loads, asked.out.read_text().splitlines())
        known = {r["script"]: {**r, "kept": True} for r in rows}

    def diagnose(found: Drawn) -> Row:
        pair = found.pair
        if pair.name in known:
            return known[pair.name]
        folder = place / pair.name
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in pair.source(pair.planted.faulty).items():
            (folder / name).write_text(text)
        if part.which == "tuning":
            (folder / "repaired.txt").write_text(pair.planted.repaired)
        document = diagnosed(folder / MAIN, asked.policy, asked.time_limit)
        if part.which == "sealed":
            shutil.rmtree(folder)
        return row_of(pair, found.proof, document, asked.policy)

    until = time.monotonic() + 60 * asked.minutes
    runs = Runs(asked.cache if part.which == "tuning" else None)
    return in_order(pairs_of(part, runs), diagnose, asked.jobs, lambda: time.monotonic() > until)


# ---- the two sets ------------------------------------------------------------------------------------


def score_tuning(asked: argparse.Namespace) -> Counts:
    """A line for each row as it is done, and its JSON to ``--out``."""
    rows = []
    part = Part("tuning", asked.faults, asked.healthy, asked.offset, mechanisms=asked.mechanisms)
    with contextlib.ExitStack() as stack:
        place = asked.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for _, row in scored(part, asked, place):
            rows.append(row)
            if row.get("kept"):
                continue
            word = "right" if row["right"] else "WRONG"
            print(f"{word:6}{row['script']:60}{row['found'][0]}", flush=True)
            if asked.out:
                with asked.out.open("a") as out:
                    out.write(json.dumps(row) + "\n")
    return counts(rows)


def score_sealed(asked: argparse.Namespace) -> Counts:
    """Today's drawing; the file of all of them is written anew after every row."""
    kept = kept_drawings(asked.kept)
    drawing = drawing_of_today(kept, asked.policy)
    part = Part(
        "sealed", asked.faults, asked.healthy,
        after=(drawing["to"]["faults"], drawing["to"]["healthy"]), mechanisms=asked.mechanisms,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        for found, row in scored(part, asked, Path(place)):
            kind = "healthy" if found.pair.planted.cause == NO_FAULT else "faults"
            drawing["to"][kind] = found.place
            drawing["counts"] = added([drawing["counts"], counts([row])])
            write_whole(asked.kept, json.dumps({"drawings": kept}, indent=1) + "\n")
    found: Counts = drawing["counts"]
    return found


def kept_drawings(file: Path) -> list[Row]:
    """The entries so far, oldest first."""
    found: list[Row] = json.loads(file.read_text())["drawings"] if file.exists() else []
    return found


def drawing_of_today(drawings: list[Row], policy: str) -> Row:
    """The entry that today's drawing adds to: a new one behind the others, or the one of today that
    was cut short. Two in a day would let rules be improved on what the first one showed."""
    today, rules = datetime.date.today().isoformat(), rules_version()
    last = drawings[-1] if drawings else None
    if last is not None and last["on"] == today:
        if (last["rules"], last["policy"]) != (rules, policy):
            raise SystemExit(
                "The sealed set has been drawn today under other rules or another policy. Its next "
                "part can be drawn tomorrow."
            )
        return last
    before = last["to"] if last else {"faults": 0, "healthy": 0}
    drawings.append(
        {
            "on": today,
            "commit": _commit(),
            "rules": rules,
            "generator": _generator(),
            "policy": policy,
            "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, no CUDA",
            "from": dict(before),
            "to": dict(before),
            "counts": counts([]),
        }
    )
    return drawings[-1]


def _commit() -> str:
    """Of the tree that is scored, with "-dirty" where it differs from its commit."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    place = Path(__file__).parent
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _generator() -> str:
    """A digest of what draws and proves: with another one a place is another script."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted(here.rglob("*.py")):
        if file.name not in ("score.py", "counts.py", "peers.py"):
            digest.update(file.relative_to(here).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:8]


def main() -> None:
    """Draw, diagnose, count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--set", choices=("tuning", "sealed"), required=True)
    parser.add_argument("--faults", type=int, default=80, help="at most, of this drawing")
    parser.add_argument("--healthy", type=int, default=40, help="at most, of this drawing")
    parser.add_argument("--offset", type=int, default=0, help="of the tuning set's seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of a run")
    parser.add_argument("--minutes", type=float, default=math.inf, help="draw no more pairs then")
    parser.add_argument("--policy", choices=("native", "cuda"), default="native")
    parser.add_argument("--cache", type=Path, help="file of the tuning set's plain runs")
    parser.add_argument("--keep", type=Path, help="folder for the tuning set's scripts")
    parser.add_argument("--out", type=Path, help="rows of the tuning set")
    parser.add_argument("--mechanisms", action="store_true", help="these and their twins alone")
    parser.add_argument("--kept", type=Path, help="counts of the sealed set")
    parser.add_argument("--svg", type=Path, help="the confusion matrix")
    asked = parser.parse_args()
    if asked.kept is None:
        asked.kept = RESULTS / f"{'mechanisms' if asked.mechanisms else 'faults'}_sealed.json"
    planting.load()
    found = score_sealed(asked) if asked.set == "sealed" else score_tuning(asked)
    print(json.dumps(summary(found), indent=1))
    if asked.svg:
        asked.svg.write_text(confusion_svg(found["confusion"]))


if __name__ == "__main__":
    main()
