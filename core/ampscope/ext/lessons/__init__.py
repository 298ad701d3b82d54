"""Lessons: small measurements that each teach one thing about mixed precision.

A lesson is two modules of one name: here its ``INFO`` (:class:`catalog.LessonInfo`) and the
measurement in a child process, ``measure(asked, device) -> results``; in ``app/ext/lessons/`` what
is shown of that. ``mistakes`` brings scripts instead, which are diagnosed. ``catalog`` lists the
lessons and imports no torch; ``teach`` runs one.
"""

from ampscope.extensions import Extension, Kind

EXTENSION = Extension(
    docs="docs/learning.md",
    pages="ampscope.ext.lessons.catalog:pages",
    home_door="app.ext.lessons.lesson_page:show_door",
    kinds=(
        Kind(
            name="lesson",  # each has a page of its own
            titled="ampscope.ext.lessons.catalog:lesson_title",
            check="ampscope.ext.lessons.catalog:checked_lesson",
            measure="ampscope.ext.lessons.teach:measure",
            told="ampscope.ext.lessons.report:lesson_told",
            gaps="ampscope.ext.lessons.report:lesson_gaps",
        ),
    ),
    class_scripts="ampscope.ext.lessons.mistakes:SCRIPTS",
)
