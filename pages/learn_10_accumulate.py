"""Lesson 10: sums in half precision that stop."""

from app import lesson_page
from app.learn import accumulate

lesson_page.show(accumulate.LESSON)
