"""Precisions side by side: the same model, batches and random state in each, interleaved.

    for each seed:
        build one training per precision, from the same weights
        for each step:
            one step in every precision, on the same batch, the first one another every time
    then, of the last seed's trainings: the share of casts, what memory is for, time at other batch
    sizes, and energy where the device has a counter

Drift (a processor that gets warm, another program that starts) falls on all precisions alike.

An untouched script is compared by :func:`compare_script`, one process per precision and seed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map

from ampscope.control import BASELINE
from ampscope.errors import BadInput, Cancelled
from ampscope.files import TemporaryFolder
from ampscope.launcher.children import started
from ampscope.measure.live_bytes import LiveBytes
from ampscope.measure.timing import mark, summary, synchronize
from ampscope.records import (
    EnergyUse,
    LossCurve,
    MemorySplit,
    ProcessPeak,
    RunSpec,
    StepTimes,
)
from ampscope.runner.probe import prepare
from ampscope.runner.training import Training, default_step, training_step
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import Batch, iterate

WARM_UP = 2  # steps that are not timed: kernels are chosen, optimizers make their state
LEAST_TIMED = 2
SLOW = 5.0  # times the fastest: half-precision matmuls without an instruction for them
STEPS_SHARE = 0.6  # of the time limit, for the steps of all seeds


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Compare ``spec.precisions``; one sentence on what could not be measured."""
    if spec.control == BASELINE:
        return compare_script(spec, writer, is_cancelled, device.type == "cuda")
    limit = Limit(spec.time_limit_s)
    trainings: Trainings = {}
    taken: dict[str, list[StepSeconds]] = {name: [] for name in spec.precisions}
    plan: _Plan | None = None
    for number in range(spec.seeds):
        trainings.clear()
        gc.collect()  # the last seed's models go before the next ones come
        seeded = dataclasses.replace(spec, seed=spec.seed + number)
        trainings.update(prepared(seeded, device))
        together = Together(trainings, seeded, is_cancelled)
        if plan is None:
            together.train(dict.fromkeys(trainings, WARM_UP))
            plan = _planned(spec, together.last_s(), limit)
        for name, seen in together.train(plan.steps(number)).items():
            if seen:
                taken[name] += seen[WARM_UP:]
                writer.add_result(_curve(name, seeded.seed, seen))
        writer.flush()
    assert plan is not None
    notes = list(plan.notes)
    samples = _samples(spec, next(iter(trainings.values())), notes)
    for name, seen in taken.items():
        share = cast_share(trainings[name], batch_of(trainings[name], spec))
        writer.add_result(step_times(name, samples, seen, share))
        writer.flush()
    memory(trainings, spec, samples, writer, skipped=plan.slow)
    fast = {name: training for name, training in trainings.items() if name not in plan.slow}
    slowest = max(seen[-1].step for name, seen in taken.items() if name in fast)
    other_sizes(fast, spec, samples, writer, limit, is_cancelled, slowest)
    notes += energy(fast, spec, samples, writer, limit)
    return " ".join(notes)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Steps per seed in each precision; those that are far slower than the rest train once."""

    usual: int
    slow: Mapping[str, int]
    names: tuple[str, ...]
    notes: tuple[str, ...]

    def steps(self, seed: int) -> dict[str, int]:
        return {
            n: self.usual if n not in self.slow else self.slow[n] * (seed == 0) for n in self.names
        }


def _planned(spec: RunSpec, seconds: Mapping[str, float], limit: Limit) -> _Plan:
    """What fits into the steps' share of the time limit, by what the first steps took."""
    left_s = spec.time_limit_s * STEPS_SHARE - limit.gone_s()
    fastest = min(seconds.values())
    slow, notes = {}, []
    for name, step_s in seconds.items():
        if step_s > SLOW * fastest and step_s * spec.seeds * spec.steps * len(seconds) > left_s:
            steps = WARM_UP + max(int(left_s / len(seconds) / step_s) - WARM_UP, LEAST_TIMED)
            slow[name] = min(steps, spec.steps)
            notes.append(
                f"{name} takes {step_s / fastest:.0f} times as long as the fastest here: it made "
                f"{slow[name]} steps of one seed, which gives its time and not its loss."
            )
            left_s -= slow[name] * step_s
    rest_s = sum(step_s for name, step_s in seconds.items() if name not in slow)
    fits = int(left_s / max(rest_s * spec.seeds, 1e-9))
    usual = min(spec.steps, max(fits, WARM_UP + LEAST_TIMED))
    if usual < spec.steps:
        notes.append(
            f"{usual} steps per seed instead of {spec.steps:,}, to stay within the time limit of "
            f"{spec.time_limit_s:g} s."
        )
    return _Plan(usual, slow, tuple(seconds), tuple(notes))


