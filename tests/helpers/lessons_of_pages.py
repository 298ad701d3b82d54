"""The lessons of all pages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ampscope.ext.lessons.catalog import LESSONS
from app.ext.lessons import mistakes
from app.ext.lessons.lesson_page import Lesson, MeasuredLesson


def all_lessons() -> list[Lesson]:
    """In their order."""
    return [importlib.import_module(f"app.ext.lessons.{name}").LESSON for name in LESSONS]


def examples() -> Mapping[str, Mapping[str, str]]:
    """Lines for a reader's own training, by lesson or mistake, then by framework."""
    measured = [one for one in all_lessons() if isinstance(one, MeasuredLesson)]
    return {one.id: one.code for one in measured} | mistakes.CODE
