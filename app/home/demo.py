"""The demo: one small GPT with a small loss, three times: fp16 without a scaler loses gradients,
fp16 with one does not, and fp32 shows what they should have been."""

from __future__ import annotations

import streamlit as st

from ampscope.records import Cadence, RunSpec, State
from app import links, permissions, sitemap
from app.runs import live, probes

STEPS = 20
LAST_SHADOW = (STEPS - 1) // Cadence().shadow * Cadence().shadow  # where lost values are known
# Measured on GPT tiny: at step 10 fp16 then loses 89 % of the output gradients without a scaler and
# 5 % with one, and at step 15 the loss (over the factor) is 3.59 without, 3.03 with, 3.04 in fp32.
# At 2^-8 as many gradients go, but Adam makes up for it and the loss curves look alike.
LOSS_FACTOR = 2.0**-11
PRECISIONS = ("fp16-noscaler", "fp16", "fp32")
GROUP = "demo"  # the URL's name for the demo's group
_OPENS = "demo-opens"  # session key: this session started the demo and waits for its result


def specs() -> list[RunSpec]:
    """The worst first: its result is what opens."""
    return [
        RunSpec(
            workload="gpt",
            size="tiny",
            precision=precision,
            steps=STEPS,
            loss_factor=LOSS_FACTOR,
            label=f"Demo, {precision}",
        )
        for precision in PRECISIONS
    ]


def invite() -> None:
    """The one button of an empty store."""
    if not permissions.offers("starting the demo"):
        return
    with st.container(border=True):
        st.subheader("See what half precision does to a training", anchor=False)
        st.markdown(
            "The demo trains a small GPT three times, in fp16 without a loss scaler, in fp16 with "
            "one, and in fp32, and opens the gradients that fp16 lost. It takes about 20 seconds."
        )
        if st.button("Run the demo", type="primary", key="run-demo"):
            links.keep(GROUP, probes.start(specs()))
            st.session_state[_OPENS] = True
            st.rerun()
    st.page_link(sitemap.NEW_PROBE.file, label="Or set up a probe of your own")


def follow() -> bool:
    """Progress of the demo that the URL names; opens its result once. True while it runs."""
    group = links.wanted(GROUP)
    runs = probes.of_group(group) if group else []
    if not runs:
        return False
    st.subheader("Demo", anchor=False)
    live.panel(group, key="demo")
    has_ended = all(run.state is State.FINISHED for run in runs)
    if has_ended and st.session_state.pop(_OPENS, False):
        links.keep(GROUP, None)
        result = {"run": runs[0].id, "role": "grad_output", "step": str(LAST_SHADOW)}
        st.switch_page(sitemap.GRADIENTS.file, query_params=result)
    return any(run.state.is_active for run in runs)
