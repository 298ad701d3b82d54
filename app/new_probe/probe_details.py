"""The folded part of the probe form: loss scaler, instruments, limits."""

from __future__ import annotations

import math
from dataclasses import replace

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from ampscope.records import Cadence, RunSpec, ScalerSpec

LARGEST_NUMBER = 2**53 - 1  # that a number in a browser holds exactly
SCALE_HELP = "The loss is multiplied by this before backward. torch starts with 65536 (2^16)."
FACTOR_HELP = (
    "Multiplies the loss and corrects the optimizer for it, so that in exact arithmetic nothing "
    "changes. A small factor shows what fp16 does to small gradients."
)
HISTOGRAM_HELP = "One count per power of two, module and role."
TRACE_HELP = "Each op with its dtypes and casts: the dearest instrument."
SHADOW_HELP = "The same step in fp32: the only way to tell lost values from zeros."


def draw(spec: RunSpec) -> RunSpec:
    """Three folded groups; ``spec`` with what they say."""
    with st.expander("Loss scaler and loss factor"):
        spec = replace(spec, scaler=_scaler(spec.scaler))
        factor = _number(st.container(), "Loss factor", spec.loss_factor, "np-factor", FACTOR_HELP)
        spec = replace(spec, loss_factor=factor)
    with st.expander("What is recorded, and how often"):
        spec = replace(spec, cadence=_cadence(spec.cadence))
    with st.expander("Limits"):
        left, right = st.columns(2)
        time_s = _number(left, "Time limit, s", spec.time_limit_s, "np-time")
        help_ = "0 is none. A limit needs Linux."
        mib = _whole(right, "Memory limit, MiB", spec.memory_limit_mib, "np-memory", help_)
    return replace(spec, time_limit_s=time_s, memory_limit_mib=mib)


def _scaler(scaler: ScalerSpec) -> ScalerSpec:
    scale, growth, backoff, interval = st.columns(4)
    return ScalerSpec(
        _number(scale, "Initial scale", scaler.init_scale, "np-scale", SCALE_HELP),
        _number(growth, "Growth factor", scaler.growth_factor, "np-growth"),
        _number(backoff, "Backoff factor", scaler.backoff_factor, "np-backoff"),
        _whole(interval, "Growth interval, steps", scaler.growth_interval, "np-interval"),
    )


def _cadence(cadence: Cadence) -> Cadence:
    st.caption("In steps: 1 is every step, 10 every tenth, 0 never.")
    left, middle, right = st.columns(3)
    return Cadence(
        _whole(left, "Histograms", cadence.histogram, "np-histogram", HISTOGRAM_HELP),
        _whole(middle, "Op trace", cadence.trace, "np-trace", TRACE_HELP),
        _whole(right, "fp32 shadow", cadence.shadow, "np-shadow", SHADOW_HELP),
    )


def _number(
    place: DeltaGenerator, label: str, value: float, key: str, help_: str | None = None
) -> float:
    start = float(value) if math.isfinite(value) else 0.0  # 0 is refused with a sentence
    entered = place.number_input(label, value=start, format="%g", help=help_, key=key)
    return float(entered)


def _whole(
    place: DeltaGenerator, label: str, value: int, key: str, help_: str | None = None
) -> int:
    return int(place.number_input(label, value=bounded(value), step=1, help=help_, key=key))


def bounded(value: int) -> int:
    """What a widget can hold of a whole number that a run brings, which may be any."""
    return max(-LARGEST_NUMBER, min(LARGEST_NUMBER, value))
