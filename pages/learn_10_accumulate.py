"""Lesson 10: sums in half precision that stop."""

from app.learn import accumulate
from app.lesson import lesson_page

lesson_page.show(accumulate.LESSON)
