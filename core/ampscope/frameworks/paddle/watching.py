"""All instruments at once: what trains inside the block is watched, and changed by settings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ampscope.frameworks.paddle.emulation import Emulation
from ampscope.frameworks.paddle.half_parameters import HalfParameters
from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.layer_watch import LayerWatch
from ampscope.frameworks.paddle.op_watch import OpCounts
from ampscope.frameworks.paddle.regions import OpenRegion
from ampscope.frameworks.paddle.scalers import Scalers
from ampscope.frameworks.paddle.settings_applied import (
    AppliedSettings,
    changed_decorating,
    changed_regions,
)
from ampscope.frameworks.paddle.step_watch import StepWatch
from ampscope.frameworks.paddle.versions import on_cpu
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.settings import Settings

_NO_EFFECT = ".*can only be enabled on CUDAPlace.*"  # Paddle on a CPU, where auto_cast is emulated


@contextmanager
def watching(recorder: Recorder, settings: Settings) -> Iterator[list[str]]:
    """Watch; the list fills with sentences on what could not be seen or done."""
    cpu, notes = on_cpu(), list[str]()
    region = OpenRegion(settings.precision)
    emulation = Emulation(region) if cpu else None
    if emulation is not None:
        recorder.half_seen = emulation.halves  # one set: what ops tell, and what layers put out
    applied = AppliedSettings(settings, region, emulation)
    half = HalfParameters(settings.precision)
    paths = LayerPaths()
    layers = LayerWatch(
        recorder,
        paths,
        applied.in_fp32,
        emulation,
        applied.around if settings.fp32_modules else None,
    )
    steps = StepWatch(recorder, paths, lambda: half.master_grad)
    if emulation is not None:
        _count_ops(recorder, emulation, layers, steps)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        if emulation is not None:
            warnings.filterwarnings("ignore", _NO_EFFECT, UserWarning)
            stack.enter_context(half.active())
            stack.enter_context(emulation.active())
        else:
            stack.enter_context(changed_regions(settings.precision))
            stack.enter_context(changed_decorating(settings.precision))
        scalers = Scalers(settings, on_cpu=cpu)
        for part in (scalers, steps, applied, layers):
            stack.enter_context(_active(part))
        try:
            yield notes
        finally:
            steps.end()
    notes += applied.notes
    if compiled := paths.compiled():
        named = ", ".join(path or "the model" for path in compiled)
        rounded = ", and on a CPU it is not rounded" if cpu else ""
        notes.append(
            f"paddle.jit.to_static has compiled {named}: what runs there is not seen{rounded}."
        )


def _count_ops(
    recorder: Recorder, emulation: Emulation, layers: LayerWatch, steps: StepWatch
) -> None:
    """In the steps whose ops are wanted; those of an optimizer's step are not the model's."""
    counts = OpCounts(lambda: recorder.index_of(layers.path) if layers.paths.roots else None)

    def begins() -> None:
        recorder.ops.add(counts.take())
        emulation.op_seen = None

    def ended() -> None:
        counts.take()
        emulation.op_seen = counts if recorder.wants_ops else None

    steps.begins, steps.ended = begins, ended
    ended()


def _active(part: Any) -> Any:
    return part.active()
