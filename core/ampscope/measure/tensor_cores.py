"""Which matmuls of a training step use Tensor Cores (on a CPU: its instructions for half
matmuls): one step is recorded, then each of its matmuls is run alone.

The device's own arithmetic runs, never a rehearsal: this is about speed. The matmuls with most
FLOPs come first, so that a run that is stopped early has measured what matters.

The step is one of a workload, or of an unchanged script. Convolutions and attention count as
matmuls.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ampscope import records
from ampscope.capture.model_map import ModelMap, ModuleNumbers
from ampscope.capture.op_place import OpPlace
from ampscope.capture.op_trace import ATTENTION_FORMULAS
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.script_histograms import ScriptModels
from ampscope.capture.training_events import StepEvents, StepListener
from ampscope.control import BASELINE
from ampscope.errors import BadInput, Cancelled
from ampscope.hardware.capability import padded_sizes
from ampscope.hardware.cpu import read_cpu
from ampscope.measure.kernel_log import KernelProfile, OneDnnLog
from ampscope.measure.matmuls import WEIGHT_GRADIENT, MatmulCall, matmul, matmul_rate
from ampscope.measure.timing import synchronize, timed
from ampscope.numerics.formats import dtype_name
from ampscope.policy.precision import tf32_switches
from ampscope.runner.probe import prepare
from ampscope.runner.script_main import stage
from ampscope.runner.script_text import execute
from ampscope.runner.training import ProbeTraining, training_step
from ampscope.store.writer import RunWriter
from ampscope.workloads.protocol import iterate

LAUNCH_S = 10e-6  # what takes less on CUDA may wait for its launch
BUDGET_S = 0.15  # of one timing: 5 calls at least, 200 at most
LEAST_CALLS = 5
# A ceiling is the best of growing square matmuls; it stops growing when a call takes so long.
CEILING_SIZES = (256, 512, 1024, 2048, 4096, 8192)
CEILING_CALL_S = 0.25
COPY_ELEMENTS = {"cpu": 2**26, "cuda": 2**28}  # fp32, far beyond any cache
_HAVE_CONTROL = ("fp16", "bf16", "tf32")
_aten = torch.ops.aten
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **ATTENTION_FORMULAS,
}
_MASK = 10  # position of output_mask in convolution_backward


def measure(
    spec: records.RunSpec,
    device: torch.device,
    writer: RunWriter,
    is_cancelled: Callable[[], bool],
) -> str:
    """Record, then measure. Raises Cancelled between two matmuls, BadInput for a step that has
    none."""
    torch.manual_seed(spec.seed)
    is_script = spec.control == BASELINE
    step = script_step(spec, device) if is_script else _step(prepare(spec, device))
    found = step.found
    if not found:
        raise BadInput(
            "This step has no matmul, convolution or attention, so there is nothing that "
            "Tensor Cores could do in it."
        )
    writer.add_result(_whole(found, step.source, device))
    for rate in (copy_ceiling(device), *_ceilings(found, device)):
        writer.add_result(rate)
    writer.flush()
    order = sorted(range(len(found)), key=lambda i: -_flops(found[i]))
    alone: list[records.Matmul] = []
    for done, number in enumerate(order):
        if is_cancelled():
            raise Cancelled(f"Cancelled after {done} of {len(order)} matmuls.")
        kernels = step.kernels.get(number, ())
        alone.append(measured(found[number], step.names, kernels, device))
        writer.add_result(alone[-1])
        writer.flush_if_due()
    writer.flush()
    return notes(found, alone, device)


def notes(found: list[Found], alone: list[records.Matmul], device: torch.device) -> str:
    """What the figures of a step do not hold, in a sentence each."""
    said = []
    if count := sum(bool(one.note) for one in alone):
        said.append(f"{count} of {len(alone)} matmuls could not be run alone.")
    times = [one.timing.median_s for one in alone if one.timing and device.type == "cuda"]
    if count := sum(time_s < LAUNCH_S for time_s in times):
        said.append(
            f"{count} of {len(alone)} matmuls last less than {LAUNCH_S * 1e6:.0f} µs: their rates "
            "are those of launches, not of the GPU."
        )
    if unknown := sorted({one.unknown for one in found if one.unknown}):
        said.append(f"torch has no FLOPs for {', '.join(unknown)}; shares of FLOPs leave it out.")
    return " ".join(said)


def _whole(found: list[Found], source: str, device: torch.device) -> records.StepMatmuls:
    # torch calls AMD's GPUs "cuda" too, with a capability that means something else there.
    kind = "rocm" if device.type == "cuda" and torch.version.hip else device.type
    capability = ""
    if kind == "cuda":
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return records.StepMatmuls(
        device=kind,
        capability=capability,
        cpu_flags=read_cpu().flags if device.type == "cpu" else None,
        calls=sum(sum(one.places.values()) for one in found),
        flops=sum(map(_flops, found)),
        distinct=len(found),
        kernel_source=source,
    )


def _ceilings(found: list[Found], device: torch.device) -> list[records.Rate]:
    """Of every dtype in the step, and of fp32, which the controls are computed in."""
    dtypes = dict.fromkeys(["fp32", *(one.dtype for one in found)])
    return [rate for dtype in dtypes if (rate := ceiling(dtype, device)) is not None]


def _flops(one: Found) -> int:
    """Of all its calls in the step."""
    return one.flops * sum(one.places.values())


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step that was recorded."""

    names: dict[int, str]  # module -> path
    found: list[Found]
    kernels: dict[int, tuple[str, ...]]  # by a matmul's number
    source: str  # of the kernels' names