def _curve(name: str, seed: int, seen: list[StepSeconds]) -> LossCurve:
    skipped = tuple(number for number, step in enumerate(seen) if step.skipped)
    return LossCurve(name, seed, tuple(step.loss for step in seen), skipped)


def _samples(spec: RunSpec, training: Training, notes: list[str]) -> int:
    """Samples per step; 0 where the batch dimension is unknown."""
    try:
        return batch_size(batch_of(training, spec), spec.workload)
    except BadInput as error:
        notes.append(str(error))
        return 0


# An untouched script in several precisions: one process each, interleaved over seeds.
#
# A script's steps cannot be stopped half way, so whole runs take turns. A script that seeds itself
# makes the same run under every seed; then seeds say nothing, which shows as a spread of zero.


PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
LEAST = WARM_UP + 2  # steps that tell anything
START_S = 15.0  # for a process to import torch on a busy machine, beside its share of the time
LEAST_RUN_S = 9.0  # importing torch, and some steps
IMPORT_S = 5.0  # what that usually takes, with the script's own imports


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


_NO_PHASES = (
    "Of an untouched script whole steps are timed: its phases, the split of its memory and other "
    "batch sizes need a workload file."
)


def _run(
    spec: RunSpec, precision: str, seed: int, share_s: float, is_cuda: bool
) -> dict[str, Any] | None:
    """What one run of the script wrote; None when it wrote nothing."""
    with TemporaryFolder() as folder:
        out = Path(folder) / "steps.json"
        command = [*started("ampscope.measure.script_timing"), "--out", str(out)]
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


# What is measured beside the steps of a comparison: memory, other batch sizes, energy.


OTHER_SIZES = (4, 16)  # times the batch, while there is time: does a larger batch pay?
OTHER_STEPS = 3
ENERGY_S = 2.0  # in a row; NVML's counter moves every 20 to 100 ms
USABLE_SHARE = 0.9  # of the time limit; what ends at it has lost its results


class Limit:
    """The time limit, of which a little is left over for the end."""

    def __init__(self, limit_s: float) -> None:
        self._began = time.monotonic()
        self._limit_s = limit_s * USABLE_SHARE

    def gone_s(self) -> float:
        """Since the measurement began."""
        return time.monotonic() - self._began

    def left_s(self) -> float:
        """Negative when it has passed."""
        return self._limit_s - self.gone_s()


def step_times(
    name: str, samples: int, seen: list[StepSeconds], share: float | None, *, is_base: bool = True
) -> StepTimes:
    """Medians and quartiles over steps."""
    phases = list(zip(*(s.phases for s in seen if s.phases is not None), strict=True))
    forward, backward, optimizer = map(summary, phases) if phases else (None, None, None)
    step = summary([s.step for s in seen])
    return StepTimes(name, samples, step, forward, backward, optimizer, share, time.time(), is_base)


def memory(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, skipped: Container[str]
) -> None:
    """At the batch itself and, where it can be enlarged, at twice that: what grows and what not.
    The second is left out for what is ``skipped``."""
    for name, training in trainings.items():
        for factor in (1, 2) if samples and name not in skipped else (1,):
            batch = batch_of(training, spec, samples * factor)
            writer.add_result(memory_split(training, batch, name, samples * factor, factor == 1))
    writer.flush()


