"""``Optimizer.apply``: gradients as they come to it, weights before and after, state and scale.

A step is skipped when LossScaleOptimizer does not advance its inner optimizer. Where gradients are
accumulated (``gradient_accumulation_steps``), the attempt is the call that moves the weights, with
the gradients of its own batch.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from ampscope.capture.script.patches import Patches
from ampscope.frameworks.keras import loss_scales, optimizers
from ampscope.frameworks.keras.loss_scales import OwnScaler
from ampscope.frameworks.keras.training import FIRST_REPLICA, Backward, Training, replicas
from ampscope.frameworks.keras.values import values_of, variable_values
from ampscope.frameworks.numbering import Numbering
from ampscope.frameworks.steps import StepFacts
from ampscope.frameworks.tensors import Values

_Named = list[tuple[str, Any, Any]]  # name, variable, gradient


@dataclass(slots=True)
class StepWatch:
    """Optimizers in the order in which they first stepped."""

    training: Training
    scaler: OwnScaler
    inside: int = 0  # > 0: an optimizer calls its inner one
    optimizers: Numbering = field(default_factory=lambda: Numbering("optimizer"))
    scalers: Numbering = field(default_factory=lambda: Numbering("scaler"))
    variables: dict[int, str] = field(default_factory=dict)  # names of weights by id
    late_s: float = 0.0  # recording of the last step, after its end

    def put_on(self, patches: Patches) -> None:
        """Watch every optimizer of Keras."""
        base, scaler = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
        patches.replace(base, "apply", self._watched)
        patches.replace(scaler, "apply", self._watched)
        if self.training.settings.lr_factor != 1.0:
            patches.replace(base, "_get_current_learning_rate", self._slowed)

    def _watched(self, original: Any) -> Any:
        @functools.wraps(original)
        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if self.inside or not self.training.is_watching:
                return original(optimizer, grads, trainable_variables)
            gradients = list(grads)
            variables = list(trainable_variables or optimizer._trainable_variables)
            if not gradients:
                return original(optimizer, gradients, trainable_variables)
            self.inside += 1
            try:
                return self._apply(original, optimizer, gradients, variables)
            finally:
                self.inside -= 1

        return apply

    def _slowed(self, original: Any) -> Any:
        @functools.wraps(original)
        def rate(optimizer: Any) -> Any:
            value = original(optimizer)
            return value * self.training.settings.lr_factor if self.inside else value

        return rate

    def _apply(self, original: Any, optimizer: Any, gradients: Any, variables: Any) -> Any:
        started = time.perf_counter()
        self.training.forget_reached()
        settings = self.training.settings
        if settings.eps is not None and hasattr(optimizers.inner(optimizer), "epsilon"):
            optimizers.inner(optimizer).epsilon = settings.eps
        if optimizers.is_gathering(optimizer) and not loss_scales.has_nonfinite(gradients):
            return original(optimizer, gradients, variables)
        self._name(variables)
        backward = self._backward(variables)
        lr = optimizers.learning_rate(optimizer, settings)
        before = optimizers.scaler_state(optimizer)
        if before is not None and replicas() > 1:
            self.training.note(FIRST_REPLICA)
        named = [
            (self.variables[id(v)], v, g)
            for v, g in zip(variables, gradients, strict=False)
            if g is not None
        ]
        weights = _weights(named)
        self.training.own_s += time.perf_counter() - started
        result, skipped = self._step(original, optimizer, gradients, variables, backward)
        started = time.perf_counter()
        after = optimizers.scaler_state(optimizer)
        if before is not None and after is not None and not settings.precision:
            skipped = after.steps == before.steps
        state, second_moments = optimizers.state_of(optimizer)
        scale = None if before is None else before.scale
        is_off = loss_scales.is_inactive(optimizer, settings)
        own = backward is not None and backward.unscaled_by is not None
        holder = self.scaler if own else optimizer
        facts = StepFacts(
            loss=None if backward is None else backward.loss,
            loss_dtype="" if backward is None else backward.loss_dtype,
            scale=None if is_off else backward.unscaled_by if own and backward else scale,
            skipped=skipped,
            lr=lr,
            optimizer=self.optimizers.name(optimizer),
            scaler=self.scalers.name(holder) if own or before is not None else "",
            scaled=not own and (backward is None or backward.scaled),
            loss_scaled=None if backward is None else backward.scaled,
            static_scale=optimizers.static_factor(optimizer),
            growth_counter=None if is_off or after is None else after.counter,
            backwards=1 if backward is None else backward.count,
            gradients={n: v for n, _, g in named if (v := values_of(g)) is not None},
            before=weights,
            after=_weights(named),
            state=state,
            second_moments=second_moments,
            eps=optimizers.epsilon(optimizer),
        )
        loss_scales.hold(optimizer, settings)
        self._record(facts, started)
        if facts.scale is not None:  # each LossScaleOptimizer is a scaler, and never waits
            self.training.recorder.scaler_updated(facts.scaler)
        return result

    def _step(
        self, original: Any, optimizer: Any, gradients: Any, variables: Any,
        backward: Backward | None,
    ) -> tuple[Any, bool]:  # fmt: skip
        """(what apply gave, whether ampscope's own scaler left the step out)."""
        if loss_scales.is_inactive(optimizer, self.training.settings):
            loss_scales.step_inactive(optimizer, gradients, variables)
            return None, False
        if backward is not None and backward.unscaled_by is not None:
            found_inf = loss_scales.has_nonfinite(gradients)
            self.scaler.update(found_inf)
            if found_inf:
                return None, True
        return original(optimizer, gradients, variables), False

    def _record(self, facts: StepFacts, started: float) -> None:
        training = self.training
        now = time.perf_counter()
        training.own_s += now - started
        own_s, training.own_s = training.own_s, 0.0
        step_time_s = max(now - training.began - own_s, 0.0)
        try:
            training.recorder.step(
                replace(facts, step_time_s=step_time_s, overhead_s=own_s + self.late_s)
            )
        finally:
            training.began = time.perf_counter()
            self.late_s = training.began - now

    def _name(self, variables: list[Any]) -> None:
        """Names of the weights; at the first step they are looked at, all of the model's."""
        if all(id(v) in self.variables for v in variables):
            return
        known = self.training.paths.variable_names()
        if not self.variables:
            scan_weights(self.training, "start")
        self.variables.update({key: name for key, (name, _, _) in known.items()})
        for number, variable in enumerate(variables):
            path = getattr(variable, "path", "") or getattr(variable, "name", "")
            name = path.replace("/", ".").partition(":")[0] or f"weight{number}"
            self.variables.setdefault(id(variable), name)

    def _backward(self, variables: list[Any]) -> Backward | None:
        """The last one for these weights; it is used up."""
        ids = {id(v) for v in variables} | {id(getattr(v, "_value", v)) for v in variables}
        kept = self.training.backwards
        for at in range(len(kept) - 1, -1, -1):
            if ids & kept[at].sources:
                return kept.pop(at)
        return None


def scan_weights(training: Training, moment: str) -> None:
    """All weights that are known, at the start or end."""
    by_kind: dict[str, dict[str, Values]] = {}
    for name, kind, variable in training.paths.variable_names().values():
        values = variable_values(variable)
        if values is not None:
            by_kind.setdefault(kind, {})[name] = values
    for kind, weights in by_kind.items():
        training.recorder.weights(moment, weights, kind)


def _weights(named: _Named) -> dict[str, Values]:
    return {name: values for name, v, _ in named if (values := variable_values(v)) is not None}
