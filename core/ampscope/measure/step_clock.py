"""A clock at an untouched script's optimizer steps: time, loss and memory, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ampscope.capture.script.patches import Patches


class Clock:
    """Seconds between optimizer steps, and the loss that each step had."""

    def __init__(self, steps: int, seconds: float, out: Path, *, on_cuda: bool) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.skipped: list[int] = []  # steps that a scaler left out
        self.foreign = ""  # a half dtype that the script's own autocast uses
        self.has_scaler = False
        self._steps, self._ends, self._out = steps, time.monotonic() + seconds, out
        self._is_cuda = on_cuda
        self._first: Optimizer | None = None
        self._last_ended: Optimizer | None = None
        self._last = 0.0
        self._loss: Tensor | None = None
        self._unscaled: Tensor | None = None
        self.in_backward = False
        self.before_backward: Callable[[], None] = lambda: None
        self._held = _begin_peak()

    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped; with several the first one counts. Without any gradient it
        stepped in vain: a scaler that was added to the script takes them away to skip."""
        groups = optimizer.param_groups
        in_vain = all(p.grad is None for group in groups for p in group["params"])
        self.ended(optimizer, skipped=in_vain)

    def ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        """A step is over, taken or left out."""
        self._last_ended = optimizer
        self.before_backward()
        self._first = self._first or optimizer
        if optimizer is not self._first:
            return
        if skipped:
            self.skipped.append(len(self.losses))
        if self._is_cuda:
            torch.cuda.synchronize()
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

    def scaler_steps(self) -> None:
        """GradScaler is about to let an optimizer step, or not."""
        self._last_ended = None

    def scaler_stepped(self, optimizer: Optimizer) -> None:
        """It has decided; no step of the optimizer was seen when it skipped."""
        if self._last_ended is None:
            self.ended(optimizer, skipped=True)

    def scaled(self, loss: object) -> None:
        """GradScaler is about to multiply a loss."""
        self.has_scaler = True
        self._unscaled = loss.detach().clone() if isinstance(loss, Tensor) else None

    def backward(self, root: Tensor) -> None:
        """A backward pass begins; the last one before a step has its loss."""
        self.before_backward()
        loss, self._unscaled = self._unscaled, None
        if loss is None and root.numel() == 1:
            loss = root.detach().clone()
        if loss is not None and loss.numel() == 1:
            self._loss = loss

    def write(self, problem: str = "") -> None:
        """What was seen, as JSON. Memory is above what Python and torch held at the start."""
        on_cpu = None if self._held is None else _status_bytes("VmHWM") - self._held
        peak = torch.cuda.max_memory_allocated() if self._is_cuda else on_cpu
        found = {
            "seconds": self.seconds,
            "losses": self.losses,
            "skipped": self.skipped,
            "peak_bytes": peak,
            "foreign": self.foreign,
            "problem": problem,
        }
        self._out.write_text(json.dumps(found))


@contextlib.contextmanager
def observed(clock: Clock) -> Iterator[None]:
    """The clock hears of losses, backward passes and steps; nothing changes."""
    patches = Patches()

    def scale(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                clock.scaled(outputs)
            return original(scaler, outputs)

        return wrapper

    def step(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            clock.scaler_steps()
            result = original(scaler, optimizer, *args, **kwargs)
            clock.scaler_stepped(optimizer)
            return result

        return wrapper

    patches.replace(torch.amp.GradScaler, "scale", scale)
    patches.replace(torch.amp.GradScaler, "step", step)
    handle = register_optimizer_step_post_hook(clock.stepped)
    try:
        with heard_backward(clock):
            yield
    finally:
        handle.remove()
        patches.undo()


@contextlib.contextmanager
def heard_backward(clock: Clock) -> Iterator[None]:
    """The outermost such wrapper tells the clock: it sees a loss before anything multiplies it."""
    patches = Patches()

    def backward(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(root: Tensor, *args: Any, **kwargs: Any) -> Any:
            if clock.in_backward:
                return original(root, *args, **kwargs)
            clock.in_backward = True
            clock.backward(root)
            try:
                return original(root, *args, **kwargs)
            finally:
                clock.in_backward = False

        return wrapper

    patches.replace(torch.Tensor, "backward", backward)
    try:
        yield
    finally:
        patches.undo()


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
