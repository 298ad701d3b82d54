"""Times that were measured while something else ran are said to be such."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from ampscope.records import Result, StepTimes
from app.text import escape, percent

WIDE = 0.5  # quartiles of an undisturbed step lie within 5 to 30 % of its median on two cores


def warn(results: Sequence[Result]) -> None:
    """A line where the quartiles of a step lie far apart."""
    spread = max((r.step.spread for r in results if isinstance(r, StepTimes)), default=0.0)
    if spread > WIDE:
        st.warning(
            escape(
                f"Something else ran on this machine meanwhile: the times of a step spread by "
                f"{percent(spread)} of their median. Measure again when it is idle."
            ),
            icon=":material/group:",
        )
