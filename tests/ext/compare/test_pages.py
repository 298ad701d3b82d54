"""Compare and Batch size in all their states, on results written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.ext.compare.batches import batches_by_precision as searches_of
from ampscope.ext.compare.comparison import by_precision
from ampscope.records import RunSpec, Sample, State
from ampscope.store.writer import RunWriter
from app.ext.compare_figures import step_bars, throughput
from app.figures.memory import memory_bars
from app.runs import measurements
from app.text import for_plotly
from tests.helpers.made_comparisons import (
    compared,
    curves,
    diverged,
    made_trial,
    memory,
    searched,
    stored,
    times,
)

Open = Callable[..., AppTest]


def plain(text: str) -> str:
    return text.replace("\\", "").replace("\u2060", "")


def headings(app: AppTest) -> list[str]:
    return [plain(h.value) for h in app.subheader]


@pytest.mark.parametrize(
    ("page", "words"),
    [("compare", "Nothing has been compared"), ("batch_size", "No batch size has been searched")],
)
def test_empty(open_page: Open, page: str, words: str) -> None:
    app = open_page(page)
    assert not app.exception
    assert words in app.info[0].value
    assert app.button[0].label in ("Compare", "Search")


def test_a_finished_comparison_answers_first(open_page: Open, store_path: Path) -> None:
    run_id = stored(store_path, "compare", compared())
    app = open_page("compare", compare=run_id)
    assert not app.exception
    assert headings(app)[0] == (
        "AMP pays here: bf16 is 2.00× as fast as fp32 at the same loss; bf16 needs no scaler."
    )
    assert [m.value for m in app.metric] == ["2.00×", "100 ms", "60.0 %", "same"]
    rows = app.table[0].value
    assert list(map(plain, rows.index)) == ["twice as fast", "40 % less memory", "twice the batch"]
    app.number_input(key="cmp-price").set_value(3.6).run()
    table = app.dataframe[0].value.set_index("")
    assert table.loc["a million samples cost", "fp32"] == "25"


def test_a_comparison_in_which_one_diverged(open_page: Open, store_path: Path) -> None:
    results = [*curves("fp32"), *diverged("fp16"), times("fp32", 0.2), times("fp16", 0.1)]
    app = open_page("compare", compare=stored(store_path, "compare", results))
    assert not app.exception
    assert "fp16 diverged at step 1" in headings(app)[0]
    assert any("first not finite at step 1" in plain(m.value) for m in app.markdown)


def test_what_disturbed_a_comparison_is_named(open_page: Open, store_path: Path) -> None:
    run_id = stored(store_path, "compare", compared(), State.RUNNING)
    writer = RunWriter(store_path, run_id)
    writer.add_samples(
        Sample("cpu", 1000 + n / 10, busy_percent=90.0, own_percent=40.0) for n in range(100)
    )
    writer.finish(State.FINISHED)
    writer.close()
    app = open_page("compare", compare=run_id)
    assert not app.exception
    assert any("This comparison was disturbed." in plain(w.value) for w in app.warning)


@pytest.mark.parametrize("kind", ["compare", "batch"])
def test_running_and_failed(open_page: Open, store_path: Path, kind: str) -> None:
    page = {"compare": "compare", "batch": "batch_size"}[kind]
    running = stored(store_path, kind, curves("fp32")[:1] if kind == "compare" else searched()[:1],
                     State.RUNNING)  # fmt: skip
    app = open_page(page, **{kind: running})
    assert not app.exception
    assert any("Measuring." in info.value for info in app.info)
    failed = stored(store_path, kind, [], State.FAILED, "The <b>script</b> failed.")
    app = open_page(page, **{kind: failed})
    assert not app.exception
    assert "This measurement failed." in app.error[0].value
    assert "<b>" not in app.error[0].value.replace("\\<", "")


def test_a_finished_search_answers_first(open_page: Open, store_path: Path) -> None:
    app = open_page("batch_size", batch=stored(store_path, "batch", searched()))
    assert not app.exception
    assert headings(app)[0] == (
        "fp32 fits 128 samples (136 do not); bf16 fits 1.6 times that, 200 samples (208 do not)."
    )
    assert [m.value for m in app.metric] == ["128", "200"]
    assert len(app.dataframe[0].value) == 6


@pytest.mark.parametrize(("page", "kind"), [("compare", "compare"), ("batch_size", "batch")])
def test_the_button_starts_what_was_chosen(
    open_page: Open, monkeypatch: pytest.MonkeyPatch, page: str, kind: str
) -> None:
    started: list[RunSpec] = []
    monkeypatch.setattr(measurements, "start", started.append)
    app = open_page(page)
    app.button(key={"compare": "cmp-start", "batch": "bs-start"}[kind]).click().run()
    assert not app.exception
    assert started[0].kind == kind
    assert started[0].precisions == ("fp32", "bf16")
    assert started[0].policy == "native"
    assert (started[0].memory_limit_mib > 0) == (kind == "batch")


def test_measurements_are_listed_on_home_with_their_page(open_page: Open, store_path: Path) -> None:
    stored(store_path, "compare", compared())
    stored(store_path, "batch", searched())
    app = open_page("home")
    assert not app.exception
    labels = [plain(m.value) for m in app.markdown]
    assert any("Precisions compared on gpt small" in text for text in labels)
    assert any("Largest batch of gpt small" in text for text in labels)
    app = open_page("layers")
    assert any("No run has been recorded" in info.value for info in app.info)


def test_bars_show_every_phase_and_a_bar_that_is_too_long_says_its_time() -> None:
    figure = step_bars(by_precision([times("fp32", 0.2), times("bf16", 0.1), times("fp16", 8.0)]))
    bars = {trace.name: list(trace.x) for trace in figure.data if trace.type == "bar"}
    assert bars["backward"] == pytest.approx([120, 60, 4800])
    assert figure.layout.annotations[0].text.startswith("8 s, beyond this axis")
    assert figure.layout.xaxis.range[1] < 1000
    plain_bars = step_bars(by_precision([times("fp32", 0.2), times("bf16", 0.1)]))
    assert not plain_bars.layout.annotations


def test_memory_bars_add_up_to_the_peak() -> None:
    measured = by_precision(compared())
    figure = memory_bars([one.memory for one in measured if one.memory])
    for place, one in enumerate(measured):
        assert one.memory is not None
        assert sum(trace.x[place] for trace in figure.data) == one.memory.peak / 2**20


def test_throughput_marks_knee_and_limit() -> None:
    figure = throughput(searches_of(searched()))
    assert list(figure.data[0].y) == pytest.approx([64 / 0.05, 128 / 0.06])
    assert [shape.x0 for shape in figure.layout.shapes] == [136, 208]
    marks = [annotation.text for annotation in figure.layout.annotations]
    assert marks == ["fastest that was timed"] * 2


def test_throughput_stops_growing_only_where_a_larger_batch_was_timed() -> None:
    trials = [made_trial("fp32", n, s) for n, s in ((8, 0.1), (80, 0.1), (160, 0.2))]
    (mark,) = throughput(searches_of(trials)).layout.annotations
    assert mark.text == "throughput stops growing here"
    assert mark.x == pytest.approx(math.log10(80))


@pytest.mark.parametrize("name", ['<a href="https://evil.example">fp16</a>', "<b>fp16</b>", "%{x}"])
def test_a_precision_of_an_imported_run_is_text_in_the_chart(name: str) -> None:
    measured = by_precision([times(name, 0.01), times("fp32", 5.0)])
    for figure in (step_bars(measured), memory_bars([memory(name, 9), memory("fp32", 9)])):
        shown = str(figure.to_plotly_json())
        assert name not in shown
        assert for_plotly(name) in figure.data[0].y
