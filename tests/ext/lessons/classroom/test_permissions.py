"""A student can run lessons and look at what is shared, and nothing else, whatever is sent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.errors import BadInput
from ampscope.ext.lessons.catalog import lesson_spec
from ampscope.records import RunSpec
from ampscope.store import sharing
from ampscope.store.reader import Reader
from ampscope.zoo.answers import script_path as zoo_script
from app import options, permissions, store
from app.links import ENTRIES, HOME
from app.runs import actions, measurements, run_page
from tests.helpers import stores
from tests.helpers.classes import TOKEN, Class, said

SECRET = "zebrafinch"  # a word that nothing else on a page holds and no escape changes
PRIVATE = replace(stores.SPEC, label=SECRET, group="f00d")
PUBLIC = "kingfisher"
SHARED = replace(stores.SPEC, label=PUBLIC)
EVERY_PAGE = [entry.name for entry in ENTRIES]
SOME_PAGES = (
    "home",
    "runs",
    "diagnosis",
    "training",
    "layers",
    "compare",
    "learn_05_ops",
    "classroom",
)


@pytest.fixture
def room(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Class:
    return Class(monkeypatch)


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What would have been started."""
    started: list[object] = []

    def note(*what: object, **named: object) -> str:
        started.append(what)
        return "0" * 12

    lessons = ("ext.lessons.lesson_runs", "ext.lessons.classroom")
    starters = ("runs.actions", "runs.measurements", *lessons)
    for module in starters:
        monkeypatch.setattr(f"app.{module}.launch", note)
    for name in ("start_diagnosis", "start_controls"):
        monkeypatch.setattr(f"app.runs.diagnoses.script_runs.{name}", note)
    return started


def as_student(call: Callable[[], object]) -> AppTest:
    """Run ``call`` in a session of the dashboard; what it raised is ``exception``."""
    return AppTest.from_function(_calling, args=(call,), default_timeout=60).run()


def _calling(call):  # type: ignore[no-untyped-def]  # its source is run as a script of its own
    call()


def raised(app: AppTest) -> tuple[str, str]:
    (error,) = app.exception
    return error.proto.type.rpartition(".")[2], error.value


@pytest.mark.quick(*SOME_PAGES)
@pytest.mark.parametrize("page", EVERY_PAGE)
def test_no_page_shows_a_student_a_private_run(
    room: Class, store_path: Path, page: str, no_start: list[object]
) -> None:
    run = stores.finished(store_path, PRIVATE)
    for query in ({}, {"run": run}, {"again": run}, {"group": "f00d"}, {"run": run[:6]},
                  {"demo": "f00d", "whatif": "f00d", "bench": run, "compare": run}):  # fmt: skip
        app = room.student().page(page, **query)
        assert not app.exception
        shown = said(app)
        assert SECRET not in shown, query
        assert run not in shown or run in query.values()  # then the page says that it is not here
    assert not no_start
    if page in ("gradients", "training", "home", "layers"):
        shown = said(room.teacher().page(page, run=run))
        assert SECRET in shown  # the oracle sees it where it is shown


def test_a_shared_run_is_for_all_until_it_is_taken_back(room: Class, store_path: Path) -> None:
    private = stores.finished(store_path, PRIVATE)
    run = stores.finished(store_path, SHARED)
    app = room.teacher().page("gradients", run=run)
    assert not app.toggle(key=f"shared-{run}").value
    app.toggle(key=f"shared-{run}").set_value(True).run()
    assert sharing.shared(store_path) == {run}
    seen = room.student().page("gradients", run=run)
    assert not seen.exception
    assert not seen.error
    assert PUBLIC in said(seen)
    assert f"shared-{run}" not in {toggle.key for toggle in seen.toggle}
    assert private not in said(seen)
    app = room.teacher().page("gradients", run=run)
    app.toggle(key=f"shared-{run}").set_value(False).run()
    assert PUBLIC not in said(room.student().page("gradients", run=run))