def memory_split(
    training: Training, batch: Batch, name: str, samples: int, is_base: bool = True
) -> MemorySplit:
    """Of one step, whose gradients are made anew."""
    device, peak = training.device, None
    training.optimizer.zero_grad(set_to_none=True)
    with LiveBytes(training.model, training.optimizer, batch) as live:
        own, others = live.peak, 0
        if device.type == "cuda":  # the other precisions' models are on the device as well
            others = torch.cuda.memory_allocated(device) - own
            torch.cuda.reset_peak_memory_stats(device)
        training_step(training, batch)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) - others
    return MemorySplit(
        name, samples, **live.at_peak, device_peak=peak, measured_at=time.time(), is_base=is_base
    )


def other_sizes(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, limit: Limit,
    is_cancelled: Callable[[], bool], slowest_s: float,
) -> None:  # fmt: skip
    """Time at larger batches, while there is time: where AMP begins to pay, or stops to."""
    for factor in OTHER_SIZES if samples else ():
        rounds = len(trainings) * (OTHER_STEPS + 1)
        if is_cancelled() or limit.left_s() < rounds * slowest_s * factor:
            return
        seen: dict[str, list[StepSeconds]] = {name: [] for name in trainings}
        batches = {n: batch_of(t, spec, samples * factor) for n, t in trainings.items()}
        for number, (name, training) in itertools.product(
            range(OTHER_STEPS + 1), trainings.items()
        ):
            try:
                step = timed_step(training, batches[name])
            except (MemoryError, torch.OutOfMemoryError):
                return
            if number:  # the first chooses kernels
                seen[name].append(step)
            if limit.left_s() < 0:
                return
        for name, steps in seen.items():
            writer.add_result(step_times(name, samples * factor, steps, None, is_base=False))
        writer.flush()


def energy(
    trainings: Trainings, spec: RunSpec, samples: int, writer: RunWriter, limit: Limit
) -> list[str]:
    """Steps in a row in one precision: a counter is too slow for turns."""
    device = next(iter(trainings.values())).device
    found = energy_counter(device)
    if found is None:
        return [NO_ENERGY_OF_A_SLICE if is_mig_slice(device) else NO_ENERGY]
    source, read = found
    for name, training in trainings.items():
        if limit.left_s() < ENERGY_S:
            return ["There was no time to measure the energy of every precision."]
        batch = batch_of(training, spec)
        joules, steps = energy_of(partial(timed_step, training, batch), read, ENERGY_S)
        if not joules:
            writer.flush()
            return [f"Energy in {name} was not measured: its counter stands still."]
        writer.add_result(EnergyUse(name, joules, steps, samples, source, time.time()))
    writer.flush()
    return []


# Trainings of one seed in several precisions, interleaved.


Trainings = dict[str, Training]


def prepared(spec: RunSpec, device: torch.device) -> Trainings:
    """One training per precision, each from the weights and batches of the spec's seed."""
    return {n: prepare(dataclasses.replace(spec, precision=n), device) for n in spec.precisions}


class Together:
    """The trainings of one seed."""

    def __init__(
        self, trainings: Trainings, spec: RunSpec, is_cancelled: Callable[[], bool]
    ) -> None:
        self._trainings, self._spec, self._is_cancelled = trainings, spec, is_cancelled
        self._seen: dict[str, list[StepSeconds]] = {name: [] for name in trainings}
        self._batches = {name: batches_of(training, spec) for name, training in trainings.items()}

    def last_s(self) -> dict[str, float]:
        """Time of the last step in each precision."""
        return {name: seen[-1].step for name, seen in self._seen.items() if seen}

    def train(self, steps: Mapping[str, int]) -> dict[str, list[StepSeconds]]:
        """Until every precision has made so many steps."""
        names = list(self._trainings)
        for number in range(max(steps.values())):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                if len(self._seen[name]) > number or steps[name] <= number:
                    continue
                if self._is_cancelled():
                    raise Cancelled(f"Cancelled after {number} steps.")
                training = self._trainings[name]
                batch = training.real_batch(next(self._batches[name]))
                # The same random numbers in every precision, whichever comes first.
                torch.manual_seed(self._spec.seed * 1_000_003 + number)
                self._seen[name].append(timed_step(training, batch))
        return self._seen


