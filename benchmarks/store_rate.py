"""What the store costs: histograms written a second, bytes a histogram, flushes early and late in a
run of 100,000 steps, and an overview of runs of any length. Writes results/store_rate.json.

    python benchmarks/store_rate.py [--histograms 1000000]

The histograms are those of large_run.py, which are harder to compress than recorded ones: each bin
is a Poisson draw, and their spread is about twice as wide. Flushes and reads are [wall, CPU]
milliseconds: on a machine that does something else too, the second is what they take.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from contest import setting
from large_run import frame_of, module_records

from ampscope.records import Frame, Role, RunSpec, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

OUT = Path(__file__).parent / "results" / "store_rate.json"
MODULES = 200
DRAWN = 40  # steps of frames that are drawn ahead of the clock, and written over and over
LOOKS = 15  # calls of each read; the median is kept


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--histograms", type=int, default=1_000_000)
    histograms = arguments.parse_args().histograms
    result: dict[str, object] = {"setting": setting()}
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("probe", "watch"):
            result[f"written_{kind}"] = written(Path(folder) / f"{kind}.db", kind, histograms)
            print(kind, result[f"written_{kind}"], flush=True)
        result["flat"] = flat(Path(folder) / "flat.db", 100_000)
        print(result["flat"], flush=True)
        result["reading"] = [
            reading(Path(folder) / f"{steps}.db", steps) for steps in (10_000, 100_000, 1_000_000)
        ]
        print(result["reading"], flush=True)
    result["load_average_after"] = setting()["load_average"]
    OUT.write_text(json.dumps(result, indent=1) + "\n")


def drawn(modules: int, steps: int, roles: tuple[Role, ...]) -> list[list[Frame]]:
    """Frames of ``steps`` steps, each of all roles."""
    rng = np.random.default_rng(0)
    centres = rng.normal(-14, 4, (len(roles), modules))
    out = []
    for step in range(steps):
        centres += rng.normal(0, 0.05, centres.shape)
        out.append([frame_of(rng, role, step, centres[n]) for n, role in enumerate(roles)])
    return out


def at_step(frame: Frame, step: int) -> Frame:
    return Frame(step, frame.role, frame.modules, frame.dtypes, frame.rows, frame.scale)


def written(store: Path, kind: str, histograms: int) -> dict[str, float]:
    """All modules and roles at every step, flushed every ten steps. ``watch`` thins as it goes."""
    steps = histograms // (MODULES * len(Role))
    frames = drawn(MODULES, DRAWN, tuple(Role))
    writer = RunWriter.create(store, RunSpec("gpt", kind=kind, steps=steps))
    writer.add_modules(module_records(MODULES))
    started, started_cpu = time.perf_counter(), time.process_time()
    for step in range(steps):
        writer.add_step(StepRecord(step, loss=3.0, scale=65536.0, grad_norm=1.0))
        for frame in frames[step % DRAWN]:
            writer.add_frame(at_step(frame, step))
        if step % 10 == 9:
            writer.flush()
    writer.finish(State.FINISHED)
    writer.close()
    elapsed_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
    size = store.stat().st_size
    return {
        "histograms": histograms,
        "seconds": round(elapsed_s, 2),
        "histograms_per_s": round(histograms / elapsed_s),
        "histograms_per_cpu_s": round(histograms / cpu_s),
        "store_mib": round(size / 2**20, 1),
        "bytes_per_histogram": round(size / histograms, 1),
    }


def flat(store: Path, steps: int) -> dict[str, object]:
    """A watched run with frames at every step: medians of a flush of ten steps, tenth by tenth."""
    modules, per_flush = 20, 10
    frames = drawn(modules, DRAWN, (Role.WEIGHT_GRAD,))
    writer = RunWriter.create(store, RunSpec("gpt", kind="watch", steps=steps))
    flushes_s: list[list[float]] = []
    for step in range(steps):
        skipped = step % 2000 == 1999
        writer.add_step(StepRecord(step, loss=3.0, scale=65536.0, skipped=skipped))
        writer.add_frame(at_step(frames[step % DRAWN][0], step))
        if step % per_flush == per_flush - 1:
            flushes_s.append(clocked(writer.flush))
    writer.close()
    tenths = np.median(np.reshape(flushes_s, (10, -1, 2)), axis=1) * 1e3
    with Reader(store) as reader:
        kept = len(reader.frame_spans(writer.run_id, Role.WEIGHT_GRAD))
    return {
        "steps": steps,
        "modules": modules,
        "steps_per_flush": per_flush,
        "flush_ms_by_tenth": [[round(t, 2) for t in pair] for pair in tenths.tolist()],
        "slowest_flush_ms": [
            round(max(column) * 1e3, 1) for column in zip(*flushes_s, strict=True)
        ],
        "frames_kept": kept,
        "skipped_steps": steps // 2000,
        "store_mib": round(store.stat().st_size / 2**20, 1),
    }


def reading(store: Path, steps: int) -> dict[str, object]:
    """Overview and totals of a run with 0.01 % of bad steps and a scale that grows and falls."""
    rng = np.random.default_rng(0)
    losses = 3.0 + rng.normal(0, 0.1, steps)
    writer = RunWriter.create(store, RunSpec("gpt", kind="watch", steps=steps))
    started = time.perf_counter()
    scale = 65536.0
    for step in range(steps):
        skipped = step % 10_000 == 9_999
        scale = scale / 2 if step % 10_000 == 0 else scale * 2 if step % 10_000 == 2_000 else scale
        writer.add_step(
            StepRecord(step, loss=float(losses[step]), scale=scale, skipped=skipped, grad_norm=1.0)
        )
        if step % 1000 == 999:
            writer.flush()
    writer.close()
    seconds = time.perf_counter() - started
    with Reader(store) as reader:
        run = writer.run_id
        shown = reader.overview(run)
        times = {
            "overview_ms": timed(lambda: reader.overview(run)),
            "window_ms": timed(lambda: reader.overview(run, first=steps // 3, last=steps // 2)),
            "totals_ms": timed(lambda: reader.step_totals(run)),
            "run_ms": timed(lambda: reader.run(run)),
        }
    return {
        "steps": steps,
        "steps_per_s": round(steps / seconds),
        "shown": len(shown),
        **times,
        "store_mib": round(store.stat().st_size / 2**20, 1),
    }


def timed(function: Callable[[], object]) -> list[float]:
    """Medians in milliseconds."""
    taken = [clocked(function) for _ in range(LOOKS)]
    return [round(float(median) * 1e3, 2) for median in np.median(taken, axis=0)]


def clocked(function: Callable[[], object]) -> list[float]:
    """Wall and CPU seconds of one call."""
    started, started_cpu = time.perf_counter(), time.process_time()
    function()
    return [time.perf_counter() - started, time.process_time() - started_cpu]


if __name__ == "__main__":
    main()
