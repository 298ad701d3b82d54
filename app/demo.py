"""The demo: one small GPT with a small loss, three times: fp16 without a scaler loses gradients,
fp16 with one does not, and fp32 shows what they should have been."""

from __future__ import annotations

import streamlit as st
from ampscope.records import RunSpec, State

from app import links, live, probes, sitemap

STEPS = 20
# 2^-12: the gradients of GPT tiny then lie where fp16 loses them without a scaler and keeps them
# with one.
LOSS_FACTOR = 2.0**-12
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
    """Progress of the demo that the URL names; opens its result once. True while there is one."""
    group = links.wanted(GROUP)
    if not group:
        return False
    st.subheader("Demo", anchor=False)
    runs = live.panel(group, key="demo")
    has_ended = bool(runs) and all(run.state is State.FINISHED for run in runs)
    if has_ended and st.session_state.pop(_OPENS, False):
        links.keep(GROUP, None)
        result = {"run": runs[0].id, "role": "grad_output"}
        st.switch_page(sitemap.GRADIENTS.file, query_params=result)
    return bool(runs)
