"""Lesson 1: the number formats, bit by bit."""

from app import lesson_page
from app.learn import numbers

lesson_page.show(numbers.LESSON)
