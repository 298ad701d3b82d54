"""What recording costs a training step, beside tools that record less, as JSON.

    python benchmarks/overhead.py                              # results/overhead_cpu.json
    python benchmarks/overhead.py --device cuda                # results/overhead_cuda.json
    python benchmarks/overhead.py --what probe                 # what a probe's instruments cost
    python benchmarks/overhead.py --compiled --alone           # the model by torch.compile
    python benchmarks/overhead.py --taps --models gpt:small    # results/overhead_taps_cpu.json
    python benchmarks/overhead.py --what telemetry --alone     # the process that reads the machine
    python benchmarks/overhead.py --models gpt:medium --batch 256    # a step that fills a GPU

One process; every contestant's steps follow bare steps of the same training and are followed by
others, and the ratio is what counts, so that a slow moment of the machine hits both. Contestants
run interleaved, in an order that is drawn anew each round. Peers that are not installed are left
out and named; `--peers DIR` adds folders to look for them (pip install --target DIR …).

`--taps` compiles the training twice, with taps and without: what taps cost the generated code
itself is part of the ratio then. Graph breaks, and graphs compiled after the first round, are
counted; and the losses of the first steps of both trainings, which begin alike, are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
import torch
from contest import setting
from overhead_contestants import Contestant, Session, ampscope_contestants
from overhead_peers import peers
from overhead_watch import DEFAULT, FILLS_MS, telemetry_contestant, watch_contestants
from overhead_watch import GOALS as WATCH_GOALS
from torch._dynamo.utils import counters

from ampscope.policy.rehearsal import cuda_autocast_lists

RESULTS = Path(__file__).parent / "results"
PROBE_GOALS = {
    "every layer, every step": 1.15,
    "every layer, one step in ten": 1.03,
    "hooks idle": 1.01,
}
CONTESTANTS = {"watch": watch_contestants, "probe": ampscope_contestants,
               "telemetry": telemetry_contestant}  # fmt: skip
COMPARED_STEPS = 10  # of two trainings, with taps and without
MODELS = ("gpt:small", "gpt:medium", "resnet:small")
Line = dict[str, object]


def seconds_a_step(session: Session, contestant: Contestant | None, steps: int) -> float:
    """Mean time of the steps that belong to one turn of the contestant; None is a bare step."""
    if contestant is None:
        started = time.perf_counter()
        for _ in range(steps):
            session.step()
        session.wait()
        return (time.perf_counter() - started) / steps
    with contestant.attached():
        started = time.perf_counter()
        for number in range(steps):
            contestant.step(number)
        session.wait()
        return (time.perf_counter() - started) / steps


def ratios(session: Session, contestants: dict[str, Contestant], rounds: int) -> dict[str, Line]:
    """For each contestant the quartiles of its ratio to the bare steps around it, and its mean."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    bare_s: list[float] = []
    order = list(contestants)
    graphs = 0  # that torch.compile had made after the first round
    for number in range(rounds + 1):
        random.shuffle(order)
        for name in order:
            contestant = contestants[name]
            half = max(1, contestant.steps // 2)
            before = seconds_a_step(session, None, half)
            spent = seconds_a_step(session, contestant, contestant.steps)
            after = seconds_a_step(session, None, half)
            if number:  # the first round compiles and fills caches
                found[name].append(spent / ((before + after) / 2))
                bare_s += (before, after)
        graphs = graphs or counters["stats"]["unique_graphs"]
    lines: dict[str, Line] = {"bare step": {"ms": quartiles(bare_s, 1e3)}}
    if graphs:
        later = counters["stats"]["unique_graphs"] - graphs
        breaks = sum(counters["graph_break"].values())
        lines["torch.compile"] = {"graphs": graphs, "breaks": breaks, "compiled_later": later}
    for name, values in found.items():
        mean = round(float(np.mean(values)), 4)
        lines[name] = {"ratio": quartiles(values), "mean": mean, "turns": len(values)}
        print(f"  {name:34} {lines[name]['ratio']} mean {mean}", flush=True)
    return lines


def quartiles(values: list[float], unit: float = 1.0) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(float(q) * unit, 4) for q in np.percentile(values, (25, 50, 75))]


