"""The class's queue: one measurement for equal requests, turns, bounds, and what is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampscope.ext.lessons.catalog import lesson_spec
from ampscope.records import RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from app import options
from app.ext.lessons import classroom, lesson_runs
from app.ext.lessons.classroom import KEPT_S, MAX_OF_ONE, MAX_WAITING, ClassQueue, QueueFull
from tests.helpers import stores
from tests.helpers.classes import TOKEN, Class


class Bench:
    """A queue whose clock, machine and store are the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.free = True
        self.made: list[RunSpec] = []
        self.queue = ClassQueue(self.find, self.launch, lambda: self.free, lambda: self.now)
        self.queue._begin = lambda: None  # type: ignore[method-assign]  # the test makes the turns

    def find(self, spec: RunSpec) -> str:
        return f"run {self.made.index(spec)}" if spec in self.made else ""

    def launch(self, spec: RunSpec) -> str:
        self.made.append(spec)
        return self.find(spec)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def spec(number: int) -> RunSpec:
    return RunSpec(f"lesson {number}", kind="lesson")


def test_equal_requests_are_one_and_give_the_same_run(bench: Bench) -> None:
    assert [bench.queue.ask(spec(1), f"s{n}") for n in range(60)] == [""] * 60
    assert bench.queue.start_next()
    assert not bench.queue.start_next()
    assert {bench.queue.ask(spec(1), f"s{n}") for n in range(60)} == {"run 0"}
    assert bench.made == [spec(1)]
    assert bench.queue.ask(spec(1), "s0", again=True) == ""
    assert bench.queue.place(spec(1)) == 1


def test_nothing_starts_while_something_runs(bench: Bench) -> None:
    bench.free = False
    bench.queue.ask(spec(1), "a")
    assert bench.queue.start_next()
    assert not bench.made
    bench.free = True
    bench.queue.start_next()
    assert bench.made == [spec(1)]


def test_sessions_take_turns_and_the_teacher_is_first(bench: Bench) -> None:
    for n in range(3):
        bench.queue.ask(spec(n), "greedy")
    bench.queue.ask(spec(10), "modest")
    bench.queue.ask(spec(11), "late")
    bench.queue.ask(spec(20), "teacher", teacher=True)
    assert [r.spec for r in bench.queue.waiting()] == [
        spec(20), spec(0), spec(10), spec(11), spec(1), spec(2)
    ]  # fmt: skip
    assert bench.queue.place(spec(11)) == 4
    bench.queue.ask(spec(2), "teacher", teacher=True)  # what the teacher waits for too
    assert bench.queue.place(spec(2)) == 1
    for _ in range(6):
        bench.queue.start_next()
    bench.queue.ask(spec(3), "greedy")
    bench.queue.ask(spec(12), "new here")
    assert [r.spec for r in bench.queue.waiting()] == [spec(12), spec(3)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=40))
def test_no_session_gets_two_while_another_waits_for_its_first(
    asked: list[tuple[int, int]],
) -> None:
    """Whatever is asked: everything is made once, and turns go round."""
    bench, owners = Bench(), dict[RunSpec, int]()
    for who, number in asked:
        if spec(number) in owners:
            continue  # shared requests belong to several, and are tested above
        try:
            bench.queue.ask(spec(number), f"s{who}")
        except QueueFull:
            continue
        owners[spec(number)] = who
    while bench.queue.start_next():
        pass
    assert sorted(s.workload for s in bench.made) == sorted(s.workload for s in owners)
    turns = [owners[s] for s in bench.made]
    for n in range(len(turns)):
        had = {who: turns[:n].count(who) for who in turns[n:]}
        assert had.get(turns[n], 0) == min(had.values())


def test_a_session_and_the_class_have_a_bound(bench: Bench) -> None:
    for n in range(MAX_OF_ONE):
        bench.queue.ask(spec(n), "greedy")
    with pytest.raises(QueueFull, match=f"You wait for {MAX_OF_ONE} measurements"):
        bench.queue.ask(spec(99), "greedy")
    assert bench.queue.ask(spec(0), "other") == ""  # what waits already costs nothing
    for n in range(MAX_OF_ONE, MAX_WAITING):
        bench.queue.ask(spec(n), f"s{n}")
    with pytest.raises(QueueFull, match=f"The class waits for {MAX_WAITING}"):
        bench.queue.ask(spec(99), "fresh")
    assert bench.queue.ask(spec(98), "teacher", teacher=True) == ""
    assert len(bench.queue.waiting()) == MAX_WAITING + 1


