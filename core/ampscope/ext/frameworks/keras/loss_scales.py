"""Controls that change the loss scale: of LossScaleOptimizer, of ``loss_scale_factor``, or a scaler
of ampscope's own where the script has none.

Under fp32 and bf16 the scaler stays out of it: it is built as ever, scales nothing and skips
nothing, for neither precision needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras.optimizer_state import is_scaler
from ampscope.ext.frameworks.keras.training import KerasTraining
from ampscope.patches import Patches

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
        """After a step."""
        if found_inf:
            self.scale, self.good = self.scale * 0.5, 0
        elif self.good == INTERVAL - 1:
            self.scale, self.good = self.scale * 2.0, 0
        else:
            self.good += 1


def control_loss_scales(patches: Patches, training: KerasTraining) -> None:
    """Put the settings on every scaler that is made, and on every ``loss_scale_factor``."""
    settings = training.settings
    first = settings.init_scale if settings.scale is None else settings.scale

    def init(original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if first is not None:
            optimizer.initial_scale = first
        if settings.growth_interval is not None:
            optimizer.dynamic_growth_steps = settings.growth_interval
        if settings.scale is not None:
            optimizer.dynamic_growth_steps = NEVER

    def scale_loss(original: Any, optimizer: Any, loss: Any) -> Any:
        if is_inactive(optimizer, settings):
            return loss
        if first is not None and optimizer.loss_scale_factor is not None:
            optimizer.loss_scale_factor = first
        return original(optimizer, loss)

    scaler = keras.optimizers.LossScaleOptimizer
    patches.wrap(scaler, "__init__", init)
    for owner in (keras.optimizers.Optimizer, scaler):
        patches.wrap(owner, "scale_loss", scale_loss)


def is_inactive(optimizer: Any, settings: ControlSettings) -> bool:
    """A LossScaleOptimizer that a control has switched off."""
    return bool(settings.precision) and is_scaler(optimizer)


def hold(optimizer: Any, settings: ControlSettings) -> None:
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
