"""The lessons' pages in all their states, on measurements that were really made."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.ext.lessons.catalog import LESSONS, lesson_spec
from ampscope.ext.lessons.mistakes import MISTAKES
from ampscope.records import RunSpec, State
from app.ext.lessons import lesson_runs
from app.ext.lessons.lesson_page import LESSON_ENTRIES
from tests.helpers import stores
from tests.helpers.lesson_runs import keep, stored

Open = Callable[..., AppTest]
PAGES = {entry.name.split("_", 2)[2]: entry.name for entry in LESSON_ENTRIES.values()}
MEASURED = [name for name in PAGES if LESSONS[name].is_measured]


def plain(text: str) -> str:
    return text.replace("\\", "").replace("\u2060", "")


def words(app: AppTest) -> str:
    parts = (*app.markdown, *app.caption, *app.info, *app.success, *app.warning, *app.subheader)
    return "\n".join(plain(part.value) for part in parts)


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Nothing may be measured; what would have been is noted."""
    started: list[object] = []

    def launch(spec: object, store: Path) -> str:
        started.append(spec)
        raise AssertionError("a measurement was started")

    monkeypatch.setattr(lesson_runs, "launch", launch)
    return started


@pytest.mark.parametrize("lesson", PAGES)
def test_nothing_is_measured_before_a_prediction(
    open_page: Open, no_start: list[object], lesson: str
) -> None:
    app = open_page(PAGES[lesson])
    assert not app.exception
    assert not no_start
    number = LESSONS[lesson].number
    name = f"13{MISTAKES[0].id}" if lesson == "mistakes" else number
    assert app.radio(key=f"widget:guess{name}").value is None
    assert plain(app.subheader[0].value) == LESSONS[lesson].sentence
    assert not app.metric


@pytest.mark.parametrize("lesson", MEASURED)
def test_a_finished_measurement_is_shown_and_not_made_again(
    open_page: Open, store_path: Path, no_start: list[object], lesson: str
) -> None:
    stored(store_path, lesson)
    number = LESSONS[lesson].number
    app = open_page(PAGES[lesson], **{f"guess{number}": "a"})
    assert not app.exception, app.exception
    assert not app.error
    assert not no_start
    assert "Measured." in words(app)
    assert "Test CPU" in words(app)
    assert "HTML, one file" in [button.proto.label for button in app.get("download_button")]
    charts = app.get("plotly_chart")
    assert charts
    assert all(chart.proto.alt for chart in charts)
    for chart in charts:
        assert any(_has_points(trace) for trace in json.loads(chart.proto.spec)["data"])


def _has_points(trace: dict[str, object]) -> bool:
    """Plotly packs numbers as {"bdata": …}; a bar's categories are a plain list."""
    found = (trace.get("x"), trace.get("y"))
    return all(bool(part.get("bdata") if isinstance(part, dict) else part) for part in found)


@pytest.mark.parametrize("lesson", MEASURED)
def test_every_prediction_is_judged_alike(
    open_page: Open, store_path: Path, no_start: list[object], lesson: str
) -> None:
    stored(store_path, lesson)
    number = LESSONS[lesson].number
    app = open_page(PAGES[lesson], **{f"guess{number}": "a"})
    agreed = 0
    for choice in app.radio(key=f"widget:guess{number}").options:
        app.radio(key=f"widget:guess{number}").set_value(
            "abcdef"[list(app.radio(key=f"widget:guess{number}").options).index(choice)]
        ).run()
        assert not app.exception
        agreed += "As you predicted" in words(app)
    assert agreed == 1  # the measurement bears out one choice and no other


def test_the_choice_and_the_type_live_in_the_address(open_page: Open, store_path: Path) -> None:
    stored(store_path, "numbers")
    app = open_page(PAGES["numbers"])
    app.radio(key="widget:guess1").set_value("b").run()
    assert app.query_params["guess1"] == "b"
    app.toggle(key="widget:type").set_value(True).run()
    assert app.query_params["type"] == "large"
    app.button(key="hide1").click().run()
    assert "guess1" not in app.query_params


