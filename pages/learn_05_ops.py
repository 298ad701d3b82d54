"""Lesson 5: autocast's choice of precision, op by op."""

from app.learn import lesson_page, ops

lesson_page.show(ops.LESSON)
