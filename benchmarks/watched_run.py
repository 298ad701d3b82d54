"""A synthetic watched run of any length, written as `ampscope.watch` writes one: kind "watch",
every k-th step with histograms, a few skips, older frames thinned by the store as they come.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
from large_run import ELEMENTS, frame_of, module_records

from ampscope.records import (
    Cadence,
    Event,
    Frame,
    Machine,
    NonFiniteRecord,
    Role,
    RunSpec,
    State,
    StepRecord,
)
from ampscope.store.writer import RunWriter

ROLES = (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)
SKIP_EVERY = 1000  # a healthy fp16 training skips about once in a growth interval of 2,000
DIFFERENT = 16  # frames a role that are drawn; a Poisson draw of all would take longer than writing
FLUSH_EVERY = 50  # steps; the watcher flushes every 0.5 s
BATCH_NOISE = 0.05


def write_watched(store: Path, modules: int, steps: int, every: int) -> str:
    """The run, finished; three minutes for 200 modules, 100,000 steps, every 10th with frames."""
    rng = np.random.default_rng(0)
    spec = RunSpec(
        "train.py",
        kind="watch",
        size="",
        precision="",
        steps=0,
        policy="native",
        cadence=Cadence(every, 0, 0),
        label=f"watched {steps:,} steps",
    )
    writer = RunWriter.create(store, spec)
    writer.start(Machine("cpu", "benchmark", "native"))
    writer.add_modules(module_records(modules))
    pool = {role: _pool(rng, role, modules) for role in ROLES}
    for step in range(steps):
        skipped = step % SKIP_EVERY == 3
        writer.add_step(_step(rng, step, skipped=skipped))
        if step % every == 0:
            for role in ROLES:
                frame = pool[role][step // every % DIFFERENT]
                writer.add_frame(dataclasses.replace(frame, step=step))
        if skipped:
            writer.add_event(Event(step, "nonfinite", "backward", "Gradients were not finite."))
            writer.add_nonfinite(
                NonFiniteRecord(step, f"h.{i}.weight", order, ELEMENTS, 1, 2, 3)
                for order, i in enumerate(range(modules, 0, -1))
            )
        if step % FLUSH_EVERY == FLUSH_EVERY - 1:
            writer.flush()
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def _pool(rng: np.random.Generator, role: Role, modules: int) -> list[Frame]:
    centres = rng.normal(-14, 4, modules)
    return [frame_of(rng, role, 0, centres + rng.normal(0, 0.2, modules)) for _ in range(DIFFERENT)]


def _step(rng: np.random.Generator, step: int, *, skipped: bool) -> StepRecord:
    loss = 1.5 + 3.0 / (1 + step / 500) + BATCH_NOISE * float(rng.normal())
    return StepRecord(
        step,
        loss=loss,
        scale=2.0**16,
        growth_counter=step % SKIP_EVERY,
        skipped=skipped,
        grad_norm=math.inf if skipped else 1.0 + BATCH_NOISE * float(rng.normal()),
        lr=1e-3,
        step_time_s=0.2 + 0.01 * float(rng.random()),
        overhead_s=0.001,
    )
