"""The calls that every step has, in the words of torch's call log."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ampscope.frameworks.steps import StepFacts
from ampscope.frameworks.tensors import Values
from ampscope.observations import Call


def step_calls(first: int, step: int, facts: StepFacts) -> list[Call]:
    """Numbered from ``first`` on."""
    has_scaler = facts.scale is not None
    is_scaled = has_scaler if facts.loss_scaled is None else facts.loss_scaled
    backward = Call(0, step, "backward", value=facts.loss, scaled=is_scaled)
    if facts.static_scale is not None:  # as a product written by hand in PyTorch
        backward = replace(backward, note=f"mul {facts.static_scale!r}", scaled=False)
    end = Call(0, step, "optimizer_step", subject=facts.optimizer)
    if has_scaler:
        end = Call(0, step, "scaler_step", subject=facts.scaler, note=facts.optimizer)
    scale = [Call(0, step, "scale", value=facts.scale, scaled=True)] if is_scaled else []
    calls = (*scale, backward, end)
    return [replace(call, seq=first + number) for number, call in enumerate(calls)]


def inputs_call(values: Values) -> Call:
    """The first call of a model, by which two runs are seen to begin alike."""
    total = float(values.floats().astype(np.float64).sum())
    return Call(0, 0, "inputs", value=total, dtype=values.name)
