"""The figure that a notebook shows of a run: loss and loss scale, bad steps marked.

In a Jupyter kernel `watch` shows it at once and draws it anew every few seconds, in the thread
that writes the store. Anywhere else it is what ``run`` looks like as the last line of a cell.
"""

from __future__ import annotations

import html
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampscope.records import RunInfo, StepRecord
from ampscope.store.reader import Reader

if TYPE_CHECKING:
    import plotly.graph_objects as go

POINTS = 400
EVERY_S = 3.0
DASHBOARD = "http://127.0.0.1:8501"  # where `ampscope dashboard` is by default
_BAD = "#D55E00"  # as on the dashboard: nothing else has this colour


class LiveFigure:
    """Shown in the notebook's cell; :meth:`update` draws it anew when it is time."""

    def __init__(self, store: Path, run_id: str) -> None:
        self._store, self._run_id = store, run_id
        self._shown_at = 0.0
        self._text: Any = None  # IPython's handles of what is shown
        self._figure: Any = None
        self.update(last=True)

    def update(self, *, last: bool = False) -> None:
        """Draw it when the last time is :data:`EVERY_S` ago, or for the last time."""
        if not last and time.monotonic() - self._shown_at < EVERY_S:
            return
        self._shown_at = time.monotonic()
        info, steps = read(self._store, self._run_id)
        self._text = _shown(self._text, {"text/html": sentence(info, steps)})
        if steps:
            self._figure = _shown(self._figure, bundle(figure(steps)))


def bundle(drawn: go.Figure) -> dict[str, Any]:
    """The figure as notebooks take it: for those that know plotly, and as a piece of a page."""
    page = drawn.to_html(full_html=False, include_plotlyjs="cdn")
    return {"application/vnd.plotly.v1+json": json.loads(drawn.to_json()), "text/html": page}


def _shown(handle: Any, content: dict[str, Any]) -> Any:
    """Show ``content``, or put it in the place of what ``handle`` shows; returns the handle."""
    from IPython.core import display_functions

    if handle is not None:
        handle.update(content, raw=True)
        return handle
    return display_functions.display(content, raw=True, display_id=True)  # type: ignore[no-untyped-call]  # IPython leaves it untyped


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, and not a terminal's IPython."""
    try:
        from IPython.core.getipython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def as_html(store: Path, run_id: str) -> str:
    """The run so far as a piece of a page."""
    info, steps = read(store, run_id)
    body: str = figure(steps).to_html(full_html=False, include_plotlyjs="cdn") if steps else ""
    return sentence(info, steps) + body


def read(store: Path, run_id: str) -> tuple[RunInfo, list[StepRecord]]:
    """The run and at most a few hundred of its steps, the bad ones among them."""
    with Reader(store) as reader:
        return reader.run(run_id), reader.overview(run_id, POINTS)


def sentence(info: RunInfo, steps: list[StepRecord]) -> str:
    """Where it stands, and the way to the dashboard. Names may hold anything: escaped."""
    link = f'<a href="{DASHBOARD}/training?run={info.id}">Open in the dashboard</a>'
    name = html.escape(info.title)
    if not steps:
        return f"<p>{name}: no step so far. {link}</p>"
    last = steps[-1]
    scale = "" if last.scale is None else f", loss scale {last.scale:g}"
    loss = "not seen" if last.loss is None else f"{last.loss:.5g}"
    return f"<p>{name}: step {last.step}, loss {loss}{scale}. {link}</p>"


def figure(steps: list[StepRecord]) -> go.Figure:
    """Loss over steps, and the loss scale below it where there is one."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    has_scale = any(step.scale is not None for step in steps)
    drawn = make_subplots(rows=1 + has_scale, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    numbers = [step.step for step in steps]
    loss = [_finite(step.loss) for step in steps]
    drawn.add_trace(go.Scatter(x=numbers, y=loss, name="loss"), row=1, col=1)
    bad = [s for s in steps if s.skipped or (s.loss is not None and _finite(s.loss) is None)]
    if has_scale:
        scales, line = [step.scale for step in steps], {"shape": "hv"}
        drawn.add_trace(go.Scatter(x=numbers, y=scales, name="loss scale", line=line), row=2, col=1)
        drawn.update_yaxes(title_text="loss scale", type="log", row=2, col=1)
    marks = [s.scale if has_scale else min((y for y in loss if y), default=0) for s in bad]
    drawn.add_trace(
        go.Scatter(
            x=[step.step for step in bad],
            y=marks,
            mode="markers",
            marker={"symbol": "x", "color": _BAD, "size": 9},
            name="skipped or not finite",
        ),
        row=1 + has_scale,
        col=1,
    )
    drawn.update_yaxes(title_text="loss", row=1, col=1)
    drawn.update_xaxes(title_text="step", row=1 + has_scale, col=1)
    drawn.update_layout(height=200 + 140 * has_scale, margin={"l": 60, "r": 10, "t": 10, "b": 40})
    return drawn


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
