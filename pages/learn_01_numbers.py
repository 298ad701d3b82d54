"""Lesson 1: the number formats, bit by bit."""

from app.learn import numbers
from app.lesson import lesson_page

lesson_page.show(numbers.LESSON)
