"""Lesson 14: energy and money of a whole training."""

from app.learn import cost, lesson_page

lesson_page.show(cost.LESSON)