@dataclass(slots=True)
class Found:
    """One matmul of the step; equal ones are one."""

    call: MatmulCall
    dtype: str  # computed in; "tf32" is fp32 tensors with TF32 switched on
    flops: int  # of one call
    moved_bytes: int  # likewise
    unknown: str = ""  # why torch has no FLOPs for it; they are 0 then
    places: Counter[tuple[int, str]] = field(default_factory=Counter)  # (module, phase) -> calls


def _step(training: ProbeTraining) -> RecordedStep:
    """One step of a workload; on CUDA the second one."""
    model_map = ModelMap(training.model)
    batches = iterate(training.workload)
    kernels: KernelProfile | OneDnnLog
    if training.device.type == "cuda":
        # A first step chooses algorithms and loads kernels; its kernels are not those of training.
        training_step(training, training.real_batch(next(batches)))
        synchronize(training.device)
        kernels = KernelProfile()
    else:
        kernels = OneDnnLog()
    batch = training.real_batch(next(batches))
    with kernels, StepTrace(model_map, kernels) as trace:
        training_step(training, batch)
        synchronize(training.device)
    names = {record.index: record.path for record in model_map.records()}
    return RecordedStep(names, trace.found, kernels.kernels, kernels.source)


def script_step(spec: records.RunSpec, device: torch.device) -> RecordedStep:
    """The step between the first and the second step of the script's first optimizer, so that the
    first has warmed everything up; then the script is ended. A step that GradScaler skips counts
    too: its matmuls ran. Raises BadInput when it makes none, when it raises, and when it trains on
    another device than the one that is measured."""
    with ModulePaths() as paths, stage(spec.workload, spec.args):
        models = ScriptModels(paths)
        recording = _Recording(models, device)
        try:
            with StepEvents(recording):
                execute(spec.workload)
        except _Enough:
            pass
        except SystemExit as error:
            raise _too_few(recording.steps, f"called sys.exit({error.code})") from error
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise BadInput(f"The script raised {text}. Let it run by itself first.") from error
        finally:
            recording.close()
            models.close()
    if recording.steps < 2:
        raise _too_few(recording.steps, "ended")
    other = recording.trace.device
    if other not in ("", device.type):
        raise BadInput(
            f"The script trains on {other}, and {device.type} was to be measured: pass --device "
            f"{other}."
        )
    names = {record.index: record.path for record in models.take_records()}
    kernels = recording.kernels
    return RecordedStep({0: "", **names}, recording.trace.found, kernels.kernels, kernels.source)


def _too_few(steps: int, how: str) -> BadInput:
    made = "one optimizer step" if steps else "no optimizer step"
    return BadInput(f"The script {how} after {made}; two are needed to see one step's matmuls.")


