"""All instruments at once, for a probe and a script: what trains inside the block is watched, and
changed by settings; and where that training runs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import paddle

from ampscope.ext.frameworks.adapters import ControlSettings, parse, wanted_gpu
from ampscope.ext.frameworks.paddle.applied_settings import (
    AppliedSettings,
    Scalers,
    change_precision,
)
from ampscope.ext.frameworks.paddle.decorated import HalfParameters
from ampscope.ext.frameworks.paddle.emulation import Emulation
from ampscope.ext.frameworks.paddle.layer_paths import LayerPaths
from ampscope.ext.frameworks.paddle.layers import LayerWatch
from ampscope.ext.frameworks.paddle.regions import OpenRegion
from ampscope.ext.frameworks.paddle.seen_ops import OpCounts
from ampscope.ext.frameworks.paddle.steps import StepWatch
from ampscope.ext.frameworks.recorder import FrameworkRecorder
from ampscope.patches import Patches
from ampscope.records import Machine, RunSpec
from ampscope.runner.child_frame import host_facts

_NO_EFFECT = ".*can only be enabled on CUDAPlace.*"  # Paddle on a CPU, where auto_cast is emulated


@contextmanager
def watching(recorder: FrameworkRecorder, settings: ControlSettings) -> Iterator[list[str]]:
    """Watch; the list fills with sentences on what could not be seen or done."""
    cpu, notes = on_cpu(), list[str]()
    region = OpenRegion(settings.precision)
    emulation = Emulation(region) if cpu else None
    if emulation is not None:
        recorder.half_seen = emulation.halves  # one set, for ops and for layers
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
    counted = None if emulation is None else _CountedOps(recorder, emulation, layers)
    steps = StepWatch(recorder, paths, half, counted)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        if emulation is not None:
            warnings.filterwarnings("ignore", _NO_EFFECT, UserWarning)
            stack.enter_context(half.active())
            stack.enter_context(emulation.active())
        patches = stack.enter_context(Patches())
        change_precision(patches, "" if cpu else settings.precision)
        scalers = Scalers(settings, on_cpu=cpu)
        for part in (scalers, steps, applied, layers):
            part.put_on(patches)
        try:
            yield notes
        finally:
            steps.end()
    notes += applied.notes()
    if compiled := paths.compiled():
        named = ", ".join(path or "the model" for path in compiled)
        rounded = ", and on a CPU it is not rounded" if cpu else ""
        notes.append(
            f"paddle.jit.to_static has compiled {named}: what runs there is not seen{rounded}."
        )


class _CountedOps:
    """In the steps whose ops are wanted; those of an optimizer's step are not the model's."""

    def __init__(
        self, recorder: FrameworkRecorder, emulation: Emulation, layers: LayerWatch
    ) -> None:
        self._recorder, self._emulation, self._layers = recorder, emulation, layers
        self._counts = OpCounts(self._module)
        self.step_ended()

    def step_begins(self) -> None:
        """The ops since the last step are the model's."""
        self._recorder.ops.add(self._counts.take())
        self._emulation.op_seen = None

    def step_ended(self) -> None:
        """Those of the step itself are not."""
        self._counts.take()
        self._emulation.op_seen = self._counts if self._recorder.wants_ops else None

    def _module(self) -> int | None:
        layers = self._layers
        return self._recorder.index_of(layers.path) if layers.paths.roots else None


def on_cpu() -> bool:
    """Whether Paddle computes on a CPU now."""
    return str(paddle.get_device()).startswith("cpu")


def machine(spec: RunSpec) -> Machine:
    """The device that Paddle uses now. Half on a CPU is emulated, and its scaler forced on."""
    cpu, here = on_cpu(), host_facts()
    # A watched training is not changed: on a CPU Paddle then computes everything in fp32.
    half = spec.kind != "watch" and "fp32" not in (spec.precision, parse(spec.control).precision)
    scaler = "" if not half else "forced" if cpu else "real"
    if spec.kind == "probe" and spec.precision != "fp16":
        scaler = ""
    return Machine(
        device="cpu" if cpu else str(paddle.get_device()).replace("gpu", "cuda"),
        device_name=here.cpu if cpu else str(paddle.device.cuda.get_device_name()),
        policy="rehearsal" if cpu and half else "native" if cpu else "cuda",
        capability="" if cpu else ".".join(map(str, paddle.device.cuda.get_device_capability())),
        python=here.python,
        platform=here.platform,
        host=here.host,
        framework="paddle",
        framework_version=str(paddle.__version__),
        arithmetic="emulated" if cpu and half else "real",
        scaler=scaler,
    )


def choose_device(spec: RunSpec) -> None:
    """Take the device that was asked for, if one was. Raises BadInput for one that is not there."""
    count = int(paddle.device.cuda.device_count())  # 0 in a build for CPUs
    if spec.device == "cpu":
        paddle.set_device("cpu")
    elif wanted_gpu(spec.device, count, "Paddle") is not None:
        paddle.set_device(spec.device.replace("cuda", "gpu"))
