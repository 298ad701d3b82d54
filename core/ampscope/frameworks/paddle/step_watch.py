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

from ampscope.frameworks.paddle.layer_paths import LayerPaths
from ampscope.frameworks.paddle.optimizer_state import (
    eps_of,
    parameters_of,
    second_moments,
    state_of,
)
from ampscope.frameworks.paddle.patching import Replacement, replaced, subclasses
from ampscope.frameworks.paddle.rounding import MARK, dtype_name
from ampscope.frameworks.paddle.scaler_state import growth_counter
from ampscope.frameworks.paddle.values import NAMES, copy, is_floating, view
from ampscope.frameworks.paddle.weight_scans import scan_weights
from ampscope.frameworks.recorder import Recorder
from ampscope.frameworks.steps import StepFacts
from ampscope.frameworks.tensors import Values

_Optimizer: Any = paddle.optimizer.Optimizer
_AmpScaler: Any = paddle.amp.AmpScaler
_GradScaler: Any = paddle.amp.GradScaler
_RAW = "_ampscope_loss"  # attribute of a scaled loss: the loss


class StepWatch:
    """Hands every attempt to ``recorder``. ``master_grad`` says that gradients are fp32 although
    the parameters are half."""

    def __init__(
        self, recorder: Recorder, paths: LayerPaths, master_grad: Callable[[], bool]
    ) -> None:
        self.recorder = recorder
        self.paths = paths
        self._master_grad = master_grad
        self.begins: Callable[[], None] = lambda: None  # before an attempt, and after it
        self.ended: Callable[[], None] = lambda: None
        self._optimizers: dict[int, str] = {}
        self._keep: list[Any] = []  # optimizers stay alive, so that no other takes over an id
        self._depth = 0
        self._backwards = 0
        self._loss: tuple[float, str] | None = None
        self._last_scale: float | None = None  # of a loss that was scaled and not yet propagated
        self._unscaled: set[int] = set()
        self._ended_at = time.perf_counter()
        self._spent_before = 0.0

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch steps."""
        with replaced(list(self._replacements())):
            yield

    def end(self) -> None:
        """Look at the weights a last time."""
        trained = [p for optimizer in self._keep for p in parameters_of(optimizer)]
        scan_weights(self.recorder, self.paths, "end", trained)

    def _replacements(self) -> Iterator[Replacement]:
        for kind in subclasses(_Optimizer):
            for name in ("step", "minimize"):
                if name in vars(kind):
                    yield kind, name, self._optimizing(vars(kind)[name])
        yield _GradScaler, "step", self._scaling(_GradScaler.step)
        yield _AmpScaler, "minimize", self._scaling(_AmpScaler.minimize)
        yield _AmpScaler, "scale", self._scale(_AmpScaler.scale)
        yield _GradScaler, "unscale_", self._unscale(_GradScaler.unscale_)
        yield paddle.Tensor, "backward", self._backward(paddle.Tensor.backward)

    def _optimizing(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return original(optimizer, *args, **kwargs)
            return self._attempt(lambda: original(optimizer, *args, **kwargs), optimizer, None)

        return step

    def _scaling(self, original: Any) -> Any:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(original, scaler, optimizer, *args, **kwargs)
            if self._depth or not scaler._enable:
                return run()
            return self._attempt(run, optimizer, scaler)

        return step

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def scale(scaler: Any, loss: Any) -> Any:
            scaled = original(scaler, loss)
            if scaled is not loss:
                setattr(scaled, _RAW, loss)
                self._last_scale = float(scaler._scale)
            return scaled

        return scale

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def unscale(scaler: Any, optimizer: Any) -> Any:
            if not self._depth and scaler._enable:
                self._unscaled.add(id(optimizer))
            return original(scaler, optimizer)

        return unscale

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            raw = getattr(tensor, _RAW, None)
            loss = tensor if raw is None else raw
            if loss.dtype in NAMES and loss.size == 1:
                # A scaled loss that was worked on since (divided, for accumulation) is unscaled.
                factor = self._last_scale if raw is None and self._last_scale else 1.0
                self._loss = float(loss) / factor, dtype_name(loss, NAMES)
            self._last_scale = None
            self._backwards += 1
            return original(tensor, *args, **kwargs)

        return backward

    def _attempt(self, run: Callable[[], Any], optimizer: Any, scaler: Any) -> Any:
        began = time.perf_counter()
        self.begins()
        parameters = parameters_of(optimizer)
        if not self._optimizers:
            scan_weights(self.recorder, self.paths, "start", parameters)
        names = {id(p): self.paths.name_of(p) for p in parameters}
        gradients = self._gradients(parameters, names)
        before = {names[id(p)]: copy(p, getattr(p, MARK, "")) for p in parameters}
        scale = None if scaler is None else float(scaler._scale)
        self._depth += 1
        looked_s = time.perf_counter() - began
        try:
            result = run()
        finally:
            self._depth -= 1
        began = time.perf_counter()
        step_time_s = began - self._ended_at - looked_s - self.recorder.elapsed_s
        state = state_of(optimizer, names, parameters)
        facts = StepFacts(
            loss=None if self._loss is None else self._loss[0],
            scale=scale,
            skipped=scaler is not None and bool(scaler._cache_found_inf),
            lr=float(optimizer.get_lr()),
            optimizer=self._name(optimizer),
            loss_dtype="fp32" if self._loss is None else self._loss[1],
            scaled=id(optimizer) not in self._unscaled,
            unscaled_by_user=id(optimizer) in self._unscaled,
            growth_counter=None if scaler is None else growth_counter(scaler),
            backwards=self._backwards,
            gradients=gradients,
            before=before,
            after={names[id(p)]: view(p, getattr(p, MARK, "")) for p in parameters},
            state=state,
            second_moments=second_moments(state),
            eps=eps_of(optimizer),
            step_time_s=max(step_time_s + self._spent_before, 0.0),
            overhead_s=self.recorder.elapsed_s - self._spent_before + looked_s,
        )
        self._unscaled.discard(id(optimizer))
        self._backwards = 0
        try:
            self.recorder.step(facts)
        finally:
            self.ended()
            self._ended_at, self._spent_before = time.perf_counter(), self.recorder.elapsed_s
        return result

    def _gradients(self, parameters: list[Any], names: dict[int, str]) -> dict[str, Values]:
        """Copies: unscaling overwrites them."""
        found = {}
        for parameter in parameters:
            gradient = parameter._grad_ivar()
            if gradient is not None and is_floating(gradient) and gradient.is_dense():
                label = "" if self._master_grad() else getattr(parameter, MARK, "")
                found[names[id(parameter)]] = copy(gradient, label)
        return found

    def _name(self, optimizer: Any) -> str:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = f"optimizer{len(self._optimizers)}"
            self._keep.append(optimizer)
        return self._optimizers[id(optimizer)]
