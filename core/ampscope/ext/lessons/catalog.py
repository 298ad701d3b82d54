"""The lessons as data: what the dashboard lists and what a spec may ask for. Imports no torch.

    >>> lesson_spec("underflow", model="gpt").settings[0]
    ('model', 'gpt')

A lesson's settings have few values each, so that equal questions meet in one measurement and a
browser can ask for nothing else.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from ampscope import __version__
from ampscope.errors import BadInput
from ampscope.extensions import Page
from ampscope.records import RunSpec

VERSION = "version"  # the setting that names what made a measurement
_APP = "app.ext.lessons"
TIME_LIMIT_S = 60.0  # twelve times what a lesson may take on two cores


@dataclass(frozen=True, slots=True)
class LessonInfo:
    """One lesson: the constant ``INFO`` of the module that measures it, in literals.

    Lessons on numbers run on the CPU by CUDA's rules everywhere: the same numbers on every desk,
    and no wait for a GPU. Lessons on speed run on what the machine has, by its own rules.
    """

    id: str  # the names of its two modules, here and in app/ext/lessons
    number: int
    title: str
    icon: str  # of Material Symbols
    sentence: str  # what will be seen
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # each default first
    is_speed: bool = False
    is_measured: bool = True  # by a run of its own; else by diagnoses
    revision: int = 1  # counted up when the measurement changes: older results are not shown


def _infos() -> Iterator[LessonInfo]:
    """Each lesson's ``INFO``, read from its file: to import it would load torch."""
    for file in Path(__file__).parent.glob("*.py"):
        for statement in ast.parse(file.read_text(encoding="utf-8")).body:
            match statement:
                case ast.Assign([ast.Name("INFO")], ast.Call(keywords=found)):
                    yield LessonInfo(**{str(k.arg): ast.literal_eval(k.value) for k in found})


LESSONS: Final[Mapping[str, LessonInfo]] = MappingProxyType(
    {one.id: one for one in sorted(_infos(), key=lambda one: one.number)}
)


def page_name(info: LessonInfo) -> str:
    """Number and id, so that addresses sort as lessons do."""
    return f"learn_{info.number:02d}_{info.id}"


def pages() -> tuple[Page, ...]:
    """Those of the dashboard: the overview, the lessons, the class."""
    return (
        Page("learn", "Learn", "school", "Learn", draw=f"{_APP}.lesson_page:show_overview",
             in_sidebar=True),
        *(Page(page_name(one), f"{one.number} {one.title}", one.icon, "Learn",
               draw=f"{_APP}.{one.id}:LESSON.show") for one in LESSONS.values()),
        Page("classroom", "Class", "groups", "Learn", draw=f"{_APP}.classroom:show_classroom",
             in_sidebar=True, for_teacher=True),
    )  # fmt: skip


def lesson_spec(lesson: str, **asked: str) -> RunSpec:
    """The spec of a lesson's measurement, with every setting that was not asked for at its default.

    Raises BadInput for what is no lesson, no setting of it or no value of a setting.
    """
    info = _known(lesson)
    for name, value in asked.items():
        if value not in info.settings.get(name, ()):
            raise BadInput(f"Lesson {lesson!r} has no setting {name}={value}.")
    settings = [(name, asked.get(name, values[0])) for name, values in info.settings.items()]
    return RunSpec(
        workload=lesson,
        kind="lesson",
        steps=1,
        device="auto" if info.is_speed else "cpu",
        policy="native" if info.is_speed else "auto",
        time_limit_s=TIME_LIMIT_S,
        settings=(*settings, (VERSION, f"{__version__}.{info.revision}")),
    )


def every_spec(lesson: str) -> Iterator[RunSpec]:
    """A lesson's measurement in each of its settings, the default first."""
    info = _known(lesson)
    for values in itertools.product(*info.settings.values()) if info.is_measured else ():
        yield lesson_spec(lesson, **dict(zip(info.settings, values, strict=True)))


def lesson_title(spec: RunSpec) -> str:
    """``lesson 3, Underflow and loss scaling (model gpt, loss small)``"""
    info = LESSONS.get(spec.workload)
    name = f"lesson {info.number}, {info.title}" if info else f"lesson {spec.workload}"
    settings = [f"{name} {value}" for name, value in spec.settings if name != VERSION]
    return name + (f" ({', '.join(settings)})" if settings else "")


def checked_lesson(spec: RunSpec) -> None:
    """Refuse a spec that :func:`lesson_spec` would not make. Raises BadInput."""
    asked = {name: value for name, value in spec.settings if name != VERSION}
    wanted = lesson_spec(spec.workload, **asked).settings
    if wanted != spec.settings:
        raise BadInput(f"Lesson {spec.workload!r} takes the settings {dict(wanted)}.")


def _known(lesson: str) -> LessonInfo:
    info = LESSONS.get(lesson)
    if info is None or not info.is_measured:
        names = ", ".join(one.id for one in LESSONS.values() if one.is_measured)
        raise BadInput(f"There is no lesson {lesson!r} to measure. There are: {names}.")
    return info
