"""Every optimizer step, taken or skipped: the loss, the scale, gradients, weights and state.

All of Paddle's ways come by here: ``optimizer.step()`` and ``minimize()``, ``scaler.step()`` with
``update()``, and ``scaler.minimize()``. The innermost ones are called by the outer ones; the
outermost is the step.

The loss of a step is what the last backward pass began with (:class:`LossWatch`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import paddle

from ampscope.ext.frameworks.paddle.decorated import HalfParameters, keeps_half_state
from ampscope.ext.frameworks.paddle.layer_paths import LayerPaths
from ampscope.ext.frameworks.paddle.rounding import MARK, dtype_name
from ampscope.ext.frameworks.paddle.values import (
    NAMES,
    copy,
    is_floating,
    subclasses,
    view,
)
from ampscope.ext.frameworks.recorder import FrameworkRecorder, ObjectNames, StepFacts
from ampscope.ext.frameworks.tensors import TensorBits
from ampscope.patches import Patches

_Optimizer: Any = paddle.optimizer.Optimizer
_AmpScaler: Any = paddle.amp.AmpScaler
_GradScaler: Any = paddle.amp.GradScaler


class PaddleStepListener(Protocol):
    """Listener that is called before each optimizer step and after it."""

    def step_begins(self) -> None: ...

    def step_ended(self) -> None: ...


class StepWatch:
    """Hands every step to ``recorder``. ``half`` says whether gradients are fp32 although the
    parameters are half. ``is_sparing``: gradients and weights of a step are looked at where they
    are wanted."""

    def __init__(
        self,
        recorder: FrameworkRecorder,
        paths: LayerPaths,
        half: HalfParameters | None = None,
        listener: PaddleStepListener | None = None,
        *,
        is_sparing: bool = False,
    ) -> None:
        self.recorder = recorder
        self.paths = paths
        self._half, self._listener, self._is_sparing = half, listener, is_sparing
        self._loss = LossWatch()
        self._optimizers, self._scalers = ObjectNames("optimizer"), ObjectNames("scaler")
        self._depth = 0
        self._unscaled: set[int] = set()
        self._scanned = False
        self._ended_at = time.perf_counter()
        self._spent_before = 0.0

    def put_on(self, patches: Patches) -> None:
        """Watch steps."""
        for kind in subclasses(_Optimizer):
            for name in ("step", "minimize"):
                if name in vars(kind):
                    patches.wrap(kind, name, self._optimizing)
        patches.wrap(_GradScaler, "step", self._scaling)
        patches.wrap(_AmpScaler, "minimize", self._scaling)
        patches.wrap(_AmpScaler, "minimize", self._updating)
        patches.wrap(_GradScaler, "update", self._updating)
        patches.wrap(_GradScaler, "unscale_", self._unscale)
        self._loss.put_on(patches)

    def end(self) -> None:
        """Look at the weights a last time."""
        trained = [p for optimizer in self._optimizers.things for p in parameters_of(optimizer)]
        scan_weights(self.recorder, self.paths, "end", trained)

    def _optimizing(self, original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(original, optimizer, *args, **kwargs)
        return run() if self._depth else self._step(run, optimizer, None)

    def _scaling(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        run = functools.partial(original, scaler, optimizer, *args, **kwargs)
        if self._depth or not scaler._enable:
            return run()
        return self._step(run, optimizer, scaler)

    def _updating(self, original: Any, scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
        """``update``, and ``minimize``, which updates by itself."""
        result = original(scaler, *args, **kwargs)
        if not self._depth and scaler._enable:
            self.recorder.scaler_updated(self._scalers.name(scaler))
        return result

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        if not self._depth and scaler._enable:
            self._unscaled.add(id(optimizer))
        return original(scaler, optimizer)

    def _step(self, run: Callable[[], Any], optimizer: Any, scaler: Any) -> Any:
        began = time.perf_counter()
        if self._listener is not None:
            self._listener.step_begins()
        seen = Look()
        if not self._is_sparing or self.recorder.wants_tensors:
            if not self._scanned:
                self._scanned = True
                scan_weights(self.recorder, self.paths, "start", parameters_of(optimizer))
            master_grad = self._half is not None and self._half.master_grad
            seen = look(optimizer, self.paths, master_grad=master_grad)
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
            if self._listener is not None:
                self._listener.step_ended()
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


@dataclass(frozen=True, slots=True)
class Look:
    """What is looked at around one step, by dotted name; nothing where no instrument wants it."""

    parameters: list[Any] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    gradients: dict[str, TensorBits] = field(default_factory=dict)
    before: dict[str, TensorBits] = field(default_factory=dict)

    def after(self) -> dict[str, TensorBits]:
        """The weights now, in place."""
        return {self.names[id(p)]: view(p, getattr(p, MARK, "")) for p in self.parameters}


def look(optimizer: Any, paths: LayerPaths, *, master_grad: bool) -> Look:
    """Before the step. Gradients and weights are copied: the step overwrites both."""
    parameters = parameters_of(optimizer)
    names = {id(p): paths.name_of(p) for p in parameters}
    gradients = {}
    for parameter in parameters:
        gradient = parameter._grad_ivar()
        if gradient is not None and is_floating(gradient) and gradient.is_dense():
            label = "" if master_grad else getattr(parameter, MARK, "")
            gradients[names[id(parameter)]] = copy(gradient, label)
    before = {names[id(p)]: copy(p, getattr(p, MARK, "")) for p in parameters}
    return Look(parameters, names, gradients, before)


# Averages of squares; the denominator of the update is their root plus epsilon.
_SECOND_MOMENTS = ("moment2", "mean_square", "_avg_squared_grad")


def parameters_of(optimizer: Any) -> list[Any]:
    """Parameters that it trains, of all groups."""
    found: list[Any] = []
    for part in optimizer._parameter_list or []:
        found += part["params"] if isinstance(part, dict) else [part]
    return [parameter for parameter in found if not parameter.stop_gradient]


def state_of(optimizer: Any, names: dict[int, str], parameters: list[Any]) -> dict[str, TensorBits]:
    """Accumulators by "kind.parameter", in place. Powers of the betas are left out: one number
    each, and no state of the training."""
    half = keeps_half_state(optimizer)
    by_name = {parameter.name: parameter for parameter in parameters}
    found = {}
    for kind, accumulators in optimizer._accumulators.items():
        for name, tensor in accumulators.items():
            parameter = by_name.get(name)
            if parameter is not None and "pow" not in kind and is_floating(tensor):
                label = getattr(parameter, MARK, "") if half else ""
                found[f"{kind}.{names[id(parameter)]}"] = view(tensor, label)
    return found


def second_moments(state: dict[str, TensorBits]) -> tuple[str, ...]:
    """Names of those in ``state`` that average squared gradients."""
    return tuple(name for name in state if name.partition(".")[0] in _SECOND_MOMENTS)


def eps_of(optimizer: Any) -> float | None:
    """Epsilon; None where the optimizer has none or keeps it in a tensor."""
    eps = getattr(optimizer, "_epsilon", None)
    return float(eps) if isinstance(eps, int | float) else None


def growth_counter(scaler: Any) -> int:
    """Finite steps since the last growth, after this step. ``scaler.minimize`` has updated already;
    with ``scaler.step`` the update is still to come, and follows Paddle's rule."""
    if scaler._optimizer_states == {} or not scaler._use_dynamic_loss_scaling:
        return int(scaler._incr_count)
    if scaler._cache_found_inf:
        return 0
    return int((scaler._incr_count + 1) % scaler._incr_every_n_steps)


