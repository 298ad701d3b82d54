"""The Zoo page against the answer key, and the processes that it starts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.launcher import script_runs
from ampscope.launcher.script_runs import Job
from ampscope.zoo.answers import ANSWERS, HEALTHY, script_path
from app import zoo
from app.runs import diagnoses
from tests.helpers import script_stores
from tests.helpers.pages import links, metrics, texts

Open = Callable[..., Any]
CASE = next(a for a in ANSWERS if a.cause == "activation_overflow" and a.module and a.twin)
ENDS_WITHIN_S = 60.0  # Python starts and reads a file


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnoses, "BETWEEN_RUNS_S", -1.0)
    monkeypatch.setattr(diagnoses, "_jobs", {})


def spec_of(script: str, group: str) -> Any:
    return replace(script_stores.SPEC, workload=str(script_path(script)), label=script, group=group)


def test_every_case_is_listed_with_its_source_and_its_twin(open_page: Open) -> None:
    app = open_page("zoo")
    assert not app.exception
    words = texts(app)
    assert f"{len(ANSWERS)} real failures, none of them diagnosed on this machine yet." in words
    table = app.dataframe[0].value
    assert list(table["Case"]) == [answer.id for answer in ANSWERS]
    assert list(table["Reported to"]) == [answer.source for answer in ANSWERS]
    assert set(table["Found"]) == {"not yet"}
    assert {f"zoo-{name}" for name in HEALTHY} <= {b.key for b in app.button}
    assert metrics(app)["Expected cause first"] == "none yet"


@pytest.mark.parametrize("answer", [ANSWERS[0], ANSWERS[-1], CASE], ids=lambda a: a.id)
def test_one_case_is_opened_with_both_scripts(open_page: Open, answer: Any) -> None:
    app = open_page("zoo")
    app.selectbox(key="widget:opened").set_value(answer.id).run()
    cases = {a.script for a in ANSWERS} | {a.twin for a in ANSWERS}
    buttons = {b.key.removeprefix("zoo-") for b in app.button if b.key} & cases
    assert buttons == {answer.script, answer.twin} - {None}
    assert f"**{answer.id} · " in texts(app)
    assert not answer.source_url or answer.source in [label for label, _ in links(app)]


def test_cases_are_filtered_by_what_was_found(store_path: Path, open_page: Open) -> None:
    op = script_stores.bad_op(CASE.module or "")
    script_stores.overflow(store_path, spec_of(CASE.script, "g1"), op)
    other = next(a for a in ANSWERS if a.cause not in (CASE.cause, "not_amp_divergence"))
    script_stores.overflow(store_path, spec_of(other.script, "g2"), op)
    for found, expected in (("as expected", CASE), ("otherwise", other)):
        app = open_page("zoo", zoo_found=found)
        assert not app.exception
        assert f"**{expected.id} · " in texts(app)
        assert not app.dataframe  # the one case that is left is opened
    table = open_page("zoo", zoo_found="not diagnosed").dataframe[0].value
    assert len(table) == len(ANSWERS) - 2


def test_a_result_stands_beside_what_was_expected(store_path: Path, open_page: Open) -> None:
    op = script_stores.bad_op(CASE.module or "")
    script_stores.overflow(store_path, spec_of(CASE.script, "g1"), op)
    head = script_stores.no_fault(store_path, spec_of(CASE.twin or "", "g2"))
    app = open_page("zoo", case=CASE.id)
    assert not app.exception
    words = texts(app)
    assert f"1 of {len(ANSWERS)} cases diagnosed; the expected cause came first in 1 of 1." in words
    assert (
        f"Found: An activation overflowed (AMP001) in {CASE.module} (as expected). Fix verified"
        in words
    )
    assert "Found: no fault (as expected)." in words
    assert metrics(app) == {
        "Expected cause first": "1 of 1",
        "Right module": "1 of 1",
        "Fix verified": "1 of 1",
        "False alarms": "0 of 1",
    }
    opened = [query for label, query in links(app) if label == "Open the diagnosis"]
    assert f"run={head}" in opened


def test_a_wrong_answer_is_not_hidden(store_path: Path, open_page: Open) -> None:
    script_stores.innocent(store_path, spec_of(CASE.script, "g1"))
    script_stores.overflow(store_path, spec_of(CASE.twin or "", "g2"))
    app = open_page("zoo", case=CASE.id)
    words = texts(app)
    assert "(expected: An activation overflowed" in words
    assert "False alarm: An activation overflowed (AMP001)." in words
    assert metrics(app)["Expected cause first"] == "0 of 1"
    assert metrics(app)["False alarms"] == "1 of 1"


def test_the_newest_diagnosis_counts(store_path: Path, open_page: Open) -> None:
    script_stores.innocent(store_path, spec_of(CASE.script, "old"))
    op = script_stores.bad_op(CASE.module or "")
    script_stores.overflow(store_path, spec_of(CASE.script, "new"), op)
    assert metrics(open_page("zoo"))["Expected cause first"] == "1 of 1"


def test_a_script_that_could_not_run_counts_for_nothing(store_path: Path, open_page: Open) -> None:
    script_stores.raised(store_path, spec_of(CASE.script, "g1"))
    app = open_page("zoo", case=CASE.id)
    assert "Could not be diagnosed: The script raised FileNotFoundError" in texts(app)
    assert metrics(app)["Expected cause first"] == "none yet"


def test_the_list_is_searched(open_page: Open) -> None:
    app = open_page("zoo", case=CASE.id.lower())
    assert f"zoo-{CASE.script}" in {b.key for b in app.button}
    other = next(a for a in ANSWERS if CASE.id.lower() not in str(a).lower())
    assert f"zoo-{other.script}" not in {b.key for b in app.button}
    app = open_page("zoo", case="no such thing")
    assert "No case has that in its name" in texts(app)


def test_the_button_starts_a_diagnosis(
    store_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, Path, str]] = []

    def start(script: Path, store: Path, *, policy: str, **how: object) -> Job:
        asked.append((script, store, policy))
        return Job(-1)

    monkeypatch.setattr(script_runs, "start_diagnosis", start)
    app = open_page("zoo", case=CASE.id)
    app.button(key=f"zoo-{CASE.script}").click().run()
    assert not app.exception
    assert asked == [(script_path(CASE.script), store_path, zoo.policy_of(CASE.script))]
    assert asked[0][0].is_file()


def test_while_one_runs_no_other_is_started(
    store_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnoses, "_jobs", {str(script_path(CASE.script)): Job(-1)})
    monkeypatch.setattr(script_runs, "is_running", lambda job: True)
    app = open_page("zoo", case=CASE.id)
    assert not app.exception
    assert "Being diagnosed." in texts(app)
    assert all(b.disabled for b in app.button if b.key.startswith("zoo-"))


def test_cases_that_need_cuda_s_rules_get_them() -> None:
    for answer in ANSWERS:
        expected = "cuda" if answer.policy == "cuda" else "native"
        assert zoo.policy_of(answer.script) == expected
        assert answer.twin is None or zoo.policy_of(answer.twin) == expected


def test_a_process_that_cannot_do_its_work_says_why(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def broken(:\n")
    job = script_runs.start_diagnosis(script, tmp_path / "runs.db")
    _wait(job)
    assert script_runs.detached_words(job) == f"{script} is not Python: invalid syntax at line 1."


def test_a_process_is_stopped(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(600)\n")
    job = script_runs.start_diagnosis(script, tmp_path / "runs.db")
    assert script_runs.is_running(job)
    script_runs.stop(job)
    _wait(job)


def _wait(job: Job) -> None:
    deadline = time.monotonic() + ENDS_WITHIN_S
    while script_runs.is_running(job):
        assert time.monotonic() < deadline, "it did not end"
        time.sleep(0.05)
