"""Watched runs for the pages' tests, written by RunWriter as `ampscope.watch` writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import (
    Cadence,
    Event,
    Frame,
    Machine,
    ModuleRecord,
    Role,
    RunSpec,
    State,
    StepRecord,
)
from ampscope.store.writer import RunWriter

SPEC = RunSpec(
    workload="/home/me/train.py",
    kind="watch",
    size="",
    precision="",
    steps=0,
    policy="native",
    cadence=Cadence(10, 0, 0),
    label="night run",
)
MACHINE = Machine("cpu", "Test CPU", "native", host="node1")
MODULES = [
    ModuleRecord(0, "", "Net", is_leaf=False),
    ModuleRecord(1, "h.0.up", "Linear", "fp32", 100),
    ModuleRecord(2, "h.1.up", "Linear", "fp32", 100),
]
ONE = 1 + 149  # column of the exponent 0
COUNT = 100  # elements of one module that one step counts


def step(number: int, *, loss: float = 2.0, skipped: bool = False) -> StepRecord:
    is_bad = skipped or not math.isfinite(loss)
    return StepRecord(
        number,
        loss=loss,
        scale=1024.0,
        skipped=skipped,
        grad_norm=math.inf if is_bad else 1.0,
        step_time_s=0.25,
        overhead_s=0.001,
    )


def good(count: int) -> list[StepRecord]:
    """A search for the scale of two skips, then nothing to say."""
    return [step(i, loss=3.0 - i / 1000, skipped=i in (0, 2)) for i in range(count)]


def bad(count: int, since: int) -> list[StepRecord]:
    """NaN from one step on."""
    return [step(i, loss=math.nan if i >= since else 2.0) for i in range(count)]


def frame(number: int, role: Role = Role.WEIGHT_GRAD, times: int = 1) -> Frame:
    rows = np.zeros((2, RAW_LEN), np.int64)
    rows[:, ONE] = COUNT * times
    return Frame(number, role, (1, 2), ("fp32", "fp32"), rows, 1024.0)


def begun(
    store: Path,
    steps: Sequence[StepRecord],
    events: Sequence[Event] = (),
    spec: RunSpec = SPEC,
    frames: Sequence[Frame] = (),
) -> RunWriter:
    """Running, owned by this process."""
    writer = RunWriter.create(store, spec)
    writer.start(replace(MACHINE, host=f"node{spec.rank}"))
    writer.add_modules(MODULES)
    for record in steps:
        writer.add_step(record)
    for event in events:
        writer.add_event(event)
    for taken in frames:
        writer.add_frame(taken)
    writer.flush()
    return writer


def ended(writer: RunWriter, state: State = State.FINISHED, message: str = "") -> str:
    writer.finish(state, message)
    writer.close()
    return writer.run_id


def lost(writer: RunWriter) -> str:
    """State running, but the process that wrote it is no more."""
    writer._update(pid_started=-1.0)  # this pid now belongs to another process: ours
    writer.close()
    return writer.run_id


def of_rank(rank: int, world: int, spec: RunSpec = SPEC) -> RunSpec:
    return replace(spec, rank=rank, world=world, group="g1")
