"""Start the same network in every framework that is on this machine."""

from __future__ import annotations

import streamlit as st

from ampscope.errors import AmpscopeError
from ampscope.experiments.validate import FRAMEWORK_PRECISIONS
from ampscope.frameworks.names import FRAMEWORKS, TORCH
from ampscope.frameworks.pythons import find_python, why_missing
from ampscope.records import RunSpec
from ampscope.workloads.catalog import SHARED
from app import layout, permissions, states
from app.runs import probes
from app.text import code, escape

STEPS = 10


def show() -> str:
    """The form; the group's name when runs were started, else ""."""
    if not permissions.offers("training in several frameworks"):
        return ""
    missing = {name: why for name in FRAMEWORKS if (why := why_missing(name))}
    here = [TORCH, *(name for name in FRAMEWORKS if name not in missing)]
    left, middle, right = st.columns(3, vertical_alignment="bottom")
    network = left.selectbox(
        "Network", list(SHARED), format_func=lambda n: n.removeprefix("shared-"), key="fw-network"
    )
    layout.see(SHARED[str(network)])
    precision = middle.selectbox(
        "Precision", FRAMEWORK_PRECISIONS, index=1, key="fw-precision", help=_HELP
    )
    steps = right.number_input("Steps", 1, 200, STEPS, key="fw-steps")
    for name, why in missing.items():
        if find_python(FRAMEWORKS[name]) is not None:  # a variable that leads nowhere
            st.caption(escape(why))
            continue
        st.caption(
            f"{FRAMEWORKS[name].title} is not on this machine. In a terminal: "
            + code(f"ampscope frameworks install {name}")
        )
    if not st.button(f"Train in {len(here)} frameworks", type="primary", key="fw-start"):
        return ""
    try:
        return probes.start(
            [
                RunSpec(
                    workload=str(network),
                    precision=str(precision),
                    steps=int(steps),
                    framework=name,
                    label=f"{str(network).removeprefix('shared-')} {precision} in {name}",
                )
                for name in here
            ]
        )
    except AmpscopeError as error:
        states.unreadable(str(error))
        return ""


_HELP = (
    "fp16: PyTorch's autocast with GradScaler, Keras' mixed_float16, Paddle's auto_cast O1 with "
    "GradScaler. On a CPU PyTorch rehearses CUDA's lists, Keras computes in half itself, and "
    "Paddle, which switches AMP off on a CPU, is emulated by rounding after its own lists."
)