def test_an_unknown_run_and_a_private_one_read_alike(room: Class, store_path: Path) -> None:
    run = stores.finished(store_path, PRIVATE)
    shared = stores.finished(store_path, SHARED)
    sharing.share(store_path, [shared], wanted=True)
    for asked in (run, run[:-1], "0123456789ab", ""):
        kind, text = raised(as_student(lambda asked=asked: _read(asked)))
        assert kind == "BadInput"
        assert text == f"Run {asked!r} is not here, or is not shown to the class."
    assert not as_student(lambda: _read(shared)).exception


def _read(run_id: str) -> None:
    from app import store

    store.run(run_id)


def test_a_record_in_hand_does_not_open_a_run(room: Class, store_path: Path) -> None:
    run_id = stores.finished(store_path, PRIVATE)
    with Reader(store_path) as reader:
        info = reader.run(run_id)

    def read() -> None:
        from app import store

        store.steps(info)

    def draw() -> None:
        import plotly.graph_objects as go

        from app import store

        store.drawn(info, "x", go.Figure)

    for call in (read, draw):
        assert raised(as_student(call))[0] == "Forbidden"
    room.teacher()
    for call in (read, draw):
        assert not as_student(call).exception


def test_a_download_has_the_rights_of_whoever_saw_its_button(room: Class, store_path: Path) -> None:
    """Streamlit makes it in a thread without a session."""
    run_id = stores.finished(store_path, SHARED)
    sharing.share(store_path, [run_id], wanted=True)
    with Reader(store_path) as reader:
        info = reader.run(run_id)
    made: list[Callable[[], object]] = []

    def draw() -> None:
        from app import store

        made.append(permissions.lent(lambda: len(store.steps(info))))

    assert not as_student(draw).exception
    with pytest.raises(permissions.Forbidden):
        store.steps(info)
    assert made[0]() == stores.SPEC.steps
    sharing.share(store_path, [run_id], wanted=False)
    with pytest.raises(permissions.Forbidden):
        made[0]()
    room.teacher()
    assert not as_student(draw).exception
    assert made[1]() == stores.SPEC.steps


def test_controls_go_with_the_run_that_they_are_controls_of(room: Class, store_path: Path) -> None:
    head = stores.finished(store_path, SHARED)
    control = stores.finished(store_path, replace(PRIVATE, parent=head))
    assert raised(as_student(lambda: _read(control)))[0] == "BadInput"
    sharing.share(store_path, [head], wanted=True)
    assert not as_student(lambda: _read(control)).exception


