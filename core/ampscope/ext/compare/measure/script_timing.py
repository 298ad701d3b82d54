"""A whole script in another precision than its own, for its time and its loss.

The controls of a diagnosis look at every torch function, which costs a step of small ops twice its
time (measured: 60 small layers). Here only methods are replaced that a step hardly calls: those
that cast a module or a tensor to a half format by name. A script that has autocast keeps it; around
one that has none a region is opened at the first call of a model and closed before backward, so
that the loss is computed inside, as the documentation of torch.amp has it.

    python -m ampscope.ext.compare.measure.script_timing --precision bf16 --steps 30 \
        --seconds 20 --seed 0 --out FILE SCRIPT ARGS…

writes one JSON object: seconds and loss of each step, memory, what stood in the way. It ends the
script after its steps, or when the time is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.tensors import is_capturing
from ampscope.capture.training_events import StepEvents, StepListener
from ampscope.patches import Patches
from ampscope.runner.controls import autocast_as, device_type_of, scalers_off, tf32_held
from ampscope.runner.interventions import add_scaler
from ampscope.runner.script_main import stage
from ampscope.runner.script_text import execute

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_BY_NAME = {"half": torch.float16, "bfloat16": torch.bfloat16}


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--precision", required=True)
@click.option("--steps", type=int, required=True)
@click.option("--seconds", type=float, required=True)
@click.option("--seed", type=int, required=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def main(
    precision: str, steps: int, seconds: float, seed: int, out: Path, script: str,
    args: tuple[str, ...],
) -> None:  # fmt: skip
    """Run SCRIPT in PRECISION and keep the time of its steps."""
    clock = Clock(steps, seconds, out)
    problem = ""
    try:
        with stage(script, args), observed(clock), in_precision(precision, clock):
            torch.manual_seed(seed)
            execute(script)
    except SystemExit as error:
        problem = f"It called sys.exit({error.code})." if error.code else ""
    except BaseException as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    clock.write(problem)


class Clock(StepListener):
    """Listens at an untouched script's optimizer steps: seconds between them, the loss that each
    had, and memory; nothing else."""

    def __init__(self, steps: int, seconds: float, out: Path) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.skipped: list[int] = []  # steps that a scaler left out
        self.foreign = ""  # a half dtype that the script's own autocast uses
        self.has_scaler = False
        self._steps, self._ends, self._out = steps, time.monotonic() + seconds, out
        self._gpu: torch.device | None = None  # that the script trains on
        self._first: Optimizer | None = None
        self._last = 0.0
        self._loss: Tensor | None = None
        self._unscaled: Tensor | None = None
        self.in_backward = False
        self.region = StepRegion()  # of the forward pass, where the script has none; ends with it
        self._held = _begin_peak()

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        """An optimizer has stepped; with several the first one counts. Without any gradient it
        stepped in vain: a scaler that was added to the script takes them away to skip."""
        groups = optimizer.param_groups
        in_vain = all(p.grad is None for group in groups for p in group["params"])
        self.ended(optimizer, skipped=in_vain)

    def ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """A step is over, taken or left out."""
        self.region.close()
        self._first = self._first or optimizer
        if optimizer is not self._first or is_capturing():
            return
        if skipped:
            self.skipped.append(len(self.losses))
        place = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
        if place is not None and place.type == "cuda":  # it may be none of the first GPU's
            self._gpu = place
            torch.cuda.synchronize(place)
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        loss, self._loss = self._loss, None
        self.losses.append(float("nan") if loss is None else float(loss))
        if len(self.losses) >= self._steps or time.monotonic() > self._ends:
            self.write()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        self._last = time.perf_counter()

    def after_scaler_step(
        self, optimizer: Optimizer, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        """GradScaler has let the optimizer step, or not."""
        if not stepped and not raised:
            self.ended(optimizer, skipped=True)

    def scaled(self, scaler: Any, loss: object, result: Any) -> None:
        """GradScaler has multiplied a loss."""
        self.has_scaler = True
        if is_capturing():
            return
        self._unscaled = loss.detach().clone() if isinstance(loss, Tensor) else None

    def backward(self, root: Tensor) -> None:
        """A backward pass begins; the last one before a step has its loss."""
        self.region.close()
        if is_capturing():
            return
        loss, self._unscaled = self._unscaled, None
        if loss is None and root.numel() == 1:
            loss = root.detach().clone()
        if loss is not None and loss.numel() == 1:
            self._loss = loss

    def write(self, problem: str = "") -> None:
        """What was seen, as JSON. Memory is above what Python and torch held at the start."""
        on_cpu = None if self._held is None else _status_bytes("VmHWM") - self._held
        peak = on_cpu if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)
        found = {
            "seconds": self.seconds,
            "losses": self.losses,
            "skipped": self.skipped,
            "peak_bytes": peak,
            "foreign": self.foreign,
            "problem": problem,
        }
        self._out.write_text(json.dumps(found))


class StepRegion:
    """An autocast region that is opened in one place and closed in another."""

    def __init__(self) -> None:
        self.is_open = False
        self._stack = contextlib.ExitStack()

    def open(self, kind: str, dtype: torch.dtype) -> None:
        """Autocast to ``dtype`` on devices of that type, until :meth:`close`."""
        self.is_open = True
        self._stack.enter_context(torch.autocast(kind, dtype=dtype))

    def close(self) -> None:
        """Again does nothing."""
        self.is_open = False
        self._stack.close()


def _begin_peak() -> int | None:
    """Forget the peak that importing torch has left (Linux, proc(5): clear_refs), and say what is
    held now; None where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _status_bytes("VmRSS")
    except OSError:
        return None


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


