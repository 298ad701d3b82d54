"""What an optimizer of Keras holds: state, second moments, learning rate, epsilon, loss scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from ampscope.ext.frameworks.adapters import ControlSettings
from ampscope.ext.frameworks.keras.values import scalar, variable_values
from ampscope.ext.frameworks.tensors import TensorBits

# Running means of squared gradients: Adam and its kin, RMSprop; Adagrad's sum of them.
_SECOND_MOMENTS = ("_velocities", "_accumulators", "_accumulated_grads")


@dataclass(frozen=True, slots=True)
class ScalerReading:
    """Before or after a step."""

    scale: float
    counter: int  # finite steps since the last change
    steps: int  # calls of the inner optimizer; skipped steps do not count


def is_scaler(optimizer: Any) -> bool:
    """Whether this is Keras' scaler."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def inner(optimizer: Any) -> Any:
    """The optimizer that moves the weights."""
    return optimizer.inner_optimizer if is_scaler(optimizer) else optimizer


def calls(optimizer: Any) -> Any:
    """The variable that counts calls. Where gradients are accumulated, ``iterations`` is no
    variable but its quotient, moves of the weights."""
    stepping = inner(optimizer)
    return getattr(stepping, "_iterations", stepping.iterations)  # Keras 3.0 has no other


def scaler_state(optimizer: Any) -> ScalerReading | None:
    """Of a LossScaleOptimizer; None for another optimizer."""
    if not is_scaler(optimizer):
        return None
    if not optimizer.built:
        return ScalerReading(float(optimizer.initial_scale), 0, 0)
    return ScalerReading(
        float(optimizer.dynamic_scale.numpy()),
        int(optimizer.step_counter.numpy()),
        int(calls(optimizer).numpy()),
    )


def static_factor(optimizer: Any) -> float | None:
    """``loss_scale_factor`` of an optimizer without a scaler."""
    return None if is_scaler(optimizer) else scalar(optimizer.loss_scale_factor)


def learning_rate(optimizer: Any, settings: ControlSettings) -> float:
    """Of the step that is coming."""
    value = inner(optimizer).learning_rate
    return (scalar(value) or 0.0) * settings.lr_factor


def epsilon(optimizer: Any) -> float | None:
    """Added to a denominator; None where there is none."""
    return scalar(getattr(inner(optimizer), "epsilon", None))


def state_of(optimizer: Any) -> tuple[dict[str, TensorBits], tuple[str, ...]]:
    """(floating-point state by name, which of them are second moments)."""
    stepping = inner(optimizer)
    rate = id(getattr(stepping, "_learning_rate", None))
    seconds = {
        id(v) for name in _SECOND_MOMENTS for v in getattr(stepping, name, ()) if v is not None
    }
    state, second_moments = {}, []
    for number, variable in enumerate(stepping._variables):
        values = None if id(variable) == rate else variable_values(variable)
        if values is not None:
            name = f"{number}.{variable.name}"
            state[name] = values
            if id(variable) in seconds:
                second_moments.append(name)
    return state, tuple(second_moments)


def is_gathering(optimizer: Any) -> bool:
    """The coming call adds to ``gradient_accumulation_steps`` and moves no weight."""
    steps = inner(optimizer).gradient_accumulation_steps
    if not steps:
        return False
    done = int(calls(optimizer).numpy())
    return (done + 1) % int(steps) != 0