def test_what_nobody_asks_for_any_more_is_forgotten(bench: Bench) -> None:
    bench.queue.ask(spec(1), "closed")
    bench.queue.ask(spec(2), "open")
    bench.queue.ask(spec(3), "teacher", teacher=True, kept=True)
    bench.now = KEPT_S - 1
    bench.queue.ask(spec(2), "open")
    assert len(bench.queue.waiting()) == 3
    bench.now = KEPT_S + 1
    assert [r.spec for r in bench.queue.waiting()] == [spec(3), spec(2)]
    bench.queue.withdraw(spec(2))
    assert bench.queue.place(spec(2)) == 0


def test_a_launch_that_fails_does_not_stop_the_queue(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(spec: RunSpec) -> str:
        raise classroom.AmpscopeError("no Python")

    monkeypatch.setattr(bench.queue, "_launch", broken)
    bench.queue.ask(spec(1), "a")
    bench.queue.start_next()
    assert not bench.queue.waiting()
    monkeypatch.undo()
    bench.queue.ask(spec(2), "a")
    bench.queue.start_next()
    assert bench.made == [spec(2)]


def registers(store: Path, made: list[str]) -> Callable[[RunSpec, Path], str]:
    """In place of launch: a run in the store that nobody carries out."""

    def launch(asked: RunSpec, path: Path) -> str:
        made.append(stores.queued(path, asked))
        return made[-1]

    return launch


def at_once(count: int, call: Callable[[int], object]) -> list[object]:
    """``call`` from so many threads that start together."""
    gate, found = threading.Barrier(count), list[object]()

    def one(number: int) -> None:
        gate.wait()
        found.append(call(number))

    threads = [threading.Thread(target=one, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_fifty_at_once_make_one_run(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(classroom, "launch", registers(store_path, made))
    asked = lesson_spec("numbers")
    queue = classroom._queue(store_path)
    assert set(at_once(50, lambda n: queue.ask(asked, f"s{n}"))) <= {"", *made}
    thread = queue._thread
    if thread is not None:
        thread.join(60)
    assert len(made) == 1
    assert set(at_once(50, lambda n: queue.ask(asked, f"s{n}"))) == set(made)
    with Reader(store_path) as reader:
        assert [run.id for run in reader.runs()] == made
    # and while it is under way another one waits
    assert queue.ask(lesson_spec("underflow"), "s1") == ""
    assert len(made) == 1
    RunWriter(store_path, made[0]).finish(State.FINISHED)
    waits = queue._thread
    assert waits is not None
    waits.join(60)
    assert len(made) == 2


def test_fifty_at_once_make_one_run_without_a_class_too(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.delenv(options.TOKEN, raising=False)
    monkeypatch.setattr(lesson_runs, "launch", registers(store_path, made))
    found = at_once(50, lambda n: lesson_runs._started(lesson_spec("numbers")).id)
    assert found == made * 50
    assert len(made) == 1


def test_students_see_their_place_and_the_teacher_the_queue(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Class(monkeypatch)
    stores.running(store_path)  # the machine is taken
    monkeypatch.setattr(classroom, "launch", registers(store_path, []))
    queue = classroom._queue(store_path)
    queue.ask(lesson_spec("scaler"), "another user")
    first = room.student().page("learn_03_underflow", guess3="a")
    assert queue.place(lesson_spec("underflow")) == 0  # an address asks for nothing
    first.button(key="lesson-start").click().run()
    assert not first.exception
    assert any("Place 2 in the queue" in box.value for box in first.info)
    page = room.teacher().page("classroom")
    assert not page.exception
    shown = "\n".join(m.value.replace("\\", "") for m in page.markdown)
    assert "lesson 4, The dynamic scaler" in shown
    assert "lesson 3, Underflow and loss scaling" in shown
    next(b for b in page.button if b.label == "Withdraw").click().run()
    assert queue.place(lesson_spec("scaler")) == 0
    page.button(key="class-prepare").click().run()
    assert queue.waiting()[0].is_teachers
    assert room.student().page("classroom").error
    for request in queue.waiting():
        queue.withdraw(request.spec)


def test_the_token_does_not_reach_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampscope.launcher.children import child_environment

    monkeypatch.setenv(options.TOKEN, TOKEN)
    assert TOKEN not in child_environment().values()


def test_turns_are_kept_when_a_request_is_shared(bench: Bench) -> None:
    """Who asked for what another one wanted has had a turn as well."""
    bench.queue.ask(spec(1), "a")
    bench.queue.ask(spec(1), "b")
    bench.queue.start_next()
    for n, who in ((2, "a"), (3, "b"), (4, "c")):
        bench.queue.ask(replace(spec(n)), who)
    order = [request.spec for request in bench.queue.waiting()]
    assert order[0] == spec(4)
    assert all(a.since <= b.since for a, b in pairwise(bench.queue.waiting()[1:]))
