"""Figures drop nothing and never read a name as markup."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
import pytest

from ampscope.analysis.training import finite_parts
from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import (
    NAN,
    NEG_INF,
    NEG_ZERO,
    POS_INF,
    POS_ZERO,
    RAW_LEN,
    exponent_range,
    zone_spans,
)
from ampscope.records import StepRecord
from ampscope.story.palette import NONFINITE, ZONES
from app.figures.exponents import MapRows, exponent_bars, exponent_map
from app.figures.training import scale_trajectory, training_curves
from app.figures.underflow import underflow_map

RNG = np.random.default_rng(3)


def rows_of(count: int) -> np.ndarray:
    rows = RNG.integers(0, 1000, (count, RAW_LEN))
    rows[RNG.random(rows.shape) < 0.6] = 0
    return rows


def axis_of(trace: go.Heatmap) -> str:
    return trace.xaxis or "x"


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2", "fp32"])
@pytest.mark.parametrize("shift", [-24, 0, 13])
def test_a_heat_map_shows_every_element(name: str, shift: int) -> None:
    rows = rows_of(4)
    data = MapRows(rows, list("abcd"), ["m.a", "m.b", "m.c", "<b>m.d</b>"], [shift] * 4)
    figure = exponent_map(data, FORMATS[name], x_title="x", y_title="module")
    shown = np.zeros(4, np.int64)
    for trace in figure.data:
        shown += np.asarray(trace.customdata).sum(axis=1)
        assert (
            np.isnan(np.asarray(trace.z, float)).sum() == (np.asarray(trace.customdata) == 0).sum()
        )
    assert (shown == rows.sum(axis=1)).all()
    assert "&lt;b&gt;m.d" in figure.data[0].y[3]


def test_nonfinite_has_its_own_column_at_full_strength_however_rare() -> None:
    rows = np.zeros((2, RAW_LEN), np.int64)
    rows[:, 150] = 10**9
    rows[1, [NAN, POS_INF, NEG_INF]] = 1, 2, 3
    data = MapRows(rows, ["a", "b"], ["a", "b"], [0, 0])
    figure = exponent_map(data, FORMATS["fp16"], x_title="x", y_title="y")
    special = next(t for t in figure.data if axis_of(t) == "x3")
    assert np.asarray(special.customdata).tolist() == [[0, 0, 0], [1, 2, 3]]
    assert np.asarray(special.z)[1].tolist() == [1, 1, 1]
    assert {color for _, color in special.colorscale} == {NONFINITE}
    others = [t for t in figure.data if axis_of(t) != "x3"]
    assert all(NONFINITE not in str(t.colorscale) for t in others)


def test_each_row_moves_by_its_own_shift() -> None:
    rows = np.zeros((2, RAW_LEN), np.int64)
    rows[:, 1 + 149] = 5  # exponent 0
    data = MapRows(rows, ["0", "1"], ["step 0", "step 1"], [0, -3])
    figure = exponent_map(data, FORMATS["fp16"], x_title="x", y_title="y")
    normal = next(t for t in figure.data if axis_of(t) == "x2")
    counts = np.asarray(normal.customdata)
    at = {round(x - 0.49): i for i, x in enumerate(normal.x)}
    assert (counts[0, at[0]], counts[1, at[-3]]) == (5, 5)


@pytest.mark.parametrize("name", FORMATS)
def test_zones_lie_where_the_format_puts_them(name: str) -> None:
    fmt = FORMATS[name]
    shown = exponent_range((-40, 30), fmt)
    spans = zone_spans(fmt, shown)
    assert [zone for zone, _, _ in spans] == ["lost", "subnormal", "normal", "overflow"]
    assert spans[0][1] == shown.lowest
    assert spans[-1][2] == shown.highest + 1
    assert all(a[2] == b[1] for a, b in pairwise(spans))
    assert spans[2][1:] == (fmt.min_normal_exponent, fmt.max_exponent + 1)
    assert shown.lowest < -40
    assert shown.highest > 30


def test_limits_are_labelled_lines() -> None:
    figure = exponent_bars(rows_of(1)[0], FORMATS["fp16"], 0, x_title="x")
    texts = " ".join(a.text for a in figure.layout.annotations)
    assert "max 65,504" in texts
    assert "min normal 2<sup>−14</sup>" in texts
    assert "min subnormal 2<sup>−24</sup>" in texts
    lines = sorted(s.x0 for s in figure.layout.shapes if s.type == "line")
    assert lines == pytest.approx([-24, -14, math.log2(65504)])


def test_bars_show_every_element_in_its_zone() -> None:
    row = rows_of(1)[0]
    row[[POS_ZERO, NEG_ZERO, NAN, POS_INF, NEG_INF]] = 11, 12, 13, 14, 15
    figure = exponent_bars(row, FORMATS["fp16"], 2, x_title="x")
    assert sum(np.nansum(np.asarray(t.y, float)) for t in figure.data) == row.sum()
    by_zone = {t.name: t for t in figure.data}
    assert by_zone["not finite"].marker.color == ZONES["nonfinite"]
    assert np.asarray(by_zone["not finite"].y).tolist() == [13, 14, 15]
    assert np.asarray(by_zone["zero"].y).tolist() == [11, 12]


def test_a_cell_without_a_shadow_is_empty_and_a_zero_is_not() -> None:
    counts, totals = np.array([[0, 3, 0]]), np.array([[10, 10, 0]])
    zeros, hits = underflow_map(counts, totals, [0, 5, 9], ["a"], ["a"], "#0072B2").data
    assert np.isnan(np.asarray(zeros.z)).tolist() == [[False, True, True]]
    assert np.isnan(np.asarray(hits.z)).tolist() == [[True, False, True]]


STEPS = [
    StepRecord(0, loss=math.nan, scale=4.0, skipped=True, grad_norm=math.inf, growth_counter=0),
    StepRecord(1, loss=-math.inf, scale=2.0, grad_norm=1.0, growth_counter=1),
    StepRecord(2, loss=2.0, scale=2.0, grad_norm=None, growth_counter=2),
]


def figure_of(steps: list[StepRecord]) -> go.Figure:
    numbers = [s.step for s in steps]
    loss = finite_parts(numbers, [s.loss for s in steps])
    return scale_trajectory(steps, loss, finite_parts(numbers, [s.grad_norm for s in steps]))


def test_the_trajectory_marks_skips_and_keeps_what_is_not_finite() -> None:
    traces = {t.name: t for t in figure_of(STEPS).data}
    assert list(traces["loss scale"].y) == [2.0, 1.0, 1.0]
    assert list(traces["skipped step"].x) == [0]
    assert list(traces["loss"].y) == [None, None, 2.0]  # a gap, not a bridge
    assert list(zip(traces["NaN"].x, traces["NaN"].y, strict=True)) == [(0, "loss")]
    assert list(zip(traces["+Inf"].x, traces["+Inf"].y, strict=True)) == [(0, "gradient norm")]
    assert list(zip(traces["−Inf"].x, traces["−Inf"].y, strict=True)) == [(1, "loss")]
    assert "growth counter 1" in traces["loss scale"].text[1]
    assert "scale 2 = 2<sup>1</sup>" in traces["loss scale"].text[1]


def test_panels_without_content_are_left_out() -> None:
    plain = [StepRecord(i, loss=1.0, grad_norm=0.0) for i in range(3)]
    titles = [a.text for a in figure_of(plain).layout.annotations]
    assert titles == ["loss", "gradient norm (unscaled)"]
    assert len(figure_of(STEPS).layout.annotations) == 4
    assert figure_of([]).data is not None
    broken = [StepRecord(i, loss=math.nan, scale=2.0, grad_norm=math.nan) for i in range(3)]
    titles = [a.text for a in figure_of(broken).layout.annotations]
    assert titles == ["loss scale", "not finite"]


def test_a_training_that_clips_has_both_norms_in_one_panel() -> None:
    steps = [
        StepRecord(step=i, loss=1.0, grad_norm=min(n, 1.0), unclipped_norm=n if n > 1.0 else None)
        for i, n in enumerate([0.5, 8.0, math.inf, 4.0])
    ]
    numbers = [s.step for s in steps]
    loss = finite_parts(numbers, [s.loss for s in steps])
    norm = finite_parts(numbers, [s.grad_norm for s in steps])
    figure = training_curves(steps, loss, norm, [])
    drawn = {trace.name: trace for trace in figure.data}
    before = drawn["gradient norm before the clip"]
    assert dict(zip(before.x, before.y, strict=True)) == {1: 8.0, 2: None, 3: 4.0}
    assert before.yaxis == drawn["gradient norm"].yaxis
    assert before.mode == "markers", "a line would bridge the steps that were not clipped"
    assert list(drawn["+Inf"].x) == [2], "what cannot be drawn stands in the band"


@pytest.mark.parametrize("largest", [1e3, 1e9, 1e38, 1e300])
def test_an_explosion_leaves_few_labels_on_its_axes(largest: float) -> None:
    values = (3.0, 0.5, largest)
    parts = finite_parts(range(3), values)
    steps = [StepRecord(n, loss=v, grad_norm=v) for n, v in enumerate(values)]
    for figure in (training_curves(steps, parts, parts, []), scale_trajectory(steps, parts, parts)):
        for axis in figure.select_yaxes():
            if axis.type == "log":
                assert math.log10(largest / 0.5) / axis.dtick <= 7
        kinds = {axis.title.text: axis.type for axis in figure.select_yaxes()}
        assert kinds["2-norm"] == "log"
        assert (kinds["loss"] == "log") == (largest >= 1e9)  # a loss that falls is read linearly