def scan_weights(
    recorder: FrameworkRecorder, paths: LayerPaths, moment: str, trained: list[Any]
) -> None:
    """All weights and buffers at the start or end of a run, for the rules. ``trained``: the
    parameters that some optimizer has; all others are frozen."""
    known = {id(parameter) for parameter in trained}
    kinds: dict[str, dict[str, TensorBits]] = {"parameter": {}, "frozen": {}, "buffer": {}}
    for name, parameter in paths.parameters().items():
        kind = "parameter" if id(parameter) in known else "frozen"
        kinds[kind][name] = view(parameter, getattr(parameter, MARK, ""))
    for name, buffer in paths.buffers().items():
        if is_floating(buffer):
            kinds["buffer"][name] = view(buffer, getattr(buffer, MARK, ""))
    for kind, weights in kinds.items():
        recorder.weights(moment, weights, kind)


_RAW = "_ampscope_loss"  # attribute of a scaled loss: the loss


class LossWatch:
    """The last loss, without the scaler's factor, and how many backward passes there were since the
    last step."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.dtype = "fp32"
        self.scaled = False
        self.backwards = 0
        self._factor: float | None = None  # of a loss that was scaled and not yet propagated

    def put_on(self, patches: Patches) -> None:
        """Watch scaled losses and backward passes."""
        patches.wrap(_AmpScaler, "scale", self._scale)
        patches.wrap(paddle.Tensor, "backward", self._backward)
        patches.wrap(paddle.autograd, "backward", self._backward_of_several)

    def _scale(self, original: Any, scaler: Any, /, *args: Any, **kwargs: Any) -> Any:
        scaled = original(scaler, *args, **kwargs)
        loss = (*args, *kwargs.values())[0]
        if scaled is not loss:
            setattr(scaled, _RAW, loss)
            self._factor = float(scaler._scale)
        return scaled

    def _backward(self, original: Any, tensor: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._began(tensor)
        return original(tensor, *args, **kwargs)

    def _backward_of_several(
        self, original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        given = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        one = given[0] if len(given) == 1 else None
        self._began(one if grad_tensors is None else None)
        return original(tensors, grad_tensors, *args, **kwargs)

    def _began(self, tensor: Any) -> None:
        """``tensor`` is None where several begin it at once, or with gradients of their own."""
        raw = getattr(tensor, _RAW, None)
        loss = tensor if raw is None else raw
        if loss is not None and loss.dtype in NAMES and len(loss.shape) <= 1 and loss.size == 1:
            # A scaled loss that was worked on since (divided, for accumulation) is unscaled.
            factor = self._factor if raw is None and self._factor else 1.0
            self.value, self.dtype = float(loss) / factor, dtype_name(loss, NAMES)
            self.scaled = self._factor is not None
        elif not self.backwards:  # the previous step's loss is not this step's
            self.value, self.scaled = None, self._factor is not None
        self._factor = None
        self.backwards += 1
