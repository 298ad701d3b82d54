"""Lesson 5: autocast's choice of precision, op by op."""

from app.learn import ops
from app.lesson import lesson_page

lesson_page.show(ops.LESSON)
