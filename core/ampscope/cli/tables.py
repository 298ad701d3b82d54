"""Runs as tables for the terminal and as JSON for programs."""

from __future__ import annotations

import dataclasses
import math
from datetime import datetime
from typing import TypedDict

from rich.markup import escape
from rich.table import Table

from ampscope.records import Role, RunInfo, StepRecord
from ampscope.store.reader import Reader


class RunJson(TypedDict):
    """One run as ``--json`` prints it; non-finite numbers are the strings nan, inf and -inf."""

    id: str
    title: str
    state: str
    message: str
    policy: str | None
    device: str | None
    spec: dict[str, object]
    steps: int
    skipped: int
    first_loss: float | str | None
    last_loss: float | str | None
    last_scale: float | str | None
    underflow: dict[str, dict[str, int]]
    overhead_share: float | None


def number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity."""
    if value is None or math.isfinite(value):
        return value
    return str(value)


def run_as_json(reader: Reader, info: RunInfo) -> RunJson:
    steps = reader.steps(info.id)
    machine = info.machine
    return RunJson(
        id=info.id,
        title=info.title,
        state=str(info.state),
        message=info.message,
        policy=machine.policy if machine else None,
        device=machine.device_name if machine else None,
        spec=dataclasses.asdict(info.spec),
        steps=len(steps),
        skipped=sum(s.skipped for s in steps),
        first_loss=number(steps[0].loss) if steps else None,
        last_loss=number(steps[-1].loss) if steps else None,
        last_scale=number(steps[-1].scale) if steps else None,
        underflow=underflow(reader, info.id),
        overhead_share=overhead_share(steps),
    )


def underflow(reader: Reader, run_id: str) -> dict[str, dict[str, int]]:
    """The three counts by role, over all shadow steps and modules."""
    sums: dict[str, dict[str, int]] = {}
    for record in reader.shadows(run_id):
        part = sums.setdefault(
            record.role, {"total": 0, "lost": 0, "subnormal": 0, "zero_before": 0}
        )
        for name in part:
            part[name] += int(getattr(record, name))
    return sums


def overhead_share(steps: list[StepRecord]) -> float | None:
    """Instruments' time as a share of the bare step time; the first step warms caches up."""
    timed = steps[1:] or steps
    bare = sum(s.step_time_s or 0.0 for s in timed)
    return sum(s.overhead_s or 0.0 for s in timed) / bare if bare else None


def probe_table(reader: Reader, infos: list[RunInfo]) -> Table:
    table = Table(title=_title(infos), title_justify="left")
    table.caption = "lost, subnormal, zero before: share of all gradients at the shadow's steps"
    table.caption_justify = "left"
    for name in ("run", "precision", "steps"):
        table.add_column(name, no_wrap=True)
    for name in ("loss", "scale", "skips", "lost", "subnormal", "zero before"):
        table.add_column(name, justify="right")
    for info in infos:
        steps = reader.steps(info.id)
        counts = underflow(reader, info.id).get(Role.GRAD_OUTPUT)
        three = (
            tuple(_share(counts[n], counts["total"]) for n in ("lost", "subnormal", "zero_before"))
            if counts
            else ("–",) * 3
        )
        table.add_row(
            info.id[:8],
            info.spec.precision,
            f"{len(steps)}/{info.spec.steps}",
            f"{_loss(steps[0].loss)} → {_loss(steps[-1].loss)}" if steps else "none",
            _scale(steps[-1].scale) if steps else "none",
            str(sum(s.skipped for s in steps)),
            *three,
        )
    return table


def runs_table(infos: list[RunInfo]) -> Table:
    table = Table()
    for name in ("run", "started", "title", "state", "steps", "device", "policy", "message"):
        table.add_column(name)
    for info in infos:
        machine = info.machine
        table.add_row(
            info.id,
            datetime.fromtimestamp(info.created).strftime("%Y-%m-%d %H:%M:%S"),
            escape(info.title),
            str(info.state),
            str(info.steps_done),
            machine.device if machine else "",
            machine.policy if machine else "",
            escape(info.message),
        )
    return table


def _title(infos: list[RunInfo]) -> str:
    machine = next((i.machine for i in infos if i.machine), None)
    if machine is None:
        return ""
    policy = {
        "rehearsal": "rehearsing CUDA's autocast lists and Tensor Core arithmetic",
        "native": "the CPU's own autocast lists and kernels",
        "cuda": "CUDA",
    }[machine.policy]
    return escape(f"{machine.device_name}: {policy}")


def _share(count: int, total: int) -> str:
    return f"{count / total:.2%}" if total else "none"


def _loss(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.4g}"


def _scale(value: float | None) -> str:
    if value is None:
        return "no scaler"
    exponent = math.log2(value) if value > 0 else 0.5
    return f"2^{exponent:.0f}" if exponent == round(exponent) else f"{value:g}"
