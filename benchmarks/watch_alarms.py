"""False alarms of `ampscope.watch`: healthy, odd trainings of tests/healthy under default alarms.

    python benchmarks/watch_alarms.py [SCRIPT …] [--out benchmarks/results/watch_alarms.json]

Each script runs in a process of its own. The watch begins at the first step of an optimizer, over
every module that holds one of its parameters and is part of no other; it sees later steps. A step
that is compiled as a whole calls no hook, so such a script has 0 steps here. With
``--steps N`` 20 long trainings follow, N steps in all: five tasks with noisy labels, rare large
targets, restarts of the learning rate and batches of one sample, in four precisions.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import multiprocessing
import runpy
import tempfile
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import ampscope
from ampscope.capture.global_hooks import OPTIMIZER_POST
from ampscope.store.reader import Reader

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "healthy"
RESULT = Path(__file__).resolve().parent / "results" / "watch_alarms.json"


def run_one(script: Path) -> dict[str, Any]:
    """In this process; how many steps were watched and which alarms rang."""
    runs: list[ampscope.Watch] = []

    def begin(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if runs:
            return
        # By type: isinstance asks a weak proxy for its referent, which may be gone.
        modules: list[nn.Module] = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
        inner = {id(child) for module in modules for child in module.children()}
        roots = [m for m in modules if id(m) not in inner and any(True for _ in m.parameters())]
        if roots:
            store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
            runs.append(ampscope.watch(roots, store=store, policy="ignore"))

    handle = OPTIMIZER_POST.subscribe(begin)  # never traced by torch.compile
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runpy.run_path(str(script), run_name="__main__")
    handle.remove()
    if not runs:
        return {"script": script.stem, "steps": 0, "alarms": []}
    (run,) = runs
    run.close()
    alarms = [[alarm.step, alarm.name] for alarm in run.alarms]
    with Reader(run.store) as reader:
        stopped = [e.text for e in reader.events(run.id) if e.name == "stopped watching"]
    found = {"script": script.stem, "steps": run._session.now.step, "alarms": alarms}
    return found | ({"error": stopped[0]} if stopped else {})


TASKS = ("regression", "classification", "rare targets", "autoencoder", "sequence")
PRECISIONS = ("fp16 with a scaler", "bf16 autocast", "fp32", "bf16 weights, stochastic rounding")


def train_long(task: str, precision: str, steps: int) -> dict[str, Any]:
    """In this process; a healthy training of a small network under the default alarms."""
    torch.manual_seed(zlib.crc32(f"{task}, {precision}".encode()))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    width, outputs = 16, 8 if task == "autoencoder" else 5
    model = nn.Sequential(
        nn.Linear(8, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, outputs)
    )
    rounds = precision.startswith("bf16 weights")
    model = model.bfloat16() if rounds else model
    optimizer = (RoundedAdamW if rounds else torch.optim.AdamW)(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision.startswith("fp16"), growth_interval=500)
    restarts = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2_000)
    half = {"fp16 with a scaler": torch.float16, "bf16 autocast": torch.bfloat16}.get(precision)
    teacher = torch.randn(8, outputs)
    store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
    with ampscope.watch(model, optimizer, scaler, store=store, policy="ignore") as run:
        for step in range(steps):
            x = torch.randn(
                1 if task == "sequence" else 16, 8, dtype=torch.bfloat16 if rounds else None
            )
            aim = x.float() @ teacher + 0.3 * torch.randn(len(x), outputs)
            with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
                out = model(x)
            if task == "classification":
                wrong = torch.rand(len(x)) < 0.2  # labels
                label = torch.where(wrong, torch.randint(0, outputs, (len(x),)), aim.argmax(1))
                loss = nn.functional.cross_entropy(out.float(), label)
            elif task == "autoencoder":
                loss = nn.functional.mse_loss(out.float(), x.float())
            else:
                rare = 8.0 if task == "rare targets" and step % 97 == 0 else 1.0
                loss = nn.functional.smooth_l1_loss(out.float(), rare * aim)
            model.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            restarts.step()
    alarms = [[alarm.step, alarm.name] for alarm in run.alarms]
    with Reader(run.store) as reader:
        stopped = [e.text for e in reader.events(run.id) if e.name == "stopped watching"]
    found = {"script": f"{task}, {precision}", "steps": run._session.now.step, "alarms": alarms}
    return found | ({"error": stopped[0]} if stopped else {})


class RoundedAdamW(torch.optim.AdamW):
    """AdamW in fp32 over bf16 weights, rounded up or down by chance: the mean stays."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure is used
        weights = [weight for group in self.param_groups for weight in group["params"]]
        halves = [(weight.data, weight.grad) for weight in weights]
        for weight, (half, gradient) in zip(weights, halves, strict=True):
            weight.data = half.float()
            weight.grad = None if gradient is None else gradient.float()
        super().step(closure)
        for weight, (half, gradient) in zip(weights, halves, strict=True):
            noise = torch.randint(0, 1 << 16, half.shape, dtype=torch.int32)
            half.copy_(((weight.data.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32))
            weight.data, weight.grad = half, gradient


def sent(end: Any, name: str, work: Any, *given: Any) -> None:
    """What came of the work, from the process that does it."""
    try:
        end.send(work(*given))
    except BaseException as error:
        end.send({"script": name, "error": f"{type(error).__name__}: {error}"[:300]})


def in_child(name: str, limit_s: float, work: Any, *given: Any) -> dict[str, Any]:
    """What ``work`` returns, from a process of its own."""
    context = multiprocessing.get_context("fork")  # torch is imported once
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=sent, args=(there, name, work, *given))
    child.start()
    there.close()
    one: dict[str, Any] = {"script": name, "error": f"took over {limit_s:g} s, or died"}
    if here.poll(limit_s):
        with contextlib.suppress(EOFError):
            one = here.recv()
    child.kill()
    child.join()
    print(one, flush=True)
    return one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scripts", nargs="*", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--seconds", type=float, default=600.0, help="No script begins after it.")
    parser.add_argument("--steps", type=int, default=0, help="Of the long trainings, in all.")
    given = parser.parse_args()
    ends, results = time.monotonic() + given.seconds, []
    for script in given.scripts or sorted(FOLDER.glob("*.py")):
        if time.monotonic() > ends:
            break
        results.append(in_child(script.stem, 120, run_one, script))
    each = given.steps // (len(TASKS) * len(PRECISIONS))
    for task, precision in itertools.product(TASKS, PRECISIONS) if each else ():
        results.append(in_child(f"{task}, {precision}", 3600, train_long, task, precision, each))
    summary = {
        "scripts": len(results),
        "steps": sum(one.get("steps", 0) for one in results),
        "alarms": sum(len(one.get("alarms", [])) for one in results),
        "errors": sum("error" in one for one in results),
        "results": results,
    }
    given.out.write_text(json.dumps(summary, indent=1) + "\n")
    print({key: value for key, value in summary.items() if key != "results"})


if __name__ == "__main__":
    main()
