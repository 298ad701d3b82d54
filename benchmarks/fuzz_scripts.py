"""Scripts of hostile parts, run plain and recorded: equal numbers, no failure of ampscope itself.

    python benchmarks/fuzz_scripts.py            # 500 scripts, benchmarks/results/fuzz_scripts.json
    python benchmarks/fuzz_scripts.py --count 20 --seed 7 --no-write

Each script is one of the trainings of ``tests/helpers/hostile_objects.py`` and changes its process
in one phase, as one of ``tests/helpers/process_changes.py`` does. It is started in one of three
ways: as the script itself, or in a process that a script forks or spawns.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ampscope.launcher.script_runs import ScriptRuns  # noqa: E402  # after the path
from ampscope.records import State  # noqa: E402
from tests.helpers.hostile_objects import TRAININGS, script  # noqa: E402
from tests.helpers.process_changes import CHANGES  # noqa: E402
from tests.helpers.script_runner import Runner, spec  # noqa: E402

PHASES = ("import", "before the first step", "in a step", "between steps", "at the end")
WAYS = (*["fork"] * 15, "alone", "alone", "alone", "spawn")  # how often each is drawn: by its price
CHUNK = 25  # scripts that one script starts
# They would change the arithmetic of the training itself, or its own printing, midway.
LEFT_OUT = ("fp64 by default", "a default device", "stdout", "ends at once", "little recursion")
LOOP = "for number in range(6):\n    step(loss_of(number))\n"
PHASED = """
import torch._dynamo
def changes(phase, number=3):
    if phase == PHASE and number == 3: exec(CHANGE, globals())
changes("before the first step")
for number in range(6):
    loss = loss_of(number)
    changes("in a step", number)
    step(loss)
    changes("between steps", number)
changes("at the end")
"""
STARTS = """import torch, torch._dynamo
import torch.multiprocessing as mp
SCRIPTS = {scripts!r}
def run(text): exec(compile(text, __file__, "exec"), {{"__name__": "__main__"}})
for number, way, text in SCRIPTS if __name__ == "__main__" else ():
    print("script", number, flush=True)
    process = mp.get_context(way).Process(target=run, args=(text,))
    process.start(); process.join(); print("left with", process.exitcode, flush=True)
"""


@dataclass(frozen=True)
class Script:
    """One generated script."""

    number: int
    training: str
    change: str
    phase: str
    way: str

    @property
    def text(self) -> str:
        change = "import torch\n" + CHANGES[self.change]
        body = script(self.training).replace(LOOP, PHASED)
        assert PHASED in body
        start = change if self.phase == "import" else ""
        return f"{start}PHASE, CHANGE = {self.phase!r}, {change!r}\n{body}"


def generated(count: int, seed: int) -> list[Script]:
    """The same for the same numbers."""
    draw = random.Random(seed)
    changes = [name for name in CHANGES if name not in LEFT_OUT]
    return [
        Script(n, draw.choice(list(TRAININGS)), draw.choice(changes), draw.choice(PHASES),
               draw.choice(WAYS))
        for n in range(count)
    ]  # fmt: skip


def problems(scripts: list[Script], folder: Path) -> tuple[list[dict[str, Any]], Counter[str]]:
    """What differs or failed, and how many were run in each way."""
    found: list[dict[str, Any]] = []
    ran: Counter[str] = Counter()
    long = replace(spec(), time_limit_s=1800.0)
    with ScriptRuns(long, folder / "runs.db") as runs:
        runner = Runner(runs)
        for start in range(0, len(scripts), CHUNK):
            chunk = scripts[start : start + CHUNK]
            path = _starting(chunk, folder / f"plain{start}.py")
            done = subprocess.run(
                [sys.executable, path], capture_output=True, text=True, check=True
            )
            plain = _printed(done.stdout)
            started = [one for one in chunk if one.way != "alone"]
            seen = runner(_starting(started, folder / f"starts{start}.py"))
            printed = _printed(seen.out.decode())
            errors = _own_failures(seen.run.info.message, seen.err.decode())
            if errors or seen.run.info.state is not State.FINISHED:
                found.append({"scripts": [one.number for one in started], "own": errors})
            found += [
                _told(one, plain[one.number], printed.get(one.number))
                for one in started
                if printed.get(one.number) != plain[one.number]
            ]
            for one in (one for one in chunk if one.way == "alone"):
                path = folder / f"alone{one.number}.py"
                path.write_text(one.text)
                alone = runner(path)
                weights = re.findall(r"weights \w+", alone.out.decode())
                errors = _own_failures(alone.run.info.message, alone.err.decode())
                is_ended = alone.run.info.state is State.FINISHED
                if errors or not is_ended or weights != plain[one.number][0]:
                    told = _told(one, plain[one.number], (weights, alone.outcome.exit_code))
                    found.append(told | {"own": errors})
            ran.update(one.way for one in chunk)
    return found, ran


def _starting(scripts: list[Script], path: Path) -> Path:
    """A script that runs each of ``scripts`` in a process; what runs alone is forked here."""
    parts = [(s.number, "fork" if s.way == "alone" else s.way, s.text) for s in scripts]
    path.write_text(STARTS.format(scripts=parts))
    return path


def _printed(out: str) -> dict[int, tuple[list[str], int]]:
    """What each started script printed of its weights, and the status that it left with."""
    parts = re.findall(r"^script (\d+)\n(.*?)^left with (-?\d+)$", out, re.DOTALL | re.MULTILINE)
    return {int(n): (re.findall(r"weights \w+", text), int(code)) for n, text, code in parts}


def _own_failures(message: str, err: str) -> list[str]:
    lines = [message, *err.splitlines()]
    return [one for one in lines if "ampscope itself failed" in one or one.startswith("ampscope:")]


def _told(one: Script, plain: object, recorded: object) -> dict[str, Any]:
    return vars(one) | {"plain": plain, "recorded": recorded}


@click.command()
@click.option("--count", default=500, show_default=True)
@click.option("--seed", default=39, show_default=True)
@click.option("--write/--no-write", default=True)
def main(count: int, seed: int, write: bool) -> None:
    """Run COUNT scripts and print what differs."""
    os.environ["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found, ran = problems(generated(count, seed), Path(folder))
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    result = {
        "commit": subprocess.run(asked, capture_output=True, text=True).stdout.strip(),
        "scripts": count, "seed": seed, "ways": dict(ran), "problems": found,
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if write:
        (ROOT / "benchmarks" / "results" / "fuzz_scripts.json").write_text(f"{text}\n")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
