"""Lesson 14: energy and money of a whole training."""

from app import lesson_page
from app.learn import cost

lesson_page.show(cost.LESSON)
