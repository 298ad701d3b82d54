"""The loss, and the gradients that come back to the layers' outputs.

``GradientTape.gradient(loss, weights)`` is asked for the layers' outputs as well. The tape passes
through them anyway and keeps each gradient as soon as it is complete: one pass, no operation more,
and bit-identical gradients of the weights.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from ampscope.capture.script.patches import Patches
from ampscope.frameworks.keras.bad_layer import Called
from ampscope.frameworks.keras.loss_scales import OwnScaler
from ampscope.frameworks.keras.training import Backward, Training, replicas
from ampscope.frameworks.keras.values import short_name, values_of
from ampscope.frameworks.steps import LayerCall

MAX_BACKWARDS = 64  # for weights that no optimizer steps
MAX_SCALED = 64  # losses of tapes side by side, and of persistent ones, whose last use is not known


@dataclass(slots=True)
class LossWatch:
    """Losses by the tensor that ``scale_loss`` gave for them."""

    training: Training
    scaler: OwnScaler
    scaled: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # id -> (scaled, unscaled)

    def put_on(self, patches: Patches) -> None:
        """Watch tapes, ``scale_loss`` and Keras' losses."""
        patches.replace(tf.GradientTape, "gradient", self._watched_gradient)
        for owner in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
            patches.replace(owner, "scale_loss", self._watched_scaling)
        patches.replace(keras.losses.Loss, "__call__", self._watched_loss)

    def _watched_scaling(self, original: Any) -> Any:
        @functools.wraps(original)
        def scale_loss(optimizer: Any, loss: Any) -> Any:
            scaled = original(optimizer, loss)
            if self.training.is_watching and scaled is not loss:
                self.scaled[id(scaled)] = scaled, loss
                if len(self.scaled) > MAX_SCALED:
                    del self.scaled[next(iter(self.scaled))]
            return scaled

        return scale_loss

    def _watched_loss(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(loss: Any, y_true: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
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

        return call

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

    def _watched_gradient(self, original: Any) -> Any:
        @functools.wraps(original)
        def gradient(
            tape: Any, target: Any, sources: Any, output_gradients: Any = None, **kwargs: Any
        ) -> Any:
            if not self.training.is_watching or target is None:
                return original(tape, target, sources, output_gradients, **kwargs)
            return self._gradient(original, tape, target, sources, output_gradients, kwargs)

        return gradient

    def _gradient(
        self, original: Any, tape: Any, target: Any, sources: Any, seeds: Any, kwargs: Any
    ) -> Any:
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