def batches_of(training: Training, spec: RunSpec, samples: int = 0) -> Iterator[Batch]:
    """Without end; ``samples`` each, else what the spec asks for, else as they come."""
    source = iterate(training.workload)
    wanted = samples or spec.batch
    return resized(source, wanted, spec.workload) if wanted else source


def batch_of(training: Training, spec: RunSpec, samples: int = 0) -> Batch:
    """One of these, as the model is fed it."""
    return training.real_batch(next(batches_of(training, spec, samples)))


# The usual training step with marks between its phases: forward, backward, optimizer.


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """One step: the host's clock around all of it, and its phases (None for a custom step)."""

    step: float
    phases: tuple[float, float, float] | None  # forward, backward, optimizer
    loss: float
    skipped: bool


class _Marks:
    """Moments of a step: the host's clock on a CPU, events of the device on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[object] = []

    def __call__(self) -> None:
        if self._is_cuda:
            event = mark()
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> tuple[float, float, float]:
        """Between the four marks; the device has been waited for."""
        spans = []
        for first, last in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(first, float) and isinstance(last, float):
                spans.append(last - first)
            else:
                spans.append(first.elapsed_time(last) / 1000)  # type: ignore[attr-defined]  # Event
        return spans[0], spans[1], spans[2]


def timed_step(training: Training, batch: Batch) -> StepSeconds:
    """One optimizer step on ``batch``, which is on the device already."""
    scaler, device = training.scaler, training.device
    scale = scaler.get_scale() if scaler.is_enabled() else 1.0
    synchronize(device)
    marks = _Marks(device)
    started = time.perf_counter()
    if training.workload.step is not None:
        loss = training_step(training, batch)
    else:
        loss = default_step(training, batch, marks)
    synchronize(device)
    elapsed_s = time.perf_counter() - started
    phases = None if training.workload.step is not None else marks.seconds()
    skipped = scaler.is_enabled() and scaler.get_scale() < scale
    return StepSeconds(elapsed_s, phases, float(loss.detach()), skipped)


# Batches of another size: the samples of a workload's own batches, repeated or cut off.
#
# The first dimension of every tensor in a batch is taken for the batch dimension; where they
# differ there is none, and that is said. Time and memory depend on shapes, not on which samples
# come twice.


def batch_size(batch: Batch, name: str = "the workload") -> int:
    """Samples in a batch. Raises BadInput where the batch dimension is unknown."""
    leaves = tree_leaves(batch, is_leaf=lambda part: isinstance(part, PackedSequence))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    if any(isinstance(leaf, PackedSequence) for leaf in leaves):
        raise BadInput(f"A batch of {name} is a PackedSequence, which has no batch dimension.")
    if not tensors:
        raise BadInput(f"A batch of {name} holds no tensor with a dimension, so none to enlarge.")
    found = sorted({tensor.shape[0] for tensor in tensors})
    if len(found) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors[:4])
        raise BadInput(
            f"No batch dimension was found in {name}: the tensors of a batch begin with "
            f"different numbers ({shapes}). Give every tensor one row per sample."
        )
    if not found[0]:
        raise BadInput(f"A batch of {name} holds no sample.")
    return found[0]


def resized(batches: Iterator[Batch], samples: int, name: str = "the workload") -> Iterator[Batch]:
    """Each batch with so many samples: cut off, or repeated from the beginning."""
    for batch in batches:
        rows = torch.arange(samples) % batch_size(batch, name)

        def chosen(leaf: object, rows: Tensor = rows) -> object:
            is_split = isinstance(leaf, Tensor) and leaf.dim() > 0
            return leaf[rows.to(leaf.device)] if is_split else leaf  # type: ignore[index, attr-defined]  # a Tensor

        yield tree_map(chosen, batch)


# How much of a step's op time goes into casts between floating-point formats, by torch.profiler.
#
# The profiler slows the step down, most of all small ops, so its step is not one of those timed;
# the share is that of the profiled step.


DeviceType = torch._C._autograd.DeviceType
CAST = "aten::_to_copy"  # every .to(dtype), autocast's own included


def cast_share(training: Training, batch: Batch) -> float | None:
    """0 … 1 of a step's time in ops; None where the profiler saw none."""
    is_cuda = training.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as seen:
        training_step(training, batch)
        synchronize(training.device)
    total = casts = 0.0
    for row in seen.key_averages():
        if row.device_type != DeviceType.CPU:
            continue  # a kernel's own row: the row of its op has that time as well
        own = row.self_device_time_total if is_cuda else row.self_cpu_time_total
        total += own
        if row.key == CAST:
            casts = row.device_time_total if is_cuda else row.cpu_time_total
    return min(casts / total, 1.0) if total else None