def test_the_beginning_of_an_id_tells_nothing_of_private_runs(
    room: Class, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = iter(["200c09aaaaaa", "200c06bbbbbb"])
    monkeypatch.setattr("ampscope.store.writer.new_run_id", lambda: next(ids))
    run = stores.finished(store_path, SHARED)
    sharing.share(store_path, [run], wanted=True)
    assert not as_student(lambda: _read("200c0")).exception
    stores.finished(store_path, PRIVATE)
    assert not as_student(lambda: _read("200c0")).exception
    assert raised(as_student(lambda: _read("200c06")))[0] == "BadInput"


def test_the_zoo_tells_nothing_of_the_teachers_diagnoses(
    room: Class, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.diagnoses.script_runs.is_running", lambda job: False)
    monkeypatch.setattr("app.runs.diagnoses.script_runs.detached_words", lambda job: SECRET)
    script = zoo_script("c42_binary_detector.py")
    monkeypatch.setattr("app.runs.diagnoses._jobs", {str(script): object()})
    assert SECRET in said(room.teacher().page("zoo", case="c42"))
    assert SECRET not in said(room.student().page("zoo", case="c42"))


def test_what_a_file_calls_a_lesson_is_private(room: Class, store_path: Path) -> None:
    own = stores.finished(store_path, lesson_spec("numbers"))
    foreign = stores.finished(store_path, replace(lesson_spec("numbers"), imported="strange.json"))
    assert not as_student(lambda: _read(own)).exception
    assert raised(as_student(lambda: _read(foreign)))[0] == "BadInput"


def test_sharing_ends_though_the_clock_went_back(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stores.finished(store_path, SHARED)
    sharing.share(store_path, [run], wanted=True)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    sharing.share(store_path, [run], wanted=False)
    assert sharing.shared(store_path) == frozenset()


def test_a_report_is_not_made_of_a_run_that_was_kept_back_meanwhile(
    room: Class, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = stores.finished(store_path, SHARED)
    sharing.share(store_path, [run_id], wanted=True)
    with Reader(store_path) as reader:
        info = reader.run(run_id)
    files: list[Callable[[], bytes]] = []

    def kept(label: str, data: Callable[[], bytes], *rest: object, **more: object) -> None:
        files.append(data)

    monkeypatch.setattr("streamlit.download_button", kept)
    assert not as_student(lambda: run_page.offer_report(info)).exception
    assert b"<html" in files[0]()
    sharing.share(store_path, [run_id], wanted=False)
    with pytest.raises(permissions.Forbidden):
        files[0]()


FORBIDDEN: dict[str, Callable[[object], object]] = {
    "a probe": lambda run: actions.start([RunSpec("gpt")]),
    "user code": lambda run: actions.start([RunSpec("/etc/x.py:build")]),
    "a lesson with a probe": lambda run: actions.start([lesson_spec("numbers"), RunSpec("gpt")]),
    "a benchmark": lambda run: measurements.start(RunSpec("", kind="bench")),
    "a comparison": lambda run: measurements.start(RunSpec("gpt", kind="compare")),
    "a cancel": lambda run: actions.cancel_run(run),  # type: ignore[arg-type]
    "a deletion": lambda run: actions.delete([run.id]),  # type: ignore[attr-defined]
    "sharing": lambda run: actions.share(run, wanted=True),  # type: ignore[arg-type]
    "a diagnosis": lambda run: _jobs().start_diagnosis(Path("x.py"), "native", 5),
    "a script again": lambda run: _jobs().start_controls(run, ["fp32"]),
    "the end of a diagnosis": lambda run: _jobs().stop_runs("x.py", [run]),
    "a file": lambda run: _files().chosen(Path(stores.__file__).parent, "stores.py"),
    "preparing": lambda run: _requests().prepare(),
    "withdrawing": lambda run: _requests().withdraw(lesson_spec("numbers")),
    "a probe in the queue": lambda run: _requests().ask(RunSpec("gpt")),
    "a lesson again": lambda run: _requests().ask(lesson_spec("numbers"), again=True),
    "a lesson that is none": lambda run: _results(RunSpec("gpt")),
}


def _jobs():  # type: ignore[no-untyped-def]
    from app.runs import diagnoses

    return diagnoses


def _files():  # type: ignore[no-untyped-def]
    from app.runs import workload_choice

    return workload_choice


def _requests():  # type: ignore[no-untyped-def]
    from app.ext.lessons import classroom

    return classroom


def _results(spec: RunSpec) -> object:
    from app.ext.lessons import lesson_runs

    return lesson_runs.results(spec, is_asked=True, ask=lambda: None)


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_student_cannot_call_it(
    room: Class, store_path: Path, no_start: list[object], what: str
) -> None:
    run_id = stores.running(store_path, PRIVATE)
    with Reader(store_path) as reader:
        run = reader.run(run_id)
    before = store_path.read_bytes()
    kind, text = raised(as_student(lambda: FORBIDDEN[what](run)))
    assert kind == "Forbidden"
    assert text.startswith("Left to the teacher of this class: ")
    assert not no_start
    assert store_path.read_bytes() == before
    with Reader(store_path) as reader:
        assert reader.run(run_id).state.is_active
    assert sharing.shared(store_path) == frozenset()


@pytest.mark.quick(*SOME_PAGES)
@pytest.mark.parametrize("page", EVERY_PAGE)
def test_no_button_of_a_student_starts_or_ends_anything(
    room: Class, store_path: Path, page: str, no_start: list[object]
) -> None:
    """Every button of every page, on a store with a run under way that is shown to the class."""
    runs = [stores.running(store_path, SHARED), stores.finished(store_path, SHARED)]
    sharing.share(store_path, runs, wanted=True)
    app = room.student().page(page, run=runs[1])
    assert not app.exception
    for button in list(app.button):
        if button.disabled or not button.key:
            continue
        fresh = room.page(page, run=runs[1])
        fresh.button(key=button.key).click().run()
        assert not fresh.exception
    assert all(what[0].kind == "lesson" for what in no_start)  # type: ignore[index]
    with Reader(store_path) as reader:
        assert {run.id for run in reader.runs()} == set(runs)
        assert [run.state.is_active for run in reversed(reader.runs())] == [True, False]


def test_the_teacher_is_who_shows_cookie_and_proof(
    room: Class, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles: list[str] = []
    name, value = permissions.cookie_name(TOKEN), permissions.cookie_value(TOKEN)
    proof = permissions.proof_value(TOKEN)
    shown = [
        ({}, proof), ({name: ""}, proof), ({name: TOKEN}, proof), ({name: value[:-1]}, proof),
        ({name: "é"}, proof), ({name: value}, ""), ({name: value}, "é"), ({name: value}, value),
        ({name: value}, proof), ({f"__Host-{name}": value}, proof),
    ]  # fmt: skip
    for cookies, sent in shown:
        monkeypatch.setattr(permissions, "_cookies", lambda cookies=cookies: cookies)
        monkeypatch.setattr(permissions, "_proof", lambda sent=sent: sent)
        as_student(lambda: roles.append(permissions.role()))
    assert roles == ["student"] * 8 + ["teacher"] * 2
    assert TOKEN not in value
    assert permissions.role() == "guest"  # here no session is served


def test_nothing_that_a_browser_sends_makes_a_teacher(room: Class, store_path: Path) -> None:
    app = room.student().page("new_probe", role="teacher", teacher=TOKEN, token=TOKEN)
    assert "starting probes" in app.error[0].value
    app.session_state["role"] = "teacher"
    app.session_state["class:role"] = "teacher"
    assert app.run().error


def test_without_a_class_all_is_as_it_was(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(options.TOKEN, raising=False)
    run = stores.finished(store_path, PRIVATE)
    roles: list[str] = []
    as_student(lambda: (roles.append(permissions.role()), _read(run)))
    assert roles == ["operator"]
    assert permissions.role() == "operator"
    with pytest.raises(BadInput, match="ampscope runs list"):
        _read("0123456789ab")


def test_addresses_make_the_teacher_where_the_class_signs_in(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """st.user is replaced here; a whole sign-in is in test_sign_in.py."""
    monkeypatch.setenv(options.TEACHERS, "Ada@example.org, bob@example.org, sub:2482Ab")
    people: list[tuple[dict[str, object], str]] = [
        ({}, "guest"),
        ({"is_logged_in": False, "email": "ada@example.org"}, "guest"),
        ({"is_logged_in": True, "email": "ada@example.org", "email_verified": True}, "teacher"),
        ({"is_logged_in": True, "email": "ADA@example.org", "email_verified": True}, "teacher"),
        ({"is_logged_in": True, "email": "bob@example.org", "email_verified": False}, "student"),
        ({"is_logged_in": True, "email": "bob@example.org", "email_verified": "false"}, "student"),
        ({"is_logged_in": True, "email": "bob@example.org"}, "student"),
        ({"is_logged_in": True, "email": "eve@example.org", "email_verified": True}, "student"),
        ({"is_logged_in": True, "sub": "2482Ab"}, "teacher"),
        ({"is_logged_in": True, "sub": "2482", "email": "sub:2482Ab"}, "student"),
        ({"is_logged_in": True}, "student"),
    ]
    stores.finished(store_path, PRIVATE)
    for user, wanted in people:
        monkeypatch.setattr("streamlit.user", user)
        found: list[str] = []
        as_student(lambda found=found: found.append(permissions.role()))
        assert found == [wanted]
    monkeypatch.setattr("streamlit.user", {})
    room = Class(monkeypatch)
    app = room.teacher().page("gradients")  # a cookie is no address
    assert app.title[0].value == "Sign in"
    assert SECRET not in said(app)


def test_the_entry_page_is_not_among_them() -> None:
    assert HOME.name in EVERY_PAGE
