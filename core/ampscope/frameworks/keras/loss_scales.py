"""Controls that change the loss scale: of LossScaleOptimizer, of ``loss_scale_factor``, or a scaler
of ampscope's own where the script has none.

Under fp32 and bf16 the scaler stays out of it: it is built as ever, scales nothing and skips
nothing, for neither precision needs it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ampscope.capture.script.patches import Patches
from ampscope.frameworks.keras.training import Training
from ampscope.frameworks.settings import Settings

NEVER = 2**31 - 2  # of step_counter, an int32
FIRST_SCALE, INTERVAL = 2.0**15, 2000  # LossScaleOptimizer's own defaults


@dataclass(slots=True)
class OwnScaler:
    """LossScaleOptimizer's policy around an optimizer that has none (``add_scaler``)."""

    is_on: bool
    scale: float = FIRST_SCALE
    good: int = 0

    @property
    def factor(self) -> float | None:
        """What the loss is multiplied by."""
        return self.scale if self.is_on else None

    def unscaled(self, gradients: Any, factor: float) -> Any:
        """Divided again, before the script sees them."""
        return tf.nest.map_structure(lambda g: None if g is None else g / factor, gradients)

    def update(self, found_inf: bool) -> None:
        """After an attempted step."""
        if found_inf:
            self.scale, self.good = self.scale * 0.5, 0
        elif self.good == INTERVAL - 1:
            self.scale, self.good = self.scale * 2.0, 0
        else:
            self.good += 1


def control_loss_scales(patches: Patches, training: Training) -> None:
    """Put the settings on every scaler that is made, and on every ``loss_scale_factor``."""
    settings = training.settings
    scaler = keras.optimizers.LossScaleOptimizer
    patches.replace(scaler, "__init__", lambda original: _made(original, settings))
    for owner in (keras.optimizers.Optimizer, scaler):
        patches.replace(owner, "scale_loss", lambda original: _scaling(original, training))


def is_inactive(optimizer: Any, settings: Settings) -> bool:
    """A LossScaleOptimizer that a control has switched off."""
    return bool(settings.precision) and is_scaler(optimizer)


def is_scaler(optimizer: Any) -> bool:
    """Whether this is Keras' scaler."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def hold(optimizer: Any, settings: Settings) -> None:
    """A constant scale, after the scaler has changed it."""
    if settings.scale is not None and is_scaler(optimizer) and not settings.precision:
        optimizer.dynamic_scale.assign(settings.scale)


def step_inactive(optimizer: Any, gradients: Any, variables: Any) -> None:
    """What a scaler that is switched off does."""
    if not optimizer.built:
        optimizer.build(variables)
        optimizer.built = True
    optimizer.inner_optimizer.apply(gradients, variables)


def has_nonfinite(gradients: Any) -> bool:
    """Whether any gradient holds NaN or infinity."""
    arrays = [tf.convert_to_tensor(g).numpy() for g in gradients if g is not None]
    return not all(np.isfinite(a.astype(np.float32)).all() for a in arrays)


def _made(original: Any, settings: Settings) -> Any:
    @functools.wraps(original)
    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        first = settings.init_scale if settings.scale is None else settings.scale
        if first is not None:
            optimizer.initial_scale = first
        if settings.growth_interval is not None:
            optimizer.dynamic_growth_steps = settings.growth_interval
        if settings.scale is not None:
            optimizer.dynamic_growth_steps = NEVER

    return init


def _scaling(original: Any, training: Training) -> Any:
    settings = training.settings

    @functools.wraps(original)
    def scale_loss(optimizer: Any, loss: Any) -> Any:
        if is_inactive(optimizer, settings):
            return loss
        factor = settings.scale if settings.scale is not None else settings.init_scale
        if factor is not None and optimizer.loss_scale_factor is not None:
            optimizer.loss_scale_factor = factor
        return original(optimizer, loss)

    return scale_loss
