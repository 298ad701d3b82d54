"""Figures that all browsers share: the same as fresh ones, and no drawing changes them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from streamlit.testing.v1 import AppTest

from ampscope.ext.lessons.catalog import LESSONS
from app.ext.lessons.figures import Trace, lines
from app.ext.lessons.lesson_page import LESSON_ENTRIES
from app.figures.cache import MAX_FIGURES, cached_figure
from tests.helpers.lesson_runs import stored

Open = Callable[..., AppTest]
MEASURED = [one for one in LESSONS.values() if one.is_measured and one.number in LESSON_ENTRIES]


def curve(last: float) -> list[Trace]:
    return [Trace("loss", [1, 2, 3], [3.0, 2.0, last], "#000000")]


def test_a_kept_figure_is_what_a_fresh_one_is() -> None:
    first = lines(curve(1.0), x_title="step", y_title="loss", mark=2)
    again = lines(curve(1.0), x_title="step", y_title="loss", mark=2)
    assert first is again
    fresh = lines.fresh(curve(1.0), x_title="step", y_title="loss", mark=2)
    assert json.loads(first.to_json()) == json.loads(fresh.to_json())
    assert lines(curve(0.5), x_title="step", y_title="loss", mark=2) is not first
    assert lines(curve(1.0), x_title="step", y_title="loss", mark=3) is not first


def test_the_oldest_is_let_go_and_threads_agree() -> None:
    built: list[int] = []

    @cached_figure
    def figure(row: object) -> go.Figure:
        built.append(1)
        return go.Figure(go.Bar(y=row))

    for n in range(MAX_FIGURES + 1):
        figure(np.array([n]))
    count = len(built)
    figure(np.array([MAX_FIGURES]))
    assert len(built) == count
    figure(np.array([0]))
    assert len(built) == count + 1
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(figure(np.array([5])).to_json()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1
    assert len(found) == 8


def specs(app: AppTest) -> list[object]:
    return [json.loads(chart.proto.spec) for chart in app.get("plotly_chart")]


@pytest.mark.parametrize("lesson", MEASURED, ids=lambda one: one.id)
def test_drawing_a_lesson_again_and_enlarged_changes_no_figure(
    open_page: Open, store_path: Path, lesson: object
) -> None:
    info = next(one for one in MEASURED if one is lesson)
    stored(store_path, info.id)
    page = LESSON_ENTRIES[info.number].name
    app = open_page(page, **{f"guess{info.number}": "a"})
    first = specs(app)
    assert first
    large = open_page(page, type="large", **{f"guess{info.number}": "a"})
    assert specs(large) != first
    assert specs(app.run()) == first
    assert specs(open_page(page, **{f"guess{info.number}": "a"})) == first
