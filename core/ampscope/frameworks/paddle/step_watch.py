"""Every optimizer step, taken or skipped: the loss, the scale, gradients, weights and state.

All of Paddle's ways come by here: ``optimizer.step()`` and ``minimize()``, ``scaler.step()`` with
``update()``, and ``scaler.minimize()``. The innermost ones are called by the outer ones; the
outermost is the attempt.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from ampscope.frameworks.numbering import Numbering
from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.looks import Look, look
from ampscope.frameworks.paddle.loss_watch import LossWatch
from ampscope.frameworks.paddle.optimizer_state import (
    eps_of,
    parameters_of,
    second_moments,
    state_of,
)
from ampscope.frameworks.paddle.patching import Replacement, replaced, subclasses
from ampscope.frameworks.paddle.scaler_state import growth_counter
from ampscope.frameworks.paddle.weight_scans import scan_weights
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.steps import StepFacts

_Optimizer: Any = paddle.optimizer.Optimizer
_AmpScaler: Any = paddle.amp.AmpScaler
_GradScaler: Any = paddle.amp.GradScaler


class StepWatch:
    """Hands every attempt to ``recorder``. ``master_grad`` says that gradients are fp32 although
    the parameters are half; ``looks`` whether gradients and weights of this step are looked at."""

    def __init__(
        self,
        recorder: Recorder,
        paths: LayerPaths,
        master_grad: Callable[[], bool] = lambda: False,
        looks: Callable[[], bool] = lambda: True,
    ) -> None:
        self.recorder = recorder
        self.paths = paths
        self.begins: Callable[[], None] = lambda: None  # before an attempt, and after it
        self.ended: Callable[[], None] = lambda: None
        self._master_grad, self._looks = master_grad, looks
        self._loss = LossWatch()
        self._optimizers, self._scalers = Numbering("optimizer"), Numbering("scaler")
        self._depth = 0
        self._unscaled: set[int] = set()
        self._scanned = False
        self._ended_at = time.perf_counter()
        self._spent_before = 0.0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch steps."""
        with replaced(list(self._replacements())):
            yield

    def end(self) -> None:
        """Look at the weights a last time."""
        trained = [p for optimizer in self._optimizers.things for p in parameters_of(optimizer)]
        scan_weights(self.recorder, self.paths, "end", trained)

    def _replacements(self) -> Iterator[Replacement]:
        for kind in subclasses(_Optimizer):
            for name in ("step", "minimize"):
                if name in vars(kind):
                    yield kind, name, self._optimizing(vars(kind)[name])
        yield _GradScaler, "step", self._scaling(_GradScaler.step)
        yield _AmpScaler, "minimize", self._updating(self._scaling(_AmpScaler.minimize))
        yield _GradScaler, "update", self._updating(_GradScaler.update)
        yield _GradScaler, "unscale_", self._unscale(_GradScaler.unscale_)
        yield from self._loss.replacements()

    def _optimizing(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, optimizer, *args, **kwargs)
            return run() if self._depth else self._attempt(run, optimizer, None)

        return step

    def _scaling(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, scaler, optimizer, *args, **kwargs)
            if self._depth or not scaler._enable:
                return run()
            return self._attempt(run, optimizer, scaler)

        return step

    def _updating(self, original: Any) -> Any:
        """``update``, and ``minimize``, which updates by itself."""

        @functools.wraps(original)
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if not self._depth and scaler._enable:
                self.recorder.scaler_updated(self._scalers.name(scaler))
            return result

        return update

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def unscale(scaler: Any, optimizer: Any) -> Any:
            if not self._depth and scaler._enable:
                self._unscaled.add(id(optimizer))
            return original(scaler, optimizer)

        return unscale

    def _attempt(self, run: Callable[[], Any], optimizer: Any, scaler: Any) -> Any:
        began = time.perf_counter()
        self.begins()
        seen = Look()
        if self._looks():
            if not self._scanned:
                self._scanned = True
                scan_weights(self.recorder, self.paths, "start", parameters_of(optimizer))
            seen = look(optimizer, self.paths, master_grad=self._master_grad())
        scale = None if scaler is None else float(scaler._scale)
        looked_s = time.perf_counter() - began
        self._depth += 1
        try:
            result = run()
        finally:
            self._depth -= 1
        whole_s = time.perf_counter() - self._ended_at
        overhead_s = self.recorder.elapsed_s - self._spent_before + looked_s
        facts = self._facts(optimizer, scaler, scale, seen, (whole_s - overhead_s, overhead_s))
        self._unscaled.discard(id(optimizer))
        self._loss.backwards = 0
        try:
            self.recorder.step(facts)
        finally:
            self.ended()
            self._ended_at, self._spent_before = time.perf_counter(), self.recorder.elapsed_s
        return result

    def _facts(
        self, optimizer: Any, scaler: Any, scale: float | None, seen: Look, times: Any
    ) -> StepFacts:
        state = state_of(optimizer, seen.names, seen.parameters) if seen.parameters else {}
        is_unscaled = id(optimizer) in self._unscaled
        return StepFacts(
            loss=self._loss.value,
            scale=scale,
            skipped=scaler is not None and bool(scaler._cache_found_inf),
            lr=float(optimizer.get_lr()),
            optimizer=self._optimizers.name(optimizer),
            scaler="" if scaler is None else self._scalers.name(scaler),
            loss_dtype=self._loss.dtype,
            scaled=not is_unscaled,
            loss_scaled=self._loss.scaled,
            unscaled_by_user=is_unscaled,
            growth_counter=None if scaler is None else growth_counter(scaler),
            backwards=self._loss.backwards,
            gradients=seen.gradients,
            before=seen.before,
            after=seen.after(),
            state=state,
            second_moments=second_moments(state),
            eps=eps_of(optimizer),
            step_time_s=max(times[0], 0.0),
            overhead_s=times[1],
        )
