"""Does a diagnosis find what only compiled code does wrong?

Each of ``scripts/`` trains a small net with torch.compile, and plants a fault into the compiler as
it starts: a wrong decomposition, a graph pass, a lowering. ``--healthy`` plants the same machinery
without the fault. Eager code is right in both.

    python -m benchmarks.compiled.score --out benchmarks/results/compiled.json
    python -m benchmarks.compiled.score --table benchmarks/results/compiled.json docs/compiled.md

    python -m benchmarks.compiled.score --programs --out benchmarks/results/compiled.json
    python -m benchmarks.compiled.score --variations --out benchmarks/results/compiled.json

``--programs`` diagnoses the fault generator's healthy programs (``benchmarks/faults/programs``)
with one line more, which compiles their model: other code, nothing planted, no compiler changed.
``--variations`` diagnoses the scripts of ``healthy/``: one way to use torch.compile each.

A fault is *named* when the first finding has its cause; its module counts apart. Times are of the
processor too: on a shared machine the wall clock tells little. ``own`` is the script alone.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
VARIATIONS = Path(__file__).parent / "healthy"
PROGRAMS = Path(__file__).parents[1] / "faults" / "programs"
PROGRAM_STEPS = 20
# The line of a program that makes its model.
_MODEL = re.compile(r"^([ \t]*)((?:self\.)?(?:net|model)) = [A-Z]\w*\(.*\)$", re.MULTILINE)
LIMIT_S = 900.0
RUN_S = 400  # of one run of a healthy script: a busy machine takes long to compile
BEGIN, END = "<!-- compiled -->", "<!-- /compiled -->"


@dataclass(frozen=True)
class Key:
    """What is right to say of a script."""

    what: str
    cause: str
    modules: tuple[str, ...]  # one of these; none where the fault has no place of its own


ACT = ("blocks.0.act",)
KERNEL, GRAPH = "compiler_kernel", "graph_semantics"
KEYS = {
    "elided_rounding": Key("rounding left out by fusion", "compiler_precision", ()),
    "reordered_reduction": Key("sum cut in two, halves in bf16", KERNEL, ACT),
    "flushed_denormal": Key("subnormal numbers become zero", KERNEL, ACT),
    "saved_dtype": Key("saved tensors with two bits of mantissa", KERNEL, ()),
    "custom_op_autocast": Key("custom op without its cast to fp32", GRAPH, ACT),
    "wrong_decomposition": Key("GELU with another constant", KERNEL, ACT),
    "wrong_lowering": Key("tanh in generated code too large", KERNEL, ACT),
    "inplace_order": Key("input overwritten before it is read", KERNEL, ("blocks.0",)),
    "stale_buffer": Key("state that was a constant at capture", GRAPH, ACT),
    "dynamic_shape": Key("mean over the size compiled first", KERNEL, ACT),
    "padding_fill": Key("padding not filled with zero", KERNEL, ACT),
    "dropout_seed": Key("dropout with the same seed at every step", KERNEL, ("blocks.0.drop",)),
    "index_overflow": Key("index narrowed to 8 bits", KERNEL, ("embed",)),
    "unshifted_softmax": Key("softmax without its shift: NaN", KERNEL, ("attend",)),
    "inlined_value": Key("wrong where its input is in a register", "vanishes_when_observed", ()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=sorted(KEYS))
    parser.add_argument("--forms", nargs="*", default=["faulty", "healthy"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time", action="store_true", help="run each script alone as well")
    parser.add_argument("--programs", action="store_true", help="healthy programs, compiled")
    parser.add_argument("--variations", action="store_true", help="ways to use torch.compile")
    parser.add_argument("--table", nargs=2, type=Path)
    asked = parser.parse_args()
    if asked.table:
        results, page = asked.table
        put_table(page, json.loads(results.read_text()))
        return
    if asked.programs or asked.variations:
        every = sorted(p.stem for p in PROGRAMS.glob("*.py") if compiled(p.read_text()))
        if asked.variations:
            every = sorted(p.stem for p in VARIATIONS.glob("*.py") if p.stem != "parts")
        for name in every if asked.only == sorted(KEYS) else asked.only:
            add(asked.out, variation(name) if asked.variations else program(name))
        return
    for form in asked.forms:
        for kind in asked.only:
            add(asked.out, measured(kind, asked.seed, form, is_timed=asked.time))


def measured(kind: str, seed: int, form: str, *, is_timed: bool) -> dict[str, Any]:
    """One script, run alone and diagnosed."""
    script, args = SCRIPTS / f"{kind}.py", [str(seed)]
    args += ["--healthy"] if form == "healthy" else []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        own = timed([sys.executable, "-W", "ignore", str(script), *args]) if is_timed else None
        command = [sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet"]
        command += ["--json", str(out), "--store", f"{folder}/runs.db", str(script), *args]
        whole = timed(command)
        found = _read(out)
    return row(kind, seed, form, found, own, whole)


def _read(out: Path) -> dict[str, Any]:
    """What the diagnosis wrote; a verdict of its own where it wrote nothing."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"verdict": "none"}
    return found


def compiled(text: str, behind: str = "\n") -> str:
    """A program that compiles its model in place, in a line of its own or ``behind`` another
    separator; "" of one without a line that makes it."""
    made, count = _MODEL.subn(
        lambda line: (
            line[0] + behind + (line[1] if "\n" in behind else "") + f"{line[2]}.compile()"
        ),
        text,
    )
    return made if count else ""