@contextlib.contextmanager
def observed(clock: Clock) -> Iterator[None]:
    """The clock hears of losses, backward passes and steps; nothing changes."""
    with StepEvents(clock), heard_backward(clock):
        yield


@contextlib.contextmanager
def heard_backward(clock: Clock) -> Iterator[None]:
    """The outermost such wrapper tells the clock: it sees a loss before anything multiplies it."""

    def backward(original: Any, root: Tensor, *args: Any, **kwargs: Any) -> Any:
        if clock.in_backward:
            return original(root, *args, **kwargs)
        clock.in_backward = True
        clock.backward(root)
        try:
            return original(root, *args, **kwargs)
        finally:
            clock.in_backward = False

    with Patches() as patches:
        patches.wrap(torch.Tensor, "backward", backward)
        yield


@contextlib.contextmanager
def in_precision(name: str, clock: Clock) -> Iterator[None]:
    """While entered, what is trained in this process is trained in the precision ``name``."""
    with contextlib.ExitStack() as stack:
        if name in ("fp32", "tf32"):
            stack.enter_context(scalers_off())
            stack.enter_context(autocast_as(None))
            stack.enter_context(_halves_as(dict.fromkeys(HALVES.values(), torch.float32)))
            stack.enter_context(tf32_held(name == "tf32"))
        else:
            if name == "bf16":
                stack.enter_context(scalers_off())
                stack.enter_context(autocast_as(torch.bfloat16))
                stack.enter_context(_halves_as({torch.float16: torch.bfloat16}))
            stack.enter_context(_autocast_around_steps(HALVES[name], clock, stack))
        yield


@contextlib.contextmanager
def _halves_as(replace: Mapping[torch.dtype, torch.dtype]) -> Iterator[None]:
    """``.half()``, ``.bfloat16()`` and ``.to(dtype)`` of modules and tensors give another dtype."""

    def by_name(wanted: torch.dtype) -> Callable[..., Any]:
        def call(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
            other = replace.get(wanted)
            return original(owner, *args, **kwargs) if other is None else owner.to(other)

        return call

    def to(original: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(replace.get(a, a) if isinstance(a, torch.dtype) else a for a in args)
        if kwargs.get("dtype") in replace:
            kwargs["dtype"] = replace[kwargs["dtype"]]
        return original(owner, *args, **kwargs)

    with Patches() as patches:
        for owner in (nn.Module, torch.Tensor):
            for name, wanted in _BY_NAME.items():
                patches.wrap(owner, name, by_name(wanted))
            patches.wrap(owner, "to", to)
        yield


@contextlib.contextmanager
def _autocast_around_steps(
    dtype: torch.dtype, clock: Clock, stack: contextlib.ExitStack
) -> Iterator[None]:
    """One region per step, from a model's first call until backward; without gradients, around the
    call alone. fp16 gets a loss scale where the script has none."""
    lacks_scaler = dtype is torch.float16

    def call(original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal lacks_scaler
        if clock.region.is_open:
            return original(module, *args, **kwargs)
        kind = device_type_of(module)
        if not kind:  # a transform or a loss: without parameters it is no model
            return original(module, *args, **kwargs)
        if torch.is_autocast_enabled(kind):
            if torch.get_autocast_dtype(kind) is not dtype:
                clock.foreign = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
            return original(module, *args, **kwargs)
        if not torch.is_grad_enabled():
            with torch.autocast(kind, dtype=dtype):
                return original(module, *args, **kwargs)
        if lacks_scaler and clock.losses and not clock.has_scaler:
            lacks_scaler = False
            stack.enter_context(add_scaler())
            stack.enter_context(heard_backward(clock))
        clock.region.open(kind, dtype)
        return original(module, *args, **kwargs)

    with Patches() as patches:
        patches.wrap(nn.Module, "__call__", call)
        try:
            yield
        finally:
            clock.region.close()


if __name__ == "__main__":
    main()
