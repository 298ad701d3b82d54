"""Figures of the Diagnosis page: no loss is dropped, and no name becomes markup."""

from __future__ import annotations

import math
import tomllib
from itertools import pairwise
from pathlib import Path

from ampscope.analysis.training import finite_parts
from ampscope.report.palette import NONFINITE
from ampscope.report.verdict_words import Link
from app.figures import modules as chain_module
from app.figures.modules import cause_chain
from app.figures.training import Curve, control_losses

CONFIG = Path(__file__).resolve().parents[2] / "app" / ".streamlit" / "config.toml"
LOSSES = [1.0, math.nan, 0.5, math.inf, -math.inf, 0.25, math.nan]


def curve(name: str, losses: list[float]) -> Curve:
    return Curve(name, finite_parts(range(len(losses)), losses), "#123456", "solid")


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


def test_boxes_lie_below_each_other_and_arrows_between_them() -> None:
    links = [Link(f"box {n}", "word " * 40, is_nonfinite=n == 1, is_root=n == 0) for n in range(4)]
    figure = cause_chain(links)
    boxes = [s for s in figure.layout.shapes if s.x1 == 1]
    assert len(boxes) == 4
    assert all(upper.y0 > lower.y1 for upper, lower in pairwise(boxes))
    assert min(b.y0 for b in boxes) >= 0
    arrows = [a for a in figure.layout.annotations if a.showarrow]
    assert [(a.ay, a.y) for a in arrows] == [
        (upper.y0, lower.y1) for upper, lower in pairwise(boxes)
    ]
    edges = [s.fillcolor for s in figure.layout.shapes if s.fillcolor]
    assert [colour == NONFINITE for colour in edges] == [False, True, False, False]


def test_long_text_is_cut_on_the_box_and_whole_on_hover() -> None:
    (box,) = cause_chain([Link("title", "word " * 100)]).layout.annotations
    assert box.text.endswith("…")
    assert box.text.count("<br>") == chain_module.MAX_LINES
    assert box.hovertext.count("word") == 100


def test_text_has_the_theme_s_colour() -> None:
    theme = tomllib.loads(CONFIG.read_text())["theme"]
    assert theme["light"]["textColor"] == chain_module.TEXT_LIGHT
    assert theme["dark"]["textColor"] == chain_module.TEXT_DARK


def test_names_are_text() -> None:
    (box,) = cause_chain([Link("<img src=x>", "<a href='javascript:1'>x</a>")]).layout.annotations
    assert "<img" not in box.text + box.hovertext
    assert "<a " not in box.text + box.hovertext
    figure = control_losses([curve("<b>x</b>", [math.nan])])
    assert all("<b>" not in (t.name + t.hovertemplate) for t in figure.data)
