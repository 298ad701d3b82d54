"""The live figure that a notebook shows of a run: loss and loss scale, skips marked.

Plotly draws it in the notebook's page. The texts are escaped: a run's name may be anything.
"""

from __future__ import annotations

import html
import math
from pathlib import Path

from ampscope.records import RunInfo, StepRecord
from ampscope.store.reader import Reader

POINTS = 400
DASHBOARD = "http://localhost:8501"


def as_html(store: Path, run_id: str) -> str:
    """The run so far as a piece of a page; needs plotly."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    with Reader(store) as reader:
        info = reader.run(run_id)
        steps = reader.overview(run_id, POINTS)
    if not steps:
        return f"<p>{_sentence(info, steps)}</p>"
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    numbers = [s.step for s in steps]
    loss = [s.loss if s.loss is not None and math.isfinite(s.loss) else None for s in steps]
    figure.add_trace(go.Scatter(x=numbers, y=loss, name="loss"), row=1, col=1)
    figure.add_trace(
        go.Scatter(x=numbers, y=[s.scale for s in steps], name="loss scale", line={"shape": "hv"}),
        row=2,
        col=1,
    )
    bad = [s for s in steps if s.skipped or not math.isfinite(s.loss or 0.0)]
    figure.add_trace(
        go.Scatter(
            x=[s.step for s in bad],
            y=[s.scale for s in bad],
            mode="markers",
            marker={"symbol": "x", "color": "#D55E00", "size": 9},
            name="skipped or not finite",
        ),
        row=2,
        col=1,
    )
    figure.update_yaxes(title_text="loss", row=1, col=1)
    figure.update_yaxes(title_text="loss scale", type="log", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    figure.update_layout(height=340, margin={"l": 60, "r": 10, "t": 10, "b": 40})
    body: str = figure.to_html(full_html=False, include_plotlyjs="cdn")
    return f"<p>{_sentence(info, steps)}</p>{body}"


def _sentence(info: RunInfo, steps: list[StepRecord]) -> str:
    link = f'<a href="{DASHBOARD}/training?run={info.id}">Open in the dashboard</a>'
    name = html.escape(info.title)
    if not steps:
        return f"{name}: no step so far. {link}"
    last = steps[-1]
    scale = "" if last.scale is None else f", loss scale {last.scale:g}"
    loss = "not seen" if last.loss is None else f"{last.loss:.5g}"
    return f"{name}: step {last.step}, loss {loss}{scale}. {link}"
