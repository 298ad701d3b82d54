"""What all lessons share: specs, runs that are found again, refusals, the store."""

from __future__ import annotations

import ast
import importlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ampscope.errors import BadInput, StoreError
from ampscope.ext.lessons.catalog import LESSONS, lesson_spec
from ampscope.ext.lessons.mistakes import MISTAKES
from ampscope.launcher.launch import checked, follow, launch
from ampscope.records import RunSpec, State
from ampscope.store.codec import decode_result, encode_result, spec_from_json, to_json
from ampscope.store.reader import Reader
from tests.helpers.lesson_runs import measured

MEASURED = [info.id for info in LESSONS.values() if info.is_measured]
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_is_read_of_a_lesson_is_what_its_module_says(lesson: str) -> None:
    assert LESSONS[lesson] == importlib.import_module(f"ampscope.ext.lessons.{lesson}").INFO


def test_a_spec_survives_the_store() -> None:
    spec = lesson_spec("underflow", model="lenet")
    assert spec_from_json(to_json(spec)) == spec
    assert hash(spec) == hash(lesson_spec("underflow", model="lenet"))


@pytest.mark.parametrize("settings", ["[1]", '[["a"]]', '[["a", 1]]', '["ab"]'])
def test_damaged_settings_are_refused(settings: str) -> None:
    with pytest.raises(StoreError, match="settings"):
        spec_from_json('{"workload": "underflow", "settings": ' + settings + "}")


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(workload="underflow", kind="lesson"),
        RunSpec(workload="gpt", kind="lesson"),
        replace(lesson_spec("underflow"), settings=(("model", "../../x"), ("loss", "small"))),
        replace(lesson_spec("underflow"), settings=(("version", "0"),)),
        RunSpec(workload="mistakes", kind="lesson"),
    ],
)
def test_a_spec_that_no_page_makes_is_refused(spec: RunSpec) -> None:
    with pytest.raises(BadInput):
        checked(spec)


def test_settings_have_words_on_the_page() -> None:
    from app.ext.lessons.lesson_page import Lesson
    from tests.helpers.lessons_of_pages import all_lessons

    for lesson in all_lessons():
        assert isinstance(lesson, Lesson)
        assert set(lesson.settings) == set(lesson.info.settings)
        for name, setting in lesson.settings.items():
            assert tuple(setting.values) == lesson.info.settings[name]


def test_code_of_every_framework_is_python() -> None:
    from tests.helpers.lessons_of_pages import all_lessons, examples

    assert {*MEASURED, *(one.id for one in MISTAKES)} == set(examples())
    for code in examples().values():
        assert list(code) == ["PyTorch", "Paddle", "Keras"]
        for text in code.values():
            ast.parse(text)
    for lesson in all_lessons():
        assert all(source.url.startswith("https://") for source in lesson.sources)


def test_results_of_a_lesson_survive_the_store() -> None:
    for result in measured("numbers") + measured("underflow"):
        kind, text = encode_result(result)
        assert decode_result(kind, text) == result


def test_a_child_measures_a_lesson(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    spec = lesson_spec("underflow", model="lenet")
    began = time.monotonic()
    run_id = launch(spec, store)
    *_, last = follow(store, run_id)
    assert last.state is State.FINISHED, last.message
    assert time.monotonic() - began < 60  # 4 s on an idle machine: benchmarks/lessons.py
    with Reader(store) as reader:
        assert reader.run(run_id).spec == spec
        assert len(reader.results(run_id)) == 2 + 21
        machine = reader.run(run_id).machine
    assert machine is not None
    assert machine.policy == "rehearsal"