def measure(model: str, device: str, policy: str, asked: argparse.Namespace) -> Line:
    precision, rounds, what = asked.precision, asked.rounds, asked.what
    print(f"{model} on {device}, {policy}, {precision}", flush=True)
    workload, size, *batch = model.split(":")
    samples = int(batch[0]) if batch else asked.batch
    with ExitStack() as stack:
        if policy == "rehearsal":
            stack.enter_context(cuda_autocast_lists())
        session = Session(workload, size, torch.device(device), policy, precision, samples)
        if asked.compiled:
            session.model.compile()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if asked.taps:  # a training of its own, with code of its own: Dynamo shares none here
            tapped = Session(workload, size, torch.device(device), policy, precision, samples)
            tapped.model.compile(backend=_inductor)  # type: ignore[no-untyped-call]  # as above
            own = watch_contestants(tapped, taps=True)
            moved = by_taps(session, tapped, own[DEFAULT])
        else:
            moved = None
            own = CONTESTANTS[what](session)
        others, absent = ({}, ["all: --alone"]) if asked.alone else peers(session)
        lines = ratios(session, own | others, rounds)
    kind = device
    if device == "cuda" and lines["bare step"]["ms"][1] < FILLS_MS:  # type: ignore[index]  # a list
        kind = "cuda, launches"
    goals = {**WATCH_GOALS[kind], **PROBE_GOALS}
    verdicts = {name: verdict(lines[name], goal) for name, goal in goals.items() if name in lines}
    return {
        "model": model,
        "batch": samples or "as the workload gives it",
        "policy": policy,
        "compiled": asked.compiled,
        "taps": asked.taps,
        "moved_by_taps": moved,
        "contestants": lines,
        "goals": verdicts,
        "absent_peers": absent,
        "elements_counted_a_step": session.recorded(),
    }


def by_taps(bare: Session, tapped: Session, watched: Contestant) -> Line:
    """What taps do to the losses of the first steps: how many stay alike bit by bit, and the
    largest change as a share of the loss. The graphs are made here, with taps and without."""
    losses = []
    for session, attached in ((bare, nullcontext), (tapped, watched.attached)):
        torch.manual_seed(0)
        with attached():
            losses.append([session.train().item() for _ in range(COMPARED_STEPS)])
    shares = [abs(a - b) / abs(a) for a, b in zip(*losses, strict=True)]
    return {"steps": COMPARED_STEPS, "alike": shares.count(0.0), "largest_share": max(shares)}


def _inductor(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    """inductor under another name: Dynamo keeps code by what compiled it."""
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs)


def verdict(line: Line, goal: float) -> Line:
    """The goal is met when the median of the turns is."""
    median: float = line["ratio"][1]  # type: ignore[index]  # a list
    return {"goal": goal, "median": median, "met": median <= goal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--models", default=",".join(MODELS), help="workload:size[:batch], …")
    parser.add_argument("--batch", type=int, default=0, help="samples a step; 0: as they come")
    parser.add_argument("--what", default="watch", choices=tuple(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--policy", default="native", choices=("rehearsal", "native"))
    parser.add_argument("--peers", type=Path, nargs="*", default=[], help="folders with peers")
    parser.add_argument(
        "--precision",
        default="bf16",
        choices=("bf16", "fp32"),
        help="fp32 where the CPU has no bf16 arithmetic and emulates it 20 times slower",
    )
    parser.add_argument("--alone", action="store_true", help="without other tools")
    parser.add_argument("--compiled", action="store_true", help="the model by torch.compile")
    parser.add_argument("--taps", action="store_true", help="watch with taps; implies both above")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.taps:
        asked.compiled = asked.alone = True
    sys.path += map(str, asked.peers)
    policy = "cuda" if asked.device == "cuda" else asked.policy
    random.seed(0)
    started = time.monotonic()
    what = "overhead" if asked.what == "watch" else f"overhead_{asked.what}"
    what += "_taps" if asked.taps else ""
    out = asked.out or RESULTS / f"{what}_{asked.device}.json"
    measured: list[Line] = []
    document: Line = {
        "setting": setting(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "training": f"{asked.precision}, the workload's own optimizer",
        "rounds": asked.rounds,
        "models": measured,
    }
    for model in asked.models.split(","):  # written after each: what time is left is not known
        measured.append(measure(model, asked.device, policy, asked))
        document["load_average_after"] = round(os.getloadavg()[0], 2)
        document["elapsed_s"] = round(time.monotonic() - started, 1)
        out.write_text(json.dumps(document, indent=1) + "\n")
    print(out)


if __name__ == "__main__":
    main()
