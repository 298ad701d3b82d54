"""Home in its states: empty, runs of every kind, deletion, a store that cannot be read."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope import extensions
from ampscope.diagnosis.load import judge_again
from ampscope.records import Event, RunSpec
from ampscope.store.reader import Reader
from app.links import ENTRIES
from app.runs import actions, diagnoses
from tests.helpers import script_stores, stores, watched_stores
from tests.helpers.pages import asked, links, texts

Open = Callable[..., AppTest]


def words(app: AppTest) -> str:
    """Everything that the page says."""
    parts = (*app.markdown, *app.caption, *app.subheader, *app.info, *app.warning, *app.error)
    return "\n".join(str(part.value) for part in parts)


def test_an_empty_store_offers_the_demo_and_creates_no_file(
    open_page: Open, store_path: Path
) -> None:
    app = open_page("home")
    assert app.title[0].value == "Home"
    others = ["run-lesson"] if "lessons" in extensions.all_extensions() else []
    assert [button.key for button in app.button] == ["run-case", "run-demo", *others]
    said = words(app)
    assert "My training diverged or stopped learning" in said
    assert ("Learn mixed precision" in said) == bool(others)
    assert ("Diagnose a script", "") in links(app)  # of one's own, too
    assert all(code.value.startswith("ampscope ") for code in app.code)
    assert "torch" in app.caption[0].value
    assert not store_path.exists()


@pytest.mark.parametrize("page", [entry.name for entry in ENTRIES])
def test_a_store_that_does_not_exist_yet_is_no_error(
    open_page: Open, store_path: Path, page: str
) -> None:
    app = open_page(page)
    assert [*app.exception, *app.error] == []
    assert not store_path.exists()


def test_the_demo_is_three_runs_of_one_model_with_a_small_loss(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunSpec] = []
    monkeypatch.setattr(actions, "launch", lambda spec, store: started.append(spec) or "id")
    app = open_page("home").button(key="run-demo").click().run()
    assert [spec.precision for spec in started] == ["fp16-noscaler", "fp16", "fp32"]
    assert {(s.workload, s.size, s.steps, s.seed) for s in started} == {("gpt", "tiny", 20, 0)}
    assert len({s.loss_factor for s in started}) == 1
    assert started[0].loss_factor < 1
    assert {s.group for s in started} == {app.query_params["demo"]}


def test_a_row_of_the_runs_has_one_link(open_page: Open, store_path: Path) -> None:
    probe = stores.finished(store_path)
    head = script_stores.overflow(store_path)
    found = [query for label, query in links(open_page("runs")) if label.startswith("Open")]
    assert found == [f"run={head}", f"run={probe}"]


def test_the_demo_is_followed_while_it_runs(open_page: Open, store_path: Path) -> None:
    spec = RunSpec(workload="gpt", precision="fp16-noscaler", steps=20, group="g1")
    stores.running(store_path, spec, steps=6)
    stores.queued(store_path, RunSpec(workload="gpt", precision="fp16", steps=20, group="g1"))
    app = open_page("home", demo="g1")
    assert app.subheader[0].value == "Demo"
    said = words(app)
    assert ["6 of 20 steps" in bar.text for bar in app.progress] == [True, False]
    assert "fp16\\-noscaler 1\\.538 \\(step 5\\)" in said  # 2.5 / (1 + 5/8)
    assert sum("cancel" in str(button.key) for button in app.button) == 2


def test_cancel_asks_the_run_to_stop(open_page: Open, store_path: Path) -> None:
    run = stores.running(store_path, RunSpec(workload="gpt", steps=20, group="g1"))
    app = open_page("home", demo="g1")
    app.button(key=f"demo-cancel-{run}").click().run()
    button = app.button(key=f"demo-cancel-{run}")
    assert (button.label, button.disabled) == ("Stopping", True)
    assert not app.error
    rows = sqlite3.connect(store_path).execute("SELECT cancel FROM run").fetchall()
    assert rows == [(1,)]


def test_recent_runs_of_every_state_newest_first(open_page: Open, store_path: Path) -> None:
    makers = (stores.finished, stores.failed, stores.cancelled, stores.lost, stores.running)
    for maker in makers:
        maker(store_path)
    app = open_page("home")
    badges = [m.value for m in app.markdown if "-badge[" in m.value]
    order = ["running", "lost", "cancelled", "failed", "finished"]
    assert [next(s for s in order if s in badge) for badge in badges] == order
    assert not app.error


def test_ten_at_first_and_more_on_request(open_page: Open, store_path: Path) -> None:
    for _ in range(13):
        stores.queued(store_path)
    app = open_page("runs")
    assert sum("-badge[" in m.value for m in app.markdown) == 10
    more = next(button for button in app.button if button.label.startswith("Show 3 older"))
    app = more.click().run()
    assert sum("-badge[" in m.value for m in app.markdown) == 13


def test_the_newest_verdicts_stand_first_with_their_fix(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnoses, "BETWEEN_RUNS_S", -1.0)
    stores.finished(store_path)
    for number, maker in enumerate(
        (script_stores.overflow, script_stores.no_fault, script_stores.undetermined)
    ):
        spec = replace(script_stores.SPEC, workload=f"/u/t{number}.py", group=f"g{number}")
        maker(store_path, replace(spec, label=f"t{number}.py"))
    app = open_page("home")
    assert [s.value for s in app.subheader] == ["Newest verdicts", "Probes and measurements"]
    said = texts(app)
    assert "Root cause: An activation overflowed (AMP001), in encoder.2.wo" in said
    assert "**Fix (verified).** " in said
    badges = [m.value for m in app.markdown if "-badge[" in m.value]
    told = ["undetermined", "no fault", "fault", "finished"]
    assert [next(w for w in told if w in badge) for badge in badges] == told


def test_a_watched_training_tells_its_first_alarm(open_page: Open, store_path: Path) -> None:
    writer = watched_stores.begun(store_path, watched_stores.bad(12, 5))
    writer.add_event(Event(5, "alarm", "bad_loss", "The loss is NaN."))
    writer.add_event(Event(9, "alarm", "bad_loss", "The loss is NaN."))
    watched_stores.ended(writer)
    app = open_page("home")
    badge = next(m.value for m in app.markdown if "-badge[" in m.value)
    assert "alarm at step 5" in badge
    assert "First of 2 alarms, at step 5: " in words(app)
    assert "none of 12 steps skipped" in texts(app)


def test_a_watched_training_without_alarm_says_that_it_is_healthy(
    open_page: Open, store_path: Path
) -> None:
    writer = watched_stores.begun(store_path, watched_stores.good(1_200))
    app = open_page("home")
    assert "-badge[healthy]" in next(m.value for m in app.markdown if "-badge[" in m.value)
    assert "Healthy so far: no alarm." in words(app)
    assert "2 of 1,200 steps skipped" in texts(app)
    watched_stores.ended(writer)
    app = open_page("home")
    assert "Healthy: no alarm." in words(app)


def test_a_watched_training_that_ends_in_nan_is_not_called_healthy(
    open_page: Open, store_path: Path
) -> None:
    watched_stores.begun(store_path, watched_stores.bad(12, 5))
    app = open_page("home")
    assert "-badge[not finite]" in next(m.value for m in app.markdown if "-badge[" in m.value)
    assert "Healthy" not in texts(app)
    assert "the newest step's loss or gradient is not finite" in texts(app)


def test_runs_are_found_by_words_and_kind(open_page: Open, store_path: Path) -> None:
    stores.finished(store_path, RunSpec(workload="gpt", label="kept one"))
    stores.finished(store_path, RunSpec(workload="resnet", label="other"))
    script_stores.no_fault(store_path)

    def rows(**query: str) -> int:
        return sum("-badge[" in m.value for m in open_page("runs", **query).markdown)

    assert rows(search="") == 3
    assert rows(search="KEPT finished") == 1
    assert rows(kind="diagnoses") == 1
    head = script_stores.overflow(store_path, replace(script_stores.SPEC, group="g2"))
    assert rows(search="activation overflowed") == 0  # nothing is concluded of it yet
    judge_again(store_path, head)
    with Reader(store_path) as reader:
        found = reader.verdicts()[head]
        assert (found.word, found.cause) == ("fault", "activation_overflow")
    assert rows(search="activation overflowed") == rows(search="AMP001") == 1
    assert rows(kind="probes", search="nothing of the kind") == 0


def test_runs_are_found_by_verdict_as_their_badges_say_it(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnoses, "BETWEEN_RUNS_S", -1.0)
    kinds = ("overflow", "no_fault", "undetermined", "raised", "lost")
    for number, kind in enumerate(kinds):
        spec = replace(script_stores.SPEC, workload=f"/u/t{number}.py", group=f"g{number}")
        head = getattr(script_stores, kind)(store_path, replace(spec, label=""))
        if kind != "lost":
            judge_again(store_path, head)
    stores.finished(store_path)
    stores.failed(store_path)
    quiet = watched_stores.begun(store_path, watched_stores.good(20))
    rung = watched_stores.begun(store_path, watched_stores.bad(12, 5))
    rung.add_event(Event(5, "alarm", "bad_loss", "The loss is NaN."))
    for writer in (quiet, rung):
        watched_stores.ended(writer)
    app = open_page("runs")
    badges = Counter(re.findall(r"-badge\[([^\]]*)\]", words(app)))
    unstored = words(open_page("runs", verdict="no stored verdict"))
    badges.subtract(re.findall(r"-badge\[([^\]]*)\]", unstored))  # judged anew for its row
    offered = app.selectbox(key="widget:verdict").options
    for verdict in offered[1:]:
        found = open_page("runs", verdict=verdict)
        shown = re.findall(r"-badge\[([^\]]*)\]", words(found))
        if verdict == "alarm":
            assert shown == ["alarm at step 5"]
        elif verdict == "no alarm":
            assert shown == ["healthy"]
        elif verdict == "no stored verdict":
            assert len(shown) == 1
            assert "1 diagnosis not looked through" in texts(open_page("runs", verdict="fault"))
        elif verdict not in ("finished", "failed"):  # states, which a watched training has, too
            assert shown == [verdict] * badges[verdict], verdict
    assert {"fault", "alarm", "undetermined", "could not run", "no fault"} <= set(offered)


def test_runs_are_found_by_script(open_page: Open, store_path: Path) -> None:
    stores.finished(store_path, RunSpec(workload="gpt"))
    script_stores.overflow(store_path)
    watched_stores.ended(watched_stores.begun(store_path, watched_stores.good(20)))
    app = open_page("runs")
    assert app.selectbox(key="widget:script").options == ["any", "train.py", "gpt"]
    app = app.selectbox(key="widget:script").set_value("train.py").run()
    assert sum("-badge[" in m.value for m in app.markdown) == 2
    assert asked(app, "script") == "train.py"
    app = app.selectbox(key="widget:kind").set_value("diagnoses").run()
    assert sum("-badge[" in m.value for m in app.markdown) == 1


def test_what_is_looked_for_here_is_not_looked_for_among_modules(
    open_page: Open, store_path: Path
) -> None:
    run = stores.finished(store_path)
    app = open_page("runs")
    app = app.text_input[0].set_value("nothing of the kind").run()
    assert "0 entries" in texts(app)
    app.switch_page("../pages/layers.py")
    app.query_params.clear()
    app.query_params.update({"run": run})
    assert app.run().text_input(key="widget:find").value == ""
    app.switch_page("../pages/runs.py")
    app.query_params.clear()
    assert "0 entries" in texts(app.run())  # this session still looks for it here
    assert app.text_input[0].value == "nothing of the kind"


def test_runs_are_found_by_age(store_path: Path, open_page: Open) -> None:
    old, new = stores.finished(store_path), stores.finished(store_path)
    with sqlite3.connect(store_path) as store:
        store.execute("update run set created = created - 3 * 86400 where id = ?", (old,))
    for age, entries in (("any", "2 entries"), ("a week", "2 entries"), ("a day", "1 entry")):
        app = open_page("runs", age=age)
        assert not app.exception
        assert any(entries in caption.value for caption in app.caption), age
    assert new != old


def test_the_precisions_of_one_probe_are_one_row(open_page: Open, store_path: Path) -> None:
    for precision in ("fp16", "bf16", "fp32"):
        stores.finished(store_path, RunSpec(workload="gpt", precision=precision, group="g1"))
    app = open_page("runs")
    assert sum("-badge[" in m.value for m in app.markdown) == 1
    said = words(app).replace("\\", "")
    assert "3 precisions" in said
    assert "fp16, bf16, fp32" in said


def test_names_from_a_run_are_escaped(open_page: Open, store_path: Path) -> None:
    stores.hostile(store_path)
    said = words(open_page("home"))
    assert "<script>" not in said.replace("\\<script\\>", "")


def test_runs_are_deleted_after_a_confirmation(open_page: Open, store_path: Path) -> None:
    kept, gone = stores.finished(store_path), stores.failed(store_path)
    running = stores.running(store_path)
    app = open_page("runs")
    choice = app.multiselect(key="delete-which")
    assert len(choice.options) == 2  # the running one is not on offer
    assert app.button(key="delete-confirm").disabled
    app = choice.set_value([gone]).run()
    app.button(key="delete-confirm").click().run()
    with Reader(store_path) as reader:
        assert {run.id for run in reader.runs()} == {kept, running}


def test_a_file_that_is_no_store_is_said_in_a_sentence(open_page: Open, store_path: Path) -> None:
    store_path.write_bytes(b"not a database, but long enough to be read as one" * 40)
    app = open_page("home")
    assert "is not an ampscope store" in app.error[0].value.replace("\\", "")
    assert not app.exception


def test_another_version_is_said_in_a_sentence(open_page: Open, store_path: Path) -> None:
    stores.queued(store_path)
    connection = sqlite3.connect(store_path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    app = open_page("home")
    assert "schema version 99" in app.error[0].value.replace("\\", "")


def test_a_wrong_option_is_said_in_a_sentence(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPSCOPE_WORKLOADS", "/no/such/folder")
    app = open_page("home")
    assert "is not a folder" in app.error[0].value
    assert not app.exception


def test_a_fault_of_a_page_shows_no_traceback(
    open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from app import telemetry

    def broken() -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(telemetry, "machine_line", broken)
    app = open_page("home")
    assert "could not be drawn" in app.error[0].value
    assert "secret" not in str(app.error[0].value)
    assert not app.exception
