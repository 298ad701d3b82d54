"""Lesson 10: sums in half precision that stop."""

from app.learn import accumulate, lesson_page

lesson_page.show(accumulate.LESSON)