class _Recording(StepListener):
    """Follows the steps of the first optimizer."""

    def __init__(self, models: ScriptModels, device: torch.device) -> None:
        self.kernels = KernelProfile() if device.type == "cuda" else OneDnnLog()
        self.trace = StepTrace(models, self.kernels)
        self.steps = 0
        self._device = device
        self._first: int | None = None  # id of the optimizer
        self._is_open = False

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        """Inside ``scaler.step()`` the scaler tells."""
        if scaler is None:
            self._stepped(optimizer)

    def after_scaler_step(
        self, optimizer: Optimizer, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        """Called after GradScaler's step, which may have left the optimizer's step out."""
        if not raised:
            self._stepped(optimizer)

    def close(self) -> None:
        """Stop recording, however far it came."""
        if self._is_open:
            self._is_open = False
            synchronize(self._device)
            self.trace.__exit__(None, None, None)
            self.kernels.__exit__(None, None, None)

    def _stepped(self, optimizer: Optimizer) -> None:
        self._first = id(optimizer) if self._first is None else self._first
        if id(optimizer) != self._first:
            return
        self.steps += 1
        if self.steps > 1:
            self.close()
            raise _Enough
        self._is_open = True
        self.kernels.__enter__()
        self.trace.__enter__()


class _Enough(BaseException):
    """Ends the script; no script catches it by the way."""


class Kernels(Protocol):
    """Learns which kernels ran for which matmul."""

    def mark(self, number: int) -> AbstractContextManager[object]: ...


class StepTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hook is untyped
    """Records matmuls while entered: their arguments' shapes, FLOPs, where in the step they ran,
    and what their kernels are called. :attr:`found` is in the order of first calls, and a matmul's
    number is its place there.

        with kernels, StepTrace(ModelMap(model), kernels) as trace:
            loss.backward()
        trace.found[0].call.dimensions(), trace.found[0].places

    A convolution's backward op computes two matmuls. It is run as two ops, one for each, which is
    what its kernels do anyway, so that each has its own FLOPs, kernels and time.
    """

    supports_higher_order_operators = True

    def __init__(self, names: ModuleNumbers, kernels: Kernels) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.found: list[Found] = []
        self.device = ""  # "cpu" | "cuda": where the first matmul ran
        self._numbers: dict[tuple[MatmulCall, str], int] = {}
        self._place = OpPlace(names)
        self._kernels = kernels

    def __enter__(self) -> StepTrace:
        self._place.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self._place.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        formula = _FORMULAS.get(getattr(func, "_overloadpacket", None))
        if formula is None:
            return func(*args, **(kwargs or {}))
        if func is _aten.convolution_backward.default and all(args[_MASK][:2]):
            of_input = self._recorded(func, formula, _masked(args, (True, False, False)), {})
            of_weight = (False, True, args[_MASK][2])
            rest = self._recorded(func, formula, _masked(args, of_weight), {})
            return of_input[0], rest[1], rest[2]
        return self._recorded(func, formula, args, kwargs or {})

    def _recorded(
        self, func: Any, formula: Callable[..., int], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = MatmulCall.of(func, args, kwargs)
        dtype = _computed_in(call, args)
        number = self._numbers.setdefault((call, dtype), len(self.found))
        with self._kernels.mark(number):
            out = func(*args, **kwargs)
        if number == len(self.found):
            places = (a.device.type for a in args if isinstance(a, Tensor))
            self.device = self.device or next(places, "")
            flops, unknown = 0, ""
            try:
                flops = int(formula(*args, **kwargs, out_val=out))
            except Exception as error:  # a form of the op that the formula does not know
                unknown = f"{call.op}: {type(error).__name__}"
            if call.part == WEIGHT_GRADIENT:
                # torch's formula takes every input channel with every output channel, and a
                # grouped convolution takes only those of one group with each other.
                flops //= call.groups
            self.found.append(Found(call, dtype, flops, step_moved_bytes(call, out), unknown))
        self.found[number].places[self._place.now()] += 1
        return out


def _masked(args: tuple[Any, ...], mask: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    return (*args[:_MASK], list(mask), *args[_MASK + 1 :])


def _computed_in(call: MatmulCall, args: tuple[Any, ...]) -> str:
    """The dtype of its first operand; fp32 is "tf32" where CUDA may round to that."""
    first = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
    if first is None:
        return "other"
    if first.dtype is torch.float32 and first.device.type == "cuda":
        backends: Any = torch.backends  # Any: the newer switches have no type hints
        switch = backends.cudnn.conv if "conv" in call.name else backends.cuda.matmul
        return "tf32" if switch.fp32_precision == "tf32" else "fp32"
    return dtype_name(first.dtype)


def step_moved_bytes(call: MatmulCall, out: Any) -> int:
    """Every operand read once and every result written once."""
    read = sum(t.elements * t.dtype.itemsize for t in call.tensors())
    results = out if isinstance(out, tuple) else (out,)
    if call.part == WEIGHT_GRADIENT:  # the weights are an argument for their shape alone
        weight = call.args[2]
        read -= weight.elements * weight.dtype.itemsize
    elif call.part:  # and so is the input
        data = call.args[1]
        read -= data.elements * data.dtype.itemsize
    written = (r for r in results if isinstance(r, Tensor) and r.is_floating_point())
    return read + sum(r.numel() * r.dtype.itemsize for r in written)


def measured(
    found: Found, names: Mapping[int, str], kernels: tuple[str, ...], device: torch.device
) -> records.Matmul:
    """Everything about one matmul, run alone on random data of the same shapes, dtypes and strides,
    under autograd's no_grad. What cannot be run alone has a note."""
    call, note = found.call, ""
    timing = control = None
    padded: tuple[records.Padded, ...] = ()
    try:
        timing = _timed(call, device, found.dtype)
        if found.dtype in _HAVE_CONTROL:
            with contextlib.suppress(RuntimeError):  # flash attention takes no fp32
                control = _timed(call.in_fp32(), device, "fp32")
        padded = _padded(found, device)
    except Exception as error:  # a user's op may need what shapes alone do not tell
        first = str(error).strip().splitlines() or [""]
        note = f"It could not be run alone: {type(error).__name__}: {first[0][:200]}"
    return records.Matmul(
        op=call.op,
        part=call.part,
        dtype=found.dtype,
        operands=call.operands(),
        dimensions=tuple(records.Dimension(n, s) for n, s in call.dimensions().items()),
        flops=found.flops,
        moved_bytes=found.moved_bytes,
        places=tuple(
            records.Place(names[i], phase, n) for (i, phase), n in sorted(found.places.items())
        ),
        kernels=kernels,
        measured_at=time.time(),
        timing=timing,
        control=control,
        padded=padded,
        note=note,
    )


def _padded(found: Found, device: torch.device) -> tuple[records.Padded, ...]:
    """With every dimension that misses enlarged: once to the next multiple, once to that of 64."""
    call = found.call
    if not call.can_be_padded():
        return ()
    before = call.dimensions()
    padded = []
    for sizes in padded_sizes(found.dtype, before):
        grown = 1.0
        for name, size in sizes.items():
            grown *= size / before[name]
        changes = tuple((before[name], size) for name, size in sizes.items())
        timing = _timed(call.padded(sizes), device, found.dtype)
        padded.append(records.Padded(changes, round(found.flops * grown), timing))
    return tuple(padded)


def _timed(call: MatmulCall, device: torch.device, dtype: str) -> records.Timing:
    with torch.no_grad(), _switches(device, dtype):
        return timed(call.made(device), device, budget_s=BUDGET_S, least=LEAST_CALLS)


@contextlib.contextmanager
def _switches(device: torch.device, dtype: str) -> Iterator[None]:
    """TF32 as the matmul had it; whatever the process had set is set again."""
    if device.type != "cuda":
        yield
        return
    with tf32_switches(dtype == "tf32"):
        yield


def ceiling(dtype: str, device: torch.device) -> records.Rate | None:
    """The best rate of a large square matmul; None where torch has none in ``dtype``."""
    best: records.Rate | None = None
    for size in CEILING_SIZES:
        shape = (size, size, size)
        try:
            with torch.no_grad(), _switches(device, dtype):
                timing = timed(matmul(dtype, shape, device), device, budget_s=BUDGET_S)
        except (RuntimeError, KeyError):  # no such matmul, or no memory for a larger one
            break
        rate = matmul_rate("ceiling", dtype, shape, timing)
        if best is None or (rate.flops_s or 0) > (best.flops_s or 0):
            best = rate
        if timing.median_s > CEILING_CALL_S:
            break
    return best


def copy_ceiling(device: torch.device) -> records.Rate:
    """A large copy: each element read once and written once."""
    elements = COPY_ELEMENTS[device.type]
    source = torch.zeros(elements, device=device)
    target = torch.empty_like(source)
    target.copy_(source)  # the pages of a CPU's memory are made at the first write
    timing = timed(lambda: target.copy_(source), device, budget_s=BUDGET_S)
    moved = 2 * elements * source.dtype.itemsize
    return records.Rate("copy", "copy", "fp32", (elements,), 0, moved, timing, time.time())