# Energy counters: NVML's total energy of a GPU, RAPL's of a CPU package (Linux powercap).


RAPL = Path("/sys/class/powercap/intel-rapl:0")  # package 0, also of AMD's processors since Zen
Counter: TypeAlias = Callable[[], float]  # joules since some moment


TICK_WAIT_S = 0.5  # for a counter that stands still
NO_ENERGY = "Energy was not measured: no counter that may be read here."
NO_ENERGY_OF_A_SLICE = (
    "Energy was not measured: NVML counts that of a whole GPU, and this is a MIG slice of one."
)


def energy_of(step: Callable[[], object], read: Counter, seconds: float) -> tuple[float, int]:
    """Joules and number of steps in at least so many seconds, from one tick of the counter to
    another: what it shows is up to 0.1 s old. What the device draws when idle is in it."""
    _wait_for_tick(read)
    before = last = read()
    began, steps = time.monotonic(), 0
    while True:
        step()
        steps += 1
        now, elapsed_s = read(), time.monotonic() - began
        if elapsed_s >= seconds and (now != last or elapsed_s >= seconds + TICK_WAIT_S):
            return now - before, steps
        last = now


def _wait_for_tick(read: Counter) -> None:
    first, ends = read(), time.monotonic() + TICK_WAIT_S
    while read() == first and time.monotonic() < ends:
        time.sleep(0.001)


def is_mig_slice(device: torch.device) -> bool:
    """Whether NVML knows the device as a part of a GPU alone."""
    return device.type == "cuda" and not _handle("GPU-", device) and bool(_handle("MIG-", device))


def energy_counter(device: torch.device, rapl: Path = RAPL) -> tuple[str, Counter] | None:
    """Name and reading of the device's counter; None where there is none that may be read."""
    return _nvml(device) if device.type == "cuda" else _powercap(rapl)


def _handle(prefix: str, device: torch.device) -> Any:
    """NVML's for the GPU or the slice; None where it knows no such one, or is not there."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"{prefix}{uuid}"
    if not named.startswith(prefix):
        return None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(named.encode())
    return None


def _nvml(device: torch.device) -> tuple[str, Counter] | None:
    handle = _handle("GPU-", device)
    with contextlib.suppress(Exception):  # no such GPU for NVML, or no counter
        import pynvml

        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules, from Volta on

        def read() -> float:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000

        return "NVML total energy", read
    return None


def _powercap(rapl: Path) -> tuple[str, Counter] | None:
    """Root alone may read it since Linux 5.10; the counter wraps, here at the range it states."""
    try:
        wraps_at = int((rapl / "max_energy_range_uj").read_text())
        last = int((rapl / "energy_uj").read_text())
    except (OSError, ValueError):
        return None
    wrapped = 0

    def read() -> float:
        nonlocal last, wrapped
        now = int((rapl / "energy_uj").read_text())
        wrapped += wraps_at if now < last else 0
        last = now
        return (wrapped + now) / 1e6

    return "RAPL, package 0", read
