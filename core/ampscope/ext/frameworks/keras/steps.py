"""``Optimizer.apply``: gradients as they come to it, weights before and after, state and scale.

A step is skipped when LossScaleOptimizer does not advance its inner optimizer. Where gradients are
accumulated (``gradient_accumulation_steps``), the step is the call that moves the weights, with
the gradients of its own batch.

The loss of a step is the one whose gradients were taken last (:class:`LossWatch`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.keras.called_again import Called
from ampscope.ext.frameworks.keras.loss_scales import (
    OwnScaler,
    has_nonfinite,
    hold,
    is_inactive,
    step_inactive,
)
from ampscope.ext.frameworks.keras.optimizer_state import (
    ScalerReading,
    epsilon,
    inner,
    is_gathering,
    learning_rate,
    scaler_state,
    state_of,
    static_factor,
)
from ampscope.ext.frameworks.keras.training import FIRST_REPLICA, Backward, KerasTraining, replicas
from ampscope.ext.frameworks.keras.values import short_name, values_of, variable_values
from ampscope.ext.frameworks.recorder import ObjectNames, StepFacts
from ampscope.ext.frameworks.tensors import TensorBits
from ampscope.patches import Patches


@dataclass(slots=True)
class StepWatch:
    """Optimizers in the order in which they first stepped."""

    training: KerasTraining
    scaler: OwnScaler
    inside: int = 0  # > 0: an optimizer calls its inner one
    optimizers: ObjectNames = field(default_factory=lambda: ObjectNames("optimizer"))
    scalers: ObjectNames = field(default_factory=lambda: ObjectNames("scaler"))
    variables: dict[int, str] = field(default_factory=dict)  # names of weights by id
    late_s: float = 0.0  # recording of the last step, after its end

    def put_on(self, patches: Patches) -> None:
        """Watch every optimizer of Keras."""
        base, scaler = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
        patches.wrap(base, "apply", self._watched)
        patches.wrap(scaler, "apply", self._watched)
        if self.training.settings.lr_factor != 1.0:
            patches.wrap(base, "_get_current_learning_rate", self._scaled_rate)

    def _watched(
        self, original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
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

    def _scaled_rate(self, original: Any, optimizer: Any) -> Any:
        value = original(optimizer)
        return value * self.training.settings.lr_factor if self.inside else value

    def _apply(self, original: Any, optimizer: Any, gradients: Any, variables: Any) -> Any:
        started = time.perf_counter()
        self.training.forget_reached()
        settings = self.training.settings
        if settings.eps is not None and hasattr(inner(optimizer), "epsilon"):
            inner(optimizer).epsilon = settings.eps
        if is_gathering(optimizer) and not has_nonfinite(gradients):
            return original(optimizer, gradients, variables)
        self._name(variables)
        seen = _Before(
            [(self.variables[id(v)], v, g) for v, g in zip(variables, gradients, strict=False)],
            self._backward(variables),
            learning_rate(optimizer, settings),
            scaler_state(optimizer),
        )
        if seen.scaler is not None and replicas() > 1:
            self.training.note(FIRST_REPLICA)
        self.training.own_s += time.perf_counter() - started
        result, skipped = self._step(original, optimizer, gradients, variables, seen.backward)
        started = time.perf_counter()
        facts = self._facts(optimizer, seen, skipped)
        hold(optimizer, settings)
        self._record(facts, started)
        if facts.scale is not None:  # each LossScaleOptimizer is a scaler, and never waits
            self.training.recorder.scaler_updated(facts.scaler)
        return result

    def _facts(self, optimizer: Any, seen: _Before, skipped: bool) -> StepFacts:
        settings, backward, before = self.training.settings, seen.backward, seen.scaler
        after = scaler_state(optimizer)
        if before is not None and after is not None and not settings.precision:
            skipped = after.steps == before.steps
        state, second_moments = state_of(optimizer)
        scale, scaler = None, ""
        if backward.unscaled_by is not None:
            scale, scaler = backward.unscaled_by, self.scalers.name(self.scaler)
        elif before is not None:
            scale, scaler = before.scale, self.scalers.name(optimizer)
        is_off = is_inactive(optimizer, settings)
        return StepFacts(
            loss=backward.loss,
            loss_dtype=backward.loss_dtype,
            scale=None if is_off else scale,
            skipped=skipped,
            lr=seen.lr,
            optimizer=self.optimizers.name(optimizer),
            scaler=scaler,
            scaled=backward.unscaled_by is None and backward.scaled is not False,
            loss_scaled=backward.scaled,
            static_scale=static_factor(optimizer),
            growth_counter=None if is_off or after is None else after.counter,
            backwards=backward.count,
            gradients=seen.gradients(),
            before=seen.weights,
            after=seen.weights_now(),
            state=state,
            second_moments=second_moments,
            eps=epsilon(optimizer),
        )

    def _step(
        self,
        original: Any,
        optimizer: Any,
        gradients: Any,
        variables: Any,
        backward: Backward,
    ) -> tuple[Any, bool]:
        """(what apply gave, whether ampscope's own scaler left the step out)."""
        if is_inactive(optimizer, self.training.settings):
            step_inactive(optimizer, gradients, variables)
            return None, False
        if backward.unscaled_by is not None:
            found_inf = has_nonfinite(gradients)
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

    def _backward(self, variables: list[Any]) -> Backward:
        """The last one for these weights; it is used up."""
        ids = {id(v) for v in variables} | {id(getattr(v, "_value", v)) for v in variables}
        kept = self.training.backwards
        for at in range(len(kept) - 1, -1, -1):
            if ids & kept[at].sources:
                return kept.pop(at)
        return Backward(None, "", None, frozenset())  # none was seen


class _Before:
    """What was known before a step."""

    def __init__(
        self, named: list[tuple[str, Any, Any]], backward: Backward, lr: float,
        scaler: ScalerReading | None,
    ) -> None:  # fmt: skip
        # Name, variable and gradient of what the step moves.
        self.named = [one for one in named if one[2] is not None]
        self.weights = self.weights_now()
        self.backward, self.lr, self.scaler = backward, lr, scaler

    def weights_now(self) -> dict[str, TensorBits]:
        return {n: values for n, v, _ in self.named if (values := variable_values(v)) is not None}

    def gradients(self) -> dict[str, TensorBits]:
        return {n: values for n, _, g in self.named if (values := values_of(g)) is not None}


def scan_weights(training: KerasTraining, moment: str) -> None:
    """All weights that are known, at the start or end."""
    by_kind: dict[str, dict[str, TensorBits]] = {}
    for name, kind, variable in training.paths.variable_names().values():
        values = variable_values(variable)
        if values is not None:
            by_kind.setdefault(kind, {})[name] = values
    for kind, weights in by_kind.items():
        training.recorder.weights(moment, weights, kind)


MAX_BACKWARDS = 64  # for weights that no optimizer steps
MAX_SCALED = 64  # losses of tapes side by side, and of persistent ones, whose last use is not known


@dataclass(slots=True)
class LossWatch:
    """The loss, and the gradients that come back to the layers' outputs.

    ``GradientTape.gradient(loss, weights)`` is asked for the layers' outputs as well. The tape
    passes through them anyway and keeps each gradient as soon as it is complete: one pass, no
    operation more, and bit-identical gradients of the weights.
    """

    training: KerasTraining
    scaler: OwnScaler
    scaled: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # id -> (scaled, unscaled)

    def put_on(self, patches: Patches) -> None:
        """Watch tapes, ``scale_loss`` and Keras' losses."""
        patches.wrap(tf.GradientTape, "gradient", self._gradient)
        for owner in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            patches.wrap(owner, "scale_loss", self._scale_loss)
        patches.wrap(keras.losses.Loss, "__call__", self._loss)

    def _scale_loss(self, original: Any, optimizer: Any, loss: Any) -> Any:
        scaled = original(optimizer, loss)
        if self.training.is_watching and scaled is not loss:
            self.scaled[id(scaled)] = scaled, loss
            if len(self.scaled) > MAX_SCALED:
                del self.scaled[next(iter(self.scaled))]
        return scaled

    def _loss(
        self, original: Any, loss: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.training.is_watching:
            started = time.perf_counter()
            for target in tf.nest.flatten(y_true):
                values = values_of(target)
                if values is not None:
                    self.training.recorder.batch("target", values)
            self.training.own_s += time.perf_counter() - started
        value = original(loss, y_true, y_pred, *args, **kwargs)
        if self.training.is_watching:
            self._look_into(Called(loss, (y_true, y_pred, *args), kwargs, original), value)
        return value

    def _look_into(self, called: Called, value: Any) -> None:
        """A loss that is not finite although the predictions are: the op inside."""
        training, values = self.training, values_of(value)
        if values is None or np.isfinite(values.floats()).all():
            return
        predictions = map(values_of, tf.nest.flatten(called.args[1]))
        training.recorder.bad(
            LayerCall(
                "",
                type(called.layer).__name__,
                "layer",
                tuple(v for v in predictions if v is not None),
                (values,),
                values.name,
                training.line(),
                could_possibly_record(),
                lambda: training.quietly(called.in_fp32),
                lambda: training.quietly(lambda: called.first_bad_op("", training.line)),
            )
        )

    def _gradient(
        self, original: Any, tape: Any, target: Any, sources: Any, output_gradients: Any = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        seeds = output_gradients
        if not self.training.is_watching or target is None:
            return original(tape, target, sources, seeds, **kwargs)
        outputs, unreached = self.training.take_outputs()
        flat = tf.nest.flatten(target)
        is_scaled = any(id(t) in self.scaled for t in flat)
        factor = None if is_scaled or seeds is not None else self.scaler.factor
        if factor is not None:
            seeds = [tf.fill(t.shape, tf.cast(factor, t.dtype)) for t in flat]
        asked = [sources, [t for _, t in outputs]]
        found, inside = original(tape, target, asked, seeds, **kwargs)
        started = time.perf_counter()
        for (path, _), gradient in zip(reversed(outputs), reversed(inside), strict=True):
            values = values_of(gradient)
            if values is not None:
                self.training.recorder.backward(path, values)
        self.training.give_back(outputs, unreached, inside)
        if factor is not None:
            found = self.scaler.unscaled(found, factor)
        self._remember(target, sources, factor)
        self.training.own_s += time.perf_counter() - started
        return found

    def _remember(self, target: Any, sources: Any, factor: float | None) -> None:
        """The loss, unscaled, until the step of the optimizer that owns the sources."""
        flat = [self.scaled.get(id(t), (t, t)) for t in tf.nest.flatten(target)]
        is_scaled = any(given is not unscaled for given, unscaled in flat)
        losses = [values_of(unscaled) for _, unscaled in flat]
        total = sum((float(v.floats().astype(np.float64).sum()) for v in losses if v), 0.0)
        backward = Backward(
            loss=total * replicas() if any(losses) else None,  # each replica has its share
            loss_dtype=short_name(flat[0][1].dtype) if flat else "",
            scaled=is_scaled or factor is not None,
            sources=frozenset(id(v) for v in tf.nest.flatten(sources)),
            unscaled_by=factor,
        )
        kept = self.training.backwards
        for i, before in enumerate(kept):
            if before.sources == backward.sources:
                backward.count = before.count + 1
                del kept[i]
                break
        kept.append(backward)
        del kept[:-MAX_BACKWARDS]
