"""What recording costs a training step, beside tools that record less, as JSON.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/overhead.py            # results/overhead_cpu.json
    … python benchmarks/overhead.py --device cuda --size medium      # results/overhead_cuda.json

One model and one process; every contestant's step follows a bare step of the same training, and
the ratio of the two is what counts, so that a slow moment of the machine hits both. Contestants
take turns, in an order that is drawn anew each round. On a CPU all of it is done twice: under the
rehearsal of CUDA's rules and under the CPU's own. Peers that are not installed are left out and
named; `--peers DIR` adds a folder to look for them (pip install --target DIR transformers …).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from contest import setting
from overhead_contestants import Contestant, Session, ampscope_contestants
from overhead_peers import peers

from ampscope.policy.rehearsal import cuda_autocast_lists

RESULTS = Path(__file__).parent / "results"
GOALS = {"every layer, every step": 1.15, "every layer, one step in ten": 1.03, "hooks idle": 1.01}
Line = dict[str, object]


def seconds_a_step(session: Session, contestant: Contestant | None) -> float:
    """Mean time of the steps that belong to one turn of the contestant; None is a bare step."""
    if contestant is None:
        started = time.perf_counter()
        session.step()
        session.wait()
        return time.perf_counter() - started
    with contestant.attached():
        started = time.perf_counter()
        for number in range(contestant.steps):
            contestant.step(number)
        session.wait()
        return (time.perf_counter() - started) / contestant.steps


def ratios(session: Session, contestants: dict[str, Contestant], rounds: int) -> dict[str, Line]:
    """For each contestant the quartiles of its ratio to the bare steps around it."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    bare_s: list[float] = []
    order = list(contestants)
    for number in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            contestant = contestants[name]
            if number > 1 and contestant.steps > 1 and number % 2:
                continue  # ten steps a turn: every other round is enough
            before = seconds_a_step(session, None)
            spent = seconds_a_step(session, contestant)
            after = seconds_a_step(session, None)
            if number:  # the first round compiles and fills caches
                found[name].append(spent / ((before + after) / 2))
                bare_s += (before, after)
    lines: dict[str, Line] = {"bare step": {"ms": quartiles(bare_s, 1e3)}}
    for name, values in found.items():
        lines[name] = {"ratio": quartiles(values), "turns": len(values)}
        print(f"  {name:34} {lines[name]['ratio']}", flush=True)
    return lines


def quartiles(values: list[float], unit: float = 1.0) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(float(q) * unit, 4) for q in np.percentile(values, (25, 50, 75))]


def measure(size: str, device: str, policy: str, rounds: int) -> Line:
    print(f"{device}, {policy}")
    with ExitStack() as stack:
        if policy == "rehearsal":
            stack.enter_context(cuda_autocast_lists())
        session = Session(size, torch.device(device), policy)
        contestants = ampscope_contestants(session)
        others, absent = peers(session)
        lines = ratios(session, contestants | others, rounds)
        recorded = session.recorded()
    median = {name: line["ratio"][1] for name, line in lines.items() if "ratio" in line}  # type: ignore[index]  # a list
    verdicts = {
        name: {"goal": goal, "median": median[name], "met": median[name] <= goal}
        for name, goal in GOALS.items()
    }
    return {
        "policy": policy,
        "contestants": lines,
        "goals": verdicts,
        "absent_peers": absent,
        "elements_counted_a_step": recorded,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="small", choices=("tiny", "small", "medium"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--policy", choices=("rehearsal", "native", "cuda"))
    parser.add_argument("--peers", type=Path, help="folder with wandb, tensorboard, transformers")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.peers is not None:
        sys.path.append(str(asked.peers))
    policies = ("cuda",) if asked.device == "cuda" else ("rehearsal", "native")
    if asked.policy is not None:
        policies = (asked.policy,)
    random.seed(0)
    started = time.monotonic()
    document: Line = {
        "setting": setting(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "workload": f"gpt {asked.size}, bf16 autocast, AdamW",
        "rounds": asked.rounds,
        "policies": [measure(asked.size, asked.device, p, asked.rounds) for p in policies],
    }
    document["load_average_after"] = round(os.getloadavg()[0], 2)
    document["elapsed_s"] = round(time.monotonic() - started, 1)
    out = asked.out or RESULTS / f"overhead_{asked.device}.json"
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(out)


if __name__ == "__main__":
    main()
