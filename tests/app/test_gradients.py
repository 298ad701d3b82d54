"""The Gradients page in every state; its counts are compared with the store's own histograms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import NAN, POS_ZERO, RAW_LEN, zones
from ampscope.records import Frame, ModuleRecord, Role, ShadowRecord, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers import stores
from tests.helpers.pages import NO_RUN, asked, metrics, texts

Open = Callable[..., Any]
ONE = 1 + 149  # column of the exponent 0


def labelled(widgets: Any, label: str) -> Any:
    return next(widget for widget in widgets if widget.label == label)


def row(**counts: int) -> np.ndarray:
    """``row(m20=3, p1=2, zero=4)``: elements by exponent, minus and plus spelt out."""
    out = np.zeros(RAW_LEN, np.int64)
    for name, count in counts.items():
        special = {"zero": POS_ZERO, "nan": NAN}.get(name)
        exponent = int(name[1:]) * (-1 if name[0] == "m" else 1) if special is None else 0
        out[ONE + exponent if special is None else special] = count
    return out


def written(
    store: Path,
    frames: list[tuple[int, list[np.ndarray], float]],
    shadows: list[ShadowRecord] = (),  # type: ignore[assignment]  # never changed
    role: Role = Role.GRAD_OUTPUT,
    precision: str = "fp16",
) -> str:
    """A run with two modules; ``frames`` are (step, rows of the modules, loss scale)."""
    writer = RunWriter.create(store, replace(stores.SPEC, precision=precision))
    writer.start(stores.MACHINE)
    writer.add_modules([ModuleRecord(0, "", "Net"), ModuleRecord(1, "fc", "Linear", "fp32", 1)])
    for step, rows, scale in frames:
        modules = tuple(range(len(rows)))
        writer.add_step(StepRecord(step, scale=scale))
        dtypes = ("fp16",) * len(rows)
        writer.add_frame(Frame(step, role, modules, dtypes, np.stack(rows), scale))
    if not frames:
        writer.add_step(StepRecord(0))
    writer.add_shadow(shadows)
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


# At 2^4: subnormal below 2^-14, lost below 2^-25 in fp16.
FRAME = [row(m20=10, m3=80, zero=10), row(m24=1, p15=9)]


def test_recorded_view_counts(store_path: Path, open_page: Open) -> None:
    app = open_page("gradients", run=written(store_path, [(0, FRAME, 16.0)]))
    assert not app.exception
    words = texts(app)
    for fact in ("Step 0", "output gradients", "loss scale 2^4", "of 100 finite", "11 (11.0 %)"):
        assert fact in words, fact
    assert metrics(app) == {
        "Too small": "0",
        "Subnormal": "11 (11.0 %)",
        "Overflow": "0",
        "Not finite": "0",
    }
    assert "10 of 110, 9.1 % of the elements are exactly zero" in words
    assert "lost over time" in words  # where the shadow tells whether they were lost


def test_the_scale_slider_moves_and_recounts(store_path: Path, open_page: Open) -> None:
    app = open_page("gradients", run=written(store_path, [(0, FRAME, 16.0)]))
    labelled(app.slider, "Loss scale").set_value(5).run()  # one up: 2^15 overflows
    assert metrics(app)["Overflow"] == "9 (9.0 %)"
    assert metrics(app)["Subnormal"] == "11 (11.0 %)"
    labelled(app.slider, "Loss scale").set_value(-2).run()  # six down: 2^-20 -> 2^-26 is lost
    assert metrics(app)["Too small"] == "11 (11.0 %)"
    assert "as if the loss scale were 2^-2 (recorded at 2^4)" in texts(app)
    assert "does not move zeros, NaN and Inf that were recorded" in texts(app)
    assert asked(app, "scale") == "-2"
    next(b for b in app.button if b.label == "Unscaled").click().run()
    assert "unscaled (recorded at loss scale 2^4)" in texts(app)
    assert asked(app, "scale") == "0"
    next(b for b in app.button if b.label == "Recorded").click().run()
    assert metrics(app)["Too small"] == "0"
    assert "scale" not in app.query_params


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2", "fp32"])
@pytest.mark.parametrize("exponent", [-24, 3, 40])
def test_counts_are_those_of_the_histograms(
    store_path: Path, open_page: Open, name: str, exponent: int
) -> None:
    run = stores.finished(store_path)
    app = open_page("gradients", run=run, step=8, format=name, scale=exponent)
    with Reader(store_path) as reader:
        frame = reader.frame(run, Role.GRAD_OUTPUT, 8)
    assert frame is not None
    shift = exponent - int(np.log2(frame.scale))
    expected = [zones(r, FORMATS[name], shift) for r in frame.rows]
    table = app.dataframe[0].value
    assert list(table["Lost"]) == [z.lost for z in expected]
    assert list(table["Subnormal"]) == [z.subnormal for z in expected]
    assert list(table["Overflow"]) == [z.overflow for z in expected]
    assert list(table["Zero"]) == [z.zero for z in expected]
    assert list(table["Elements"]) == [z.total for z in expected]


def course(store: Path, scales: list[int], skipped: set[int], nan_loss: int = -1) -> str:
    """A run of which every second step has histograms; ``scales`` are powers of two."""
    writer = RunWriter.create(store, stores.SPEC)
    writer.start(stores.MACHINE)
    writer.add_modules([ModuleRecord(0, "", "Net"), ModuleRecord(1, "fc", "Linear", "fp32", 1)])
    for step, exponent in enumerate(scales):
        loss = np.nan if step == nan_loss else 1.0
        writer.add_step(StepRecord(step, loss, 2.0**exponent, skipped=step in skipped))
        if step % 2 == 0:
            rows = np.stack(FRAME)
            frame = Frame(step, Role.GRAD_OUTPUT, (0, 1), ("fp16",) * 2, rows, 2.0**exponent)
            writer.add_frame(frame)
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


SEARCHED = [6, 5, 4, 4, 4, 4, 5, 4, 4, 4]  # 0 and 1 find the scale, 6 tries a grown one


@pytest.mark.parametrize(
    ("skipped", "nan_loss", "opens_on", "said"),
    [
        ({0, 1, 6}, -1, 8, "Step 8, output gradients"),  # healthy: the newest
        ({0, 1, 4, 6}, -1, 4, "Step 4, the first bad one recorded (it was skipped), output grad"),
        ({0, 1, 6}, 2, 2, "Step 2, the first bad one recorded (the loss is not finite), output"),
        # Of step 3 there are no histograms, of step 8 there are.
        ({0, 1, 3, 6, 8}, -1, 8, "Step 8, the first bad one recorded (it was skipped), output"),
        ({0, 1, 3, 6}, -1, 8, "Step 8, output gradients"),
    ],
)
def test_it_opens_on_the_first_bad_step(
    store_path: Path, open_page: Open, skipped: set[int], nan_loss: int, opens_on: int, said: str
) -> None:
    app = open_page("gradients", run=course(store_path, SEARCHED, skipped, nan_loss))
    assert not app.exception
    assert labelled(app.select_slider, "Step").value == opens_on
    assert said in texts(app)


def test_an_address_with_a_step_keeps_it(store_path: Path, open_page: Open) -> None:
    run = course(store_path, SEARCHED, {0, 1, 4, 6})
    app = open_page("gradients", run=run, step=2)
    assert labelled(app.select_slider, "Step").value == 2
    assert "Step 2, output gradients" in texts(app)
    labelled(app.select_slider, "Step").set_value(4).run()
    assert "Step 4, the first bad one recorded" in texts(app)


def test_the_slider_follows_the_run_until_it_is_moved(store_path: Path, open_page: Open) -> None:
    run = written(store_path, [(0, FRAME, 16.0), (1, FRAME, 8.0), (2, FRAME, 4.0)])
    app = open_page("gradients", run=run, step=1)
    assert labelled(app.slider, "Loss scale").value == 3
    labelled(app.select_slider, "Step").set_value(0).run()
    assert labelled(app.slider, "Loss scale").value == 4
    labelled(app.slider, "Loss scale").set_value(7).run()
    labelled(app.select_slider, "Step").set_value(2).run()
    assert labelled(app.slider, "Loss scale").value == 7
    assert "recorded at 2^2" in texts(app)


def test_nonfinite_is_told_first(store_path: Path, open_page: Open) -> None:
    run = written(store_path, [(0, [row(nan=5, p0=95)], 1.0)])
    app = open_page("gradients", run=run, detail="one module")
    words = texts(app)
    assert "5 of 100, 5.0 %, are NaN or Inf, in 1 module; all 95 finite non-zero" in words
    assert metrics(app)["Not finite"] == "5 (5.0 %)"
    assert "(model) at 1 recorded step, the first at the top. NaN or Inf at 1 step" in words


def test_nothing_but_zeros_gives_no_figure_instead_of_nan(
    store_path: Path, open_page: Open
) -> None:
    app = open_page("gradients", run=written(store_path, [(0, [row(zero=7)], 2.0)]))
    assert not app.exception
    assert "no element is finite and non-zero" in texts(app)
    assert "nan%" not in texts(app).lower().replace(" ", "")
    assert metrics(app)["Too small"] == "0"


@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.WEIGHT, Role.UPDATE])
def test_no_loss_scale_for_what_none_multiplies(
    store_path: Path, open_page: Open, role: Role
) -> None:
    app = open_page("gradients", run=stores.finished(store_path), role=role, scale=30)
    assert not app.exception
    assert not [s for s in app.slider if s.key == "widget:scale"]
    assert "as recorded:" in texts(app)


def test_shadow_counts_are_never_one_number(store_path: Path, open_page: Open) -> None:
    shadows = [
        ShadowRecord(0, 1, Role.GRAD_OUTPUT, 1000, 300, 20, 5, None, None, None, 90),
        ShadowRecord(0, 0, Role.GRAD_OUTPUT, 1000, 0, 0, 0, None, None, None, 0),
    ]
    run = written(store_path, [(0, FRAME, 16.0)], shadows)
    app = open_page("gradients", run=run, module="fc", detail="lost over time")
    assert not app.exception
    words = texts(app)
    for fact in (
        "of 2,000 elements",
        "90 (4.5 %) below the format's range",
        "210 (10.5 %) cancelled",
        "20 (1.0 %) subnormal",
        "5 (0.2 %) zero in both",
        "fc at step 0, 30.0 % lost",
        "at most 300 of 1,000, 30.0 %",  # of the chosen module
    ):
        assert fact in words, fact
    assert words.count("90 of 300, 30.0 %") == 2  # of this step, and of all steps


def test_without_a_shadow_the_answer_is_inconclusive(store_path: Path, open_page: Open) -> None:
    run = written(store_path, [(0, FRAME, 16.0)])
    app = open_page("gradients", run=run, module="(model)", detail="lost over time")
    words = texts(app)
    assert "how many gradients were lost is not known" in words
    assert "In (model) at step 0, 10 of 100, 10.0 % elements are zero" in words
    assert "10 are subnormal" in words
    assert "--shadow-every" in words


def test_a_deep_link_brings_the_view_back(store_path: Path, open_page: Open) -> None:
    run = stores.finished(store_path)
    query = {"step": "4", "module": "h.1.mlp.down", "role": "weight_grad", "scale": "20"}
    app = open_page("gradients", run=run, **query, format="bf16", order="worst first")
    words = texts(app)
    assert "Step 4, the first bad one recorded (the loss is not finite), weight grad" in words
    assert "weight gradients as if the loss scale were 2^20 (recorded at 2^16)" in words
    assert app.selectbox(key="widget:module").value == "h.1.mlp.down"
    assert "in bf16" in words
    for name, value in query.items():
        assert asked(app, name) == value


def test_the_chart_of_all_modules_comes_first_and_the_rest_when_it_is_asked_for(
    store_path: Path, open_page: Open
) -> None:
    run = stores.finished(store_path)
    app = open_page("gradients", run=run)
    assert [c.proto.id.rpartition("-")[2] for c in app.get("plotly_chart")] == ["map"]
    app.button_group(key="widget:detail").set_value("one module").run()
    assert asked(app, "detail") == "one module"
    assert len(app.get("plotly_chart")) == 2
    app = open_page("gradients", run=run, module="h.1.mlp.down")
    assert app.button_group(key="widget:detail").value == "one module"


@pytest.mark.parametrize("query", [{"step": "99"}, {"scale": "x"}, {"scale": "999"}, {"role": "?"}])
def test_an_address_that_asks_for_nonsense(
    store_path: Path, open_page: Open, query: dict[str, str]
) -> None:
    app = open_page("gradients", run=stores.finished(store_path), **query)
    assert not app.exception
    # Step 4 is the first bad one; the recorded step nearest to 99 is the last.
    assert labelled(app.select_slider, "Step").value == (11 if "step" in query else 4)


def test_search_and_order(store_path: Path, open_page: Open) -> None:
    run = stores.many_modules(store_path, 300, 2)
    app = open_page("gradients", run=run)
    assert not app.exception
    assert "The 40 modules in most trouble of 299, model order." in texts(app)
    app = open_page("gradients", run=run, format="fp32", scale=0)
    assert "The first 40 of 299, model order." in texts(app)  # none is in trouble in fp32
    app = open_page("gradients", run=run, find="l.29")
    # l.29 and l.290 to l.298
    assert "10 modules whose path holds “l.29”, model order." in texts(app)
    app = open_page("gradients", run=run, find="nowhere")
    assert "No module's name holds this text." in texts(app)


def test_play_moves_on_and_stops_at_the_end(
    store_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(store_path, [(step, FRAME, 16.0) for step in (0, 5, 9)])
    app = open_page("gradients", run=run)
    monkeypatch.setattr("app.gradients.page.PLAY_EVERY_S", 0.0)
    next(b for b in app.button if b.label == "Play").click().run()
    seen = [labelled(app.select_slider, "Step").value]
    for _ in range(4):
        app.run()
        seen.append(labelled(app.select_slider, "Step").value)
    assert not app.exception
    assert seen[-1] == 9
    assert seen == sorted(seen)
    assert next(b for b in app.button if b.label in ("Play", "Pause")).label == "Play"


def test_a_run_without_histograms(store_path: Path, open_page: Open) -> None:
    app = open_page("gradients", run=written(store_path, []))
    assert not app.exception
    assert "This run holds no histograms." in texts(app)
    assert "--histogram-every" in texts(app)


@pytest.mark.parametrize("state", ["running", "failed", "cancelled", "lost", "finished"])
def test_every_state_shows_what_there_is(store_path: Path, open_page: Open, state: str) -> None:
    app = open_page("gradients", run=getattr(stores, state)(store_path))
    assert not app.exception
    assert len(app.metric) == 4


@pytest.mark.parametrize("state", ["queued", "failed"])
def test_no_step_yet(store_path: Path, open_page: Open, state: str) -> None:
    made = stores.queued(store_path) if state == "queued" else stores.failed(store_path, steps=0)
    app = open_page("gradients", run=made)
    assert not app.exception
    assert not app.metric


def test_an_empty_store(open_page: Open) -> None:
    app = open_page("gradients")
    assert not app.exception
    assert NO_RUN in texts(app)


def test_names_are_text(store_path: Path, open_page: Open) -> None:
    app = open_page("gradients", run=stores.hostile(store_path))
    assert not app.exception
    raw = " ".join(e.value for kind in ("markdown", "subheader", "caption") for e in app.get(kind))
    assert "<script>" not in raw
    assert "<img" not in raw
