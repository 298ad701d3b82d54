"""The part of the Gradients page that moves with its sliders: drawn anew without the page."""

from __future__ import annotations

import streamlit as st

from ampscope.formats import NumberFormat
from ampscope.records import Role
from app import states
from app.gradients import gradient_controls, gradient_map, module_histograms, underflow_view
from app.gradients.rank_frames import Ranks


def show(ranks: Ranks, role: Role, fmt: NumberFormat) -> None:
    """Everything about one role; while playing it draws itself anew at every step."""
    pace = gradient_controls.PLAY_EVERY_S if gradient_controls.is_playing() else None
    st.fragment(_show, run_every=pace)(ranks, role, fmt)


def _show(ranks: Ranks, role: Role, fmt: NumberFormat) -> None:
    run = ranks[0]
    look = None
    with states.part():  # the sliders are drawn before what they choose is read
        look = gradient_map.choose(ranks, role, fmt)
    if look is None:
        return
    with states.part():
        gradient_map.overview(run, look)
    with states.part():
        gradient_map.heat_map(look)
    with states.part():
        gradient_map.zone_table(look)
    st.subheader("One module", anchor=False)
    module = module_histograms.pick(look)
    with states.part():
        module_histograms.at_step(look, module)
    with states.part():
        module_histograms.over_time(ranks, look, module)
    with states.part():
        series = underflow_view.all_modules(run, look, module)
        if series is not None:
            underflow_view.one_module(series, look, module)
