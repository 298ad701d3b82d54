"""An untouched script in several precisions: one process each, interleaved over seeds.

A script's steps cannot be stopped half way, so whole runs take turns. A script that seeds itself
makes the same run under every seed; then seeds say nothing, which shows as a spread of zero.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampscope.errors import BadInput, Cancelled
from ampscope.files import TemporaryFolder
from ampscope.launcher.children import started
from ampscope.measure.timing import Limit, summary
from ampscope.measure.training_steps import WARM_UP
from ampscope.records import LossCurve, ProcessPeak, RunSpec, StepTimes
from ampscope.store.writer import RunWriter

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
LEAST = WARM_UP + 2  # steps that tell anything
START_S = 15.0  # for a process to import torch on a busy machine, beside its share of the time
LEAST_RUN_S = 9.0  # importing torch, and some steps
IMPORT_S = 5.0  # what that usually takes, with the script's own imports
_NO_PHASES = (
    "Of an untouched script whole steps are timed: its phases, the split of its memory and other "
    "batch sizes need a workload file."
)


def compare_script(
    spec: RunSpec, writer: RunWriter, is_cancelled: Callable[[], bool], is_cuda: bool
) -> str:
    """Every precision under every seed; one sentence on what could not be measured. Raises
    BadInput when the script makes too few steps, or fails in every precision."""
    wrong = [name for name in spec.precisions if name not in PRECISIONS]
    if wrong:
        raise BadInput(f"A script can be compared in {', '.join(PRECISIONS)}; not in {wrong[0]}.")
    limit, notes = Limit(spec.time_limit_s), [_NO_PHASES]
    seconds: dict[str, list[float]] = {name: [] for name in spec.precisions}
    seeds = max(1, min(spec.seeds, int(limit.left_s() / (len(spec.precisions) * LEAST_RUN_S))))
    if seeds < spec.seeds:
        notes.append(f"{seeds} of {spec.seeds} seeds, to stay within {spec.time_limit_s:g} s.")
    left = len(spec.precisions) * seeds
    failed: dict[str, str] = {}
    for number in range(seeds):
        first = number % len(spec.precisions)
        for name in (*spec.precisions[first:], *spec.precisions[:first]):
            if is_cancelled():
                raise Cancelled(f"Cancelled with {left} runs left.")
            share_s = limit.left_s() / left
            left -= 1
            if name in failed:
                continue
            found = _run(spec, name, spec.seed + number, share_s, is_cuda)
            if found is None or len(found["losses"]) < LEAST:
                failed.setdefault(name, _why(name, found))
                continue
            seconds[name] += found["seconds"][WARM_UP - 1 :]
            losses = tuple(found["losses"])
            writer.add_result(LossCurve(name, spec.seed + number, losses, tuple(found["skipped"])))
            if not number and found["peak_bytes"] is not None:
                what = "CUDA's allocator" if is_cuda else "the process above Python and torch"
                writer.add_result(ProcessPeak(name, found["peak_bytes"], what, time.time()))
            if found["problem"]:
                notes.append(_why(name, found))
            if found["foreign"]:
                notes.append(f"{name}: the script's own autocast is in {found['foreign']}.")
            writer.flush()
    if len(failed) == len(spec.precisions):
        raise BadInput(next(iter(failed.values())))
    for name, taken in seconds.items():
        if taken:
            step = summary(taken)
            writer.add_result(StepTimes(name, 0, step, None, None, None, None, time.time()))
    return " ".join(dict.fromkeys([*notes, *failed.values()]))


def _run(
    spec: RunSpec, precision: str, seed: int, share_s: float, is_cuda: bool
) -> dict[str, Any] | None:
    """What one run of the script wrote; None when it wrote nothing."""
    with TemporaryFolder() as folder:
        out = Path(folder) / "steps.json"
        command = [*started("ampscope.ext.compare.measure.script_timing"), "--out", str(out)]
        command += ["--precision", precision, "--steps", str(spec.steps), "--seed", str(seed)]
        command += ["--seconds", f"{max(share_s - IMPORT_S, 1.0):.1f}"]
        command.append(spec.workload)
        hidden = {} if is_cuda else {"CUDA_VISIBLE_DEVICES": ""}
        try:
            subprocess.run(
                [*command, *spec.args],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=max(share_s, 1.0) + START_S,
                check=False,
                env={**os.environ, **hidden},
            )
        except subprocess.TimeoutExpired:
            return None
        if not out.exists():
            return None
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def _why(name: str, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"{name}: the script exited without reporting an error, or no step ended in time."
    if found["problem"]:
        return f"{name}: the script failed after {len(found['losses'])} steps. {found['problem']}"
    return (
        f"{name}: the script made {len(found['losses'])} optimizer steps; a comparison needs "
        f"{LEAST}. Let it train longer, or raise --time-limit."
    )