def test_large_type_enlarges_charts(open_page: Open, store_path: Path) -> None:
    stored(store_path, "numbers")
    sizes = []
    for query in ({}, {"type": "large"}):
        app = open_page(PAGES["numbers"], guess1="show", **query)
        assert not app.exception
        figure = json.loads(app.get("plotly_chart")[0].proto.spec)
        sizes.append((figure["layout"]["height"], figure["layout"]["xaxis"].get("tickfont")))
    assert sizes[1][0] > sizes[0][0]
    assert sizes[1][1]["size"] == 18


@pytest.mark.parametrize("state", [State.RUNNING, State.FAILED])
def test_running_and_failed(
    open_page: Open, store_path: Path, no_start: list[object], state: State
) -> None:
    keep(store_path, "underflow", (), state, "The <b>lesson</b> failed.")
    app = open_page(PAGES["underflow"], guess3="a")
    assert not app.exception
    assert not no_start
    if state is State.RUNNING:
        assert "Measuring on this machine." in words(app)
    else:
        assert "<b>" not in app.error[0].value.replace("\\<", "")
        assert app.button(key="lesson-retry").label == "Try again"


def test_another_version_is_measured_anew(open_page: Open, store_path: Path) -> None:
    stored(store_path, "underflow", model="lenet")
    assert lesson_runs.equal(lesson_spec("underflow", model="lenet"))
    assert not lesson_runs.equal(lesson_spec("underflow"))


def test_a_prediction_starts_one_measurement(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    def launch(spec: object, store: Path) -> str:
        started.append(spec)
        return keep(store, "underflow", (), State.RUNNING)

    monkeypatch.setattr(lesson_runs, "launch", launch)
    app = open_page(PAGES["underflow"])
    app.radio(key="widget:guess3").set_value("b").run()
    app.run()
    assert not app.exception
    assert started == [lesson_spec("underflow")]


@pytest.mark.parametrize("lesson", MEASURED)
@pytest.mark.parametrize("guess", ["a", "show"])
def test_an_address_starts_nothing(
    open_page: Open, store_path: Path, no_start: list[object], lesson: str, guess: str
) -> None:
    """A link on a foreign page opens a lesson with a prediction made; it takes a click here."""
    number = LESSONS[lesson].number
    app = open_page(PAGES[lesson], **{f"guess{number}": guess})
    app.run()
    assert not app.exception
    assert not no_start
    assert app.button(key="lesson-start").label == "Measure on this machine"


def test_a_click_on_what_an_address_shows_starts_one_measurement(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []

    def launch(spec: object, store: Path) -> str:
        started.append(spec)
        return keep(store, "underflow", (), State.RUNNING)

    monkeypatch.setattr(lesson_runs, "launch", launch)
    app = open_page(PAGES["underflow"], guess3="show")
    assert not started
    app.button(key="lesson-start").click().run()
    app.run()
    assert started == [lesson_spec("underflow")]


@pytest.mark.parametrize("text", ["", "abc", "1e999999999", "1/0", "<b>", "0x10", "é"])
def test_numbers_refuses_what_is_no_number(open_page: Open, store_path: Path, text: str) -> None:
    stored(store_path, "numbers")
    app = open_page(PAGES["numbers"], guess1="show", number1=text)
    assert not app.exception
    assert bool(app.warning) == bool(text)


def test_learn_lists_every_lesson(open_page: Open) -> None:
    app = open_page("learn")
    assert not app.exception
    text = words(app)
    for number in LESSON_ENTRIES:
        info = next(one for one in LESSONS.values() if one.number == number)
        assert info.sentence in text


def test_the_lesson_s_door_opens_it_and_measures(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunSpec] = []

    def launch(spec: RunSpec, store: Path) -> str:
        started.append(spec)
        return stores.queued(store, spec)

    monkeypatch.setattr(lesson_runs, "launch", launch)
    app = open_page("home").button(key="run-lesson").click().run()
    assert not app.exception
    assert app.title[0].value.startswith("3 ")
    assert [(spec.kind, spec.workload) for spec in started] == [("lesson", "underflow")]
    assert "Measuring on this machine." in words(app)
