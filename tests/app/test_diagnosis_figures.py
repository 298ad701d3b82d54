"""Figures of the Diagnosis page: no loss is dropped, and no name becomes markup."""

from __future__ import annotations

import math

from ampscope.analysis.training import finite_parts
from ampscope.story.palette import NONFINITE
from app.figures.training import DrawnCurve, control_losses

LOSSES = [1.0, math.nan, 0.5, math.inf, -math.inf, 0.25, math.nan]


def curve(name: str, losses: list[float]) -> DrawnCurve:
    return DrawnCurve(name, finite_parts(range(len(losses)), losses), "#123456", "solid")


def test_every_loss_is_drawn_once() -> None:
    figure = control_losses([curve("unchanged", LOSSES), curve("in fp32", [1.0] * 7)])
    lines = {t.name: t for t in figure.data if t.mode.startswith("lines")}
    drawn = [(x, y) for x, y in zip(lines["unchanged"].x, lines["unchanged"].y, strict=True)]
    assert drawn == [(i, x if math.isfinite(x) else None) for i, x in enumerate(LOSSES)]
    assert not lines["unchanged"].connectgaps
    band = {t.name: list(t.x) for t in figure.data if t.mode == "markers"}
    assert band == {"NaN": [1, 6], "+Inf": [3], "−Inf": [4]}
    colours = {t.marker.color for t in figure.data if t.mode == "markers"}
    assert colours == {NONFINITE}


def test_the_band_has_a_row_for_each_control_that_needs_one() -> None:
    figure = control_losses([curve("a", [1.0]), curve("b", [math.nan]), curve("c", [math.inf])])
    assert list(figure.layout.yaxis2.categoryarray) == ["c", "b"]
    assert "yaxis2" not in control_losses([curve("a", [1.0, 2.0])]).layout


def test_a_log_axis_only_where_it_can_hold_every_value() -> None:
    assert control_losses([curve("a", [1e-3, 1.0])]).layout.yaxis.type == "log"
    assert control_losses([curve("a", [1.0, 2.0])]).layout.yaxis.type == "linear"
    assert control_losses([curve("a", [-1e6, 0.0, 1e6])]).layout.yaxis.type == "linear"
    assert control_losses([curve("a", [math.nan])]).layout.yaxis.type == "linear"


def test_names_are_text() -> None:
    figure = control_losses([curve("<b>x</b>", [math.nan])])
    assert all("<b>" not in (t.name + t.hovertemplate) for t in figure.data)
