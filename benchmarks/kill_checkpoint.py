"""A process that saves, marks and rotates checkpoints is killed at random moments.

    python benchmarks/kill_checkpoint.py [--kills 100] [--seed 1]

A child saves a checkpoint of two files, marks it healthy with hard links, and deletes the one
before, without end, in a folder that goes on from kill to kill. After each SIGKILL the last healthy
checkpoint must be named, have every byte that was saved, and be no older than the last one whose
marking the child has reported. Writes results/kill_checkpoint.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ampscope.checkpoints.healthy import MARKER, last_healthy

OUT = Path(__file__).resolve().parent / "results" / "kill_checkpoint.json"
WORDS = 40_000
_CHILD = f"""
import shutil, sys
from pathlib import Path
from ampscope.checkpoints.healthy import mark_healthy
folder, step = Path(sys.argv[1]), int(sys.argv[2])
while True:
    made = folder / f"checkpoint-{{step}}"
    made.mkdir()
    for name in ("model", "optimizer"):
        (made / name).write_text(f"{{step}} " * {WORDS})
    mark_healthy(made, step, "run", keep=True)
    print(step, flush=True)
    for old in folder.glob("checkpoint-*"):
        if old != made:
            shutil.rmtree(old)
    step += 1
"""


def main() -> None:
    """Kill, look, and write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    rng, held, marked = random.Random(asked.seed), 0, 0
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for kill in range(asked.kills):
            command = [sys.executable, "-c", _CHILD, str(folder), str(kill * 10_000)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
                assert child.stdout is not None
                child.stdout.readline()
                time.sleep(rng.uniform(0.0, 0.1))
                os.kill(child.pid, signal.SIGKILL)
                told = [kill * 10_000, *map(int, child.stdout.read().split())]
            marked += len(told)
            problem = wrong(folder, told[-1])
            held += not problem
            problems += [f"kill {kill}: {problem}"] if problem else []
    found = {"kills": asked.kills, "seed": asked.seed, "held": held, "marked": marked}
    OUT.write_text(json.dumps(found | {"problems": problems}, indent=1) + "\n")
    print(json.dumps(found), *problems, sep="\n")


def wrong(folder: Path, told: int) -> str:
    """What is wrong with the last healthy checkpoint after a kill; "" where nothing is."""
    found = last_healthy(folder)
    if found is None:
        return "none is named, or it is not whole"
    step = json.loads((folder / MARKER).read_text())["step"]
    if step < told:
        return f"step {step} is named, {told} was marked"
    for name in ("model", "optimizer"):
        if (found / name).read_text() != f"{step} " * WORDS:
            return f"{name} is not what was saved"
    return ""


if __name__ == "__main__":
    main()