def program(name: str) -> dict[str, Any]:
    """A healthy program of the fault generator, compiled and diagnosed."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{name}.py"
        script.write_text(compiled((PROGRAMS / f"{name}.py").read_text()))
        return healthy(script, "program")


def variation(name: str) -> dict[str, Any]:
    """A healthy script that uses torch.compile in its own way, diagnosed."""
    return healthy(VARIATIONS / f"{name}.py", "variation")


def healthy(script: Path, form: str) -> dict[str, Any]:
    """A healthy script, diagnosed."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "ampscope.cli.main", "diagnose", "--quiet"]
        command += ["--steps", str(PROGRAM_STEPS), "--time-limit", str(RUN_S), "--json", str(out)]
        whole = timed([*command, "--store", f"{folder}/runs.db", str(script)])
        found = _read(out)
    first: dict[str, Any] = next(iter(found.get("findings", [])), {})
    return {
        "kind": script.stem, "seed": 0, "form": form, "verdict": found["verdict"],
        "cause": first.get("cause"), "module": first.get("module"), "op": first.get("op"),
        "explanation": first.get("explanation") or found.get("undecided"),
        "notes": found.get("notes"), "runs": sorted(found.get("runs", {})),
        "own_s": None, "diagnosis_s": whole,
    }  # fmt: skip


def row(
    kind: str,
    seed: int,
    form: str,
    found: dict[str, Any],
    own: list[float] | None,
    whole: list[float],
) -> dict[str, Any]:
    """A diagnosis against the key."""
    key = KEYS[kind]
    first: dict[str, Any] = next(iter(found.get("findings", [])), {})
    module = first.get("module")
    return {
        "kind": kind, "seed": seed, "form": form, "verdict": found["verdict"],
        "cause": first.get("cause"), "module": module, "op": first.get("op"),
        "named": first.get("cause") == key.cause,
        "place": None if not key.modules else module in key.modules,
        "verified": (first.get("fix") or {}).get("verified"),
        "explanation": first.get("explanation") or found.get("undecided"),
        "notes": found.get("notes"), "runs": sorted(found.get("runs", {})),
        "own_s": own, "diagnosis_s": whole,
    }  # fmt: skip


def timed(command: list[str]) -> list[float]:
    """Wall and processor seconds of a command and all that it starts."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with open(os.devnull, "wb") as nowhere:
        subprocess.run(command, stdout=nowhere, stderr=nowhere, timeout=LIMIT_S, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [round(time.perf_counter() - started, 1), round(processor, 1)]


def add(out: Path | None, found: dict[str, Any]) -> None:
    """Keep a row, in the place of an older one of the same script."""
    print(json.dumps(found), flush=True)
    if out is None:
        return
    rows = json.loads(out.read_text())["rows"] if out.exists() else []
    name = [found[part] for part in ("kind", "seed", "form")]
    rows = [r for r in rows if [r["kind"], r["seed"], r["form"]] != name]
    rows.append(found)
    rows.sort(key=lambda r: (r["form"], r["kind"], r["seed"]))
    out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def put_table(page: Path, results: dict[str, Any]) -> None:
    """Write the figures between the page's markers."""
    head, rest = page.read_text().split(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{table(results['rows'])}\n{END}{rest.split(END)[1]}")


def table(rows: list[dict[str, Any]]) -> str:
    """Counts, then a line for each fault."""
    faulty = [r for r in rows if r["form"] == "faulty"]
    healthy = [r for r in rows if r["form"] == "healthy"]
    placed = [r["place"] for r in faulty if r["place"] is not None]
    lines = [
        f"- faults named first: {sum(r['named'] for r in faulty)} of {len(faulty)}; "
        f"called no fault: {sum(r['verdict'] == 'no_fault' for r in faulty)}",
        f"- with the module: {sum(placed)} of {len(placed)} that have one",
        f"- false alarms: {sum(r['verdict'] == 'fault' for r in healthy)} of {len(healthy)} "
        "healthy scripts with the same machinery",
        *_judged([r for r in rows if r["form"] == "program"], "healthy programs, compiled"),
        *_judged([r for r in rows if r["form"] == "variation"], "ways to use torch.compile"),
        "",
        "| planted into the compiler | named | module | processor time: script, diagnosis |",
        "|---|---|---|---|",
    ]
    for r in faulty:
        own = f"{r['own_s'][1]:.0f} s" if r["own_s"] else "-"
        cause = r["cause"] or r["verdict"]
        lines.append(
            f"| {KEYS[r['kind']].what} | {'' if r['named'] else 'missed: '}{cause} | "
            f"{r['module'] or '-'} | {own}, {r['diagnosis_s'][1]:.0f} s |"
        )
    return "\n".join(lines)


def _judged(rows: list[dict[str, Any]], what: str) -> list[str]:
    """A line on healthy scripts; none without any."""
    if not rows:
        return []
    judged = [r for r in rows if not any("was not judged" in note for note in r["notes"] or ())]
    alarms = sum(r["verdict"] == "fault" for r in judged)
    unclear = sum(r["verdict"] == "inconclusive" for r in judged)
    return [
        f"- false alarms: {alarms} of {len(judged)} {what}; undetermined: "
        f"{unclear}; compiled code not judged in {len(rows) - len(judged)} more"
    ]


if __name__ == "__main__":
    main()
