"""Start a measurement of the products of one training step."""

from __future__ import annotations

import streamlit as st

from ampscope.errors import AmpscopeError
from ampscope.hardware.describe import uses_cuda
from ampscope.policy.modes import PRECISIONS
from ampscope.records import RunSpec
from app import machine, permissions, states
from app.runs import measurements, workload_choice
from app.text import escape

SLOW = "On this CPU a product in fp16 can take a hundred times as long as in fp32."


def draw() -> None:
    """Workload, size, precision, and the button."""
    if not permissions.offers("measuring a step's products"):
        return
    on_cuda = uses_cuda(machine.report())
    what, how = st.columns(2, gap="large")
    with what:
        choice = workload_choice.draw(RunSpec(workload="gpt", size="small"))
    with how:
        names = [name for name, mode in PRECISIONS.items() if on_cuda or not mode.tf32]
        precision = st.selectbox(
            "Precision",
            names,
            index=names.index("fp16" if on_cuda else "bf16"),
            format_func=lambda name: f"{name}: {PRECISIONS[name].summary}",
            key="cores-precision",
        )
        if not on_cuda and "fp16" in precision:
            st.caption(escape(SLOW))
        started = st.button("Measure its products", type="primary", key="cores-start")
    if started:
        try:
            measurements.start(
                RunSpec(
                    workload=workload_choice.named(choice),
                    kind="cores",
                    size=choice.size,
                    precision=precision,
                    steps=1,
                    policy="native",  # a rehearsal of CUDA's rules says nothing about speed
                )
            )
        except AmpscopeError as error:
            states.unreadable(str(error))
