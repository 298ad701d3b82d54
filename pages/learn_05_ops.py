"""Lesson 5: autocast's choice of precision, op by op."""

from app import lesson_page
from app.learn import ops

lesson_page.show(ops.LESSON)
