"""Dynamic loss scaling, one policy a framework: (state, was anything not finite) -> next state.

Each policy is what its framework computes, edge cases included: in fp32, with the growth test, the
floor and the refusal of an infinite scale as the framework has them. Tests drive the frameworks'
real scalers in step with these functions.

    >>> policy = POLICIES["torch"]
    >>> policy.step(policy.start(), found_inf=True, settings=policy.defaults).scale
    32768.0

Sources: torch `aten/src/ATen/native/cuda/AmpKernels.cu` (`_amp_update_scale_`) and its CPU twin;
Paddle `python/paddle/amp/grad_scaler.py` (`AmpScaler._update`); Keras
`keras/src/optimizers/loss_scale_optimizer.py`; TensorFlow
`tensorflow/python/training/experimental/loss_scale.py` (`DynamicLossScale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Settings:
    """What a person may set; a framework that fixes one ignores it (:attr:`Policy.settable`)."""

    initial_scale: float
    growth_interval: int  # finite steps in a row until the scale grows
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    backoff_after: int = 1  # steps with Inf or NaN in a row until the scale falls


@dataclass(frozen=True, slots=True)
class ScalerState:
    """Between two steps. ``scale`` is what the next step uses."""

    scale: float
    good: int = 0  # finite steps since the last growth or Inf
    bad: int = 0  # steps with Inf or NaN in a row, where the policy counts them


@dataclass(frozen=True, slots=True)
class Policy:
    """One framework's scaler."""

    name: str
    title: str
    defaults: Settings
    settable: frozenset[str]  # names of Settings' fields that the framework lets one set
    advance: Callable[[ScalerState, bool, Settings], ScalerState]
    words: str  # what is special about it, one sentence
    last_decides: bool = False  # of several steps before an update, else any with Inf or NaN

    def start(self, settings: Settings | None = None) -> ScalerState:
        """Before the first step."""
        return ScalerState(_fp32((settings or self.defaults).initial_scale))

    def step(
        self, state: ScalerState, found_inf: bool, settings: Settings | None = None
    ) -> ScalerState:
        """After a step at ``state.scale`` whose gradients held Inf or NaN, or did not. A step with
        ``found_inf`` is skipped by every policy."""
        return self.advance(state, found_inf, settings or self.defaults)


def _fp32(value: float) -> float:
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def _times(scale: float, factor: float) -> float:
    """fp32 scale times a Python float, rounded once to fp32."""
    return _fp32(scale * factor)


def _torch(state: ScalerState, found_inf: bool, settings: Settings) -> ScalerState:
    if found_inf:
        return ScalerState(_times(state.scale, settings.backoff_factor))
    good = state.good + 1
    if good != settings.growth_interval:
        return ScalerState(state.scale, good)
    grown = _times(state.scale, settings.growth_factor)
    return ScalerState(grown if math.isfinite(grown) else state.scale)


def _paddle(state: ScalerState, found_inf: bool, settings: Settings) -> ScalerState:
    if found_inf:
        bad = state.bad + 1
        if bad == settings.backoff_after:
            return ScalerState(_fp32(state.scale * _fp32(settings.backoff_factor)))
        return ScalerState(state.scale, 0, bad)
    good = state.good + 1
    if good == settings.growth_interval:
        return ScalerState(_fp32(state.scale * _fp32(settings.growth_factor)))
    return ScalerState(state.scale, good)


def _keras(state: ScalerState, found_inf: bool, settings: Settings) -> ScalerState:
    if found_inf:
        return ScalerState(_flushed(state.scale / 2))
    if state.good == settings.growth_interval - 1:
        return ScalerState(_fp32(state.scale * 2))
    return ScalerState(state.scale, state.good + 1)


def _tensorflow(state: ScalerState, found_inf: bool, settings: Settings) -> ScalerState:
    factor = settings.growth_factor
    if found_inf:
        return ScalerState(max(_flushed(state.scale / _fp32(factor)), 1.0))
    if state.good + 1 < settings.growth_interval:
        return ScalerState(state.scale, state.good + 1)
    grown = _fp32(state.scale * _fp32(factor))
    return ScalerState(grown if math.isfinite(grown) else state.scale)


def _flushed(value: float) -> float:
    """TensorFlow's kernels flush fp32 subnormals to zero."""
    rounded = _fp32(value)
    return rounded if abs(rounded) >= 2.0**-126 else 0.0


_ALL_FACTORS = ("growth_factor", "backoff_factor")
_ORDER: Final = (
    Policy(
        "torch", "PyTorch GradScaler", Settings(2.0**16, 2000),
        frozenset({"initial_scale", "growth_interval", *_ALL_FACTORS}), _torch,
        "It refuses to grow to Inf, and has no floor.",
    ),
    Policy(
        "paddle", "Paddle GradScaler", Settings(2.0**16, 2000),
        frozenset({"initial_scale", "growth_interval", *_ALL_FACTORS, "backoff_after"}), _paddle,
        "The scale falls after so many skipped steps in a row; it may grow to Inf and stay there.",
        last_decides=True,
    ),
    Policy(
        "paddle-amp-scaler", "Paddle AmpScaler", Settings(2.0**15, 1000),
        frozenset({"initial_scale", "growth_interval", *_ALL_FACTORS, "backoff_after"}), _paddle,
        "GradScaler's older name, with other defaults.", last_decides=True,
    ),
    Policy(
        "keras", "Keras 3 LossScaleOptimizer", Settings(2.0**15, 2000),
        frozenset({"initial_scale", "growth_interval"}), _keras,
        "The factors are fixed at 2; it may grow to Inf and stay there.",
    ),
    Policy(
        "tensorflow", "TensorFlow DynamicLossScale", Settings(2.0**15, 2000),
        frozenset({"initial_scale", "growth_interval", "growth_factor"}), _tensorflow,
        "One multiplier for both ways; it refuses to grow to Inf and never falls below 1.",
    ),
)  # fmt: skip
POLICIES: Final[Mapping[str, Policy]] = MappingProxyType({p.name: p for p in _ORDER})


def allowed(policy: Policy, settings: Settings) -> Settings:
    """``settings`` with what the framework fixes at its own value."""
    fixed = {
        name: getattr(policy.defaults, name)
        for name in Settings.__dataclass_fields__
        if name not in policy.settable
    }
    return replace(settings, **fixed)
