"""The lessons of all pages."""

from __future__ import annotations

import importlib

from app.learn.lesson_page import Lesson
from app.links import LESSON_ENTRIES


def all_lessons() -> list[Lesson]:
    """In their order."""
    names = [entry.file.stem.split("_", 2)[2] for entry in LESSON_ENTRIES.values()]
    return [importlib.import_module(f"app.learn.{name}").LESSON for name in names]
