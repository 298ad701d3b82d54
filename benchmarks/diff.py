"""How often ``ampscope diff`` finds where two runs part, and how often it calls repeats different.

    python benchmarks/diff.py                      # results/diff.json
    python benchmarks/diff.py --what repeats --append

20 seeded pairs: `diff_pairs/train.py` unchanged against the same with one change, whose place is
known; the first module, the role and the step must be right. 50 repeats: 25 of a script that
repeats itself bit for bit, 25 of one whose last bits are drawn anew in each run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from contest import setting

from ampscope.ext.diff.runs import DiffOptions, NewRun, SideRuns, compared_sides
from ampscope.launcher.script_runs import NOTHING, ScriptRun, ScriptRuns
from ampscope.records import OP_STEP, RunSpec

RESULTS = Path(__file__).parent / "results" / "diff.json"
SCRIPT = Path(__file__).parent / "diff_pairs" / "train.py"
# Change -> modules that are right, roles that are right, step. An optimizer works on all parameters
# alike, in their order: the first one that it moves otherwise is right.
ANY = None
PAIRS: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...], int]] = {
    "default_dtype": (("emb",), ("start",), 0),
    "autocast": (("blocks.0.attn.qkv",), ("activation",), 0),
    "attention": (("blocks.0.attn",), ("activation",), 0),
    "attention_one": (("blocks.1.attn",), ("activation",), 0),
    "seed": (("emb",), ("start",), 0),
    "order": (("",), ("input",), 2),
    "eps": (("emb",), ("weight",), 0),
    "betas": (ANY, ("weight", "state"), 0),
    "fused": (ANY, ("weight", "state"), 0),
    "compile": (("blocks.0.ln1",), ("activation",), 0),  # decomposed, summed in another order
    "ln_eps": (("blocks.1.ln1",), ("activation",), 0),
    "gelu": (("blocks.0.mlp.1",), ("activation",), 0),
    "tf32": (("blocks.0.attn.qkv",), ("activation",), 0),
    "split": (("blocks.0.mlp.2",), ("activation",), 0),
    "kernel": (("blocks.1.mlp.0",), ("activation",), 0),
    "dropout": (("blocks.1.drop",), ("activation",), 0),
    "smoothing": (("",), ("loss",), 0),
    "init": (("blocks.1.mlp.0",), ("start",), 0),
    "late": (("blocks.1",), ("activation",), 5),
    "half_head": (("head",), ("start",), 0),
}

NOISY = ("gelu", "ln_eps", "attention")  # also with last bits that are drawn anew


def spec_of(args: tuple[str, ...] = ()) -> RunSpec:
    """The subject with these arguments."""
    return RunSpec(
        workload=str(SCRIPT),
        kind="script",
        steps=30,
        policy="native",
        precision="as_is",
        time_limit_s=600.0,
        args=args,
        label=" ".join(("train.py", *args)),
        cadence=NOTHING,
        settings=((OP_STEP, "0"),),
    )


class Shared(ScriptRuns):
    """Runs of one script with arguments of its own, from a process that others use as well: torch
    is imported once."""

    def __init__(self, runs: ScriptRuns, args: tuple[str, ...]) -> None:
        self._shared = runs
        self.spec = spec_of(args)

    def run(self, control: str, parent: str = "") -> ScriptRun:
        """As the other's, with this one's spec."""
        self._shared.spec = self.spec
        return self._shared.run(control, parent)


def side(runs: ScriptRuns, name: str, args: tuple[str, ...]) -> SideRuns:
    """The subject with these arguments."""
    return SideRuns(NewRun(spec_of(args), name), Shared(runs, args))


def pairs(store: Path, names: list[str], *more: str) -> list[dict[str, object]]:
    """Each change against the unchanged script, whose runs are shared; both with ``more``."""
    lines: list[dict[str, object]] = []
    with ScriptRuns(spec_of(), store, private=True) as runs:
        first = side(runs, "A", more)
        for name in sorted(names, key="compile".__eq__):  # which makes A's runs anew comes last
            started = time.monotonic()
            second = side(runs, "B", ("--change", name, *more))
            found = compared_sides(first, second, DiffOptions(), lambda text: None)
            modules, roles, step = PAIRS[name]
            diff, at = found.diff, found.diff.first
            placed = at is not None and at.role in roles and at.step == step
            right = placed and at is not None and (modules is ANY or at.module in modules)
            line = {
                "pair": name,
                "verdict": diff.verdict,
                "reason": diff.reason,
                "right": bool(right),
                "step": None if at is None else at.step,
                "role": None if at is None else at.role,
                "module": None if at is None else at.module,
                "op": None if at is None or at.op is None else (at.op.op or at.op.other),
                "line": None if at is None or at.op is None else (at.op.line or at.op.other_line),
                "distance": None if at is None else at.distance,
                "ledger": len(diff.ledger),
                "settings": [s.name for s in diff.settings],
                "wall_s": round(time.monotonic() - started, 1),
            }
            print(line, flush=True)
            lines.append(line)
    return lines


def repeats(
    store: Path, count: int, scripts: tuple[tuple[str, ...], ...] = ((), ("--noise",))
) -> list[dict[str, object]]:
    """Half of a script that repeats itself, half of one that does not quite."""
    lines: list[dict[str, object]] = []
    for args in scripts:
        with ScriptRuns(spec_of(args), store, private=True) as runs:
            first = side(runs, "A", args)
            called = unknown = 0
            largest = 0.0
            for number in range(count // 2):
                second = side(runs, "B", args)
                found = compared_sides(first, second, DiffOptions(), lambda text: None).diff
                called += found.verdict == "different"
                unknown += found.verdict == "unknown"
                largest = max(largest, found.noise.largest)
                print(args, number, found.verdict, found.noise.largest, flush=True)
        lines.append(
            {
                "script": " ".join(("train.py", *args)),
                "comparisons": count // 2,
                "called_different": called,
                "could_not_tell": unknown,
                "noise": largest,
                "blind_from": found.blind_from,
            }
        )
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--what", choices=("all", "pairs", "repeats", "noisy", "noise"), default="all"
    )
    parser.add_argument("--pairs", default=",".join(PAIRS))
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--append", action="store_true", help="keep what the file holds besides")
    options = parser.parse_args()
    before = json.loads(options.out.read_text()) if options.append and options.out.exists() else {}
    content = {**before, "setting": setting()}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.db"
        if options.what in ("all", "pairs"):
            found = pairs(store, options.pairs.split(","))
            content["pairs"] = found
            content["pairs_right"] = sum(bool(line["right"]) for line in found)
        if options.what in ("all", "noisy"):
            content["noisy_pairs"] = pairs(store, list(NOISY), "--noise")
        if options.what in ("all", "repeats"):
            content["repeats"] = repeats(store, options.count)
        if options.what == "noise":
            content["repeats"] = repeats(store, options.count, (("--noise",),))
    options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
