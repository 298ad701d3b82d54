"""Charts, one file per subject: from results of an analysis to Plotly figures. No Streamlit.

Each axis of exponents is log2 of the magnitude: the bar or cell of exponent e covers [e, e + 1).
Fills are palette colours with their own opacity and backgrounds are transparent, so that a figure
reads in the light and in the dark theme alike.
"""

from __future__ import annotations

# Plotly draws its tool bar into the upper right corner of a chart, over whatever is there. A
# legend above the plot begins with an empty line, which the bar lies on, however the legend wraps.
TOOLBAR_PX = 28
ABOVE = {
    "orientation": "h",
    "x": 0,
    "y": 1,
    "yanchor": "bottom",
    "title": {"text": "\u00a0", "side": "top", "font": {"size": TOOLBAR_PX / 1.3}},
}
