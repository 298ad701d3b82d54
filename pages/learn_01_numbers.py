"""Lesson 1: the number formats, bit by bit."""

from app.learn import lesson_page, numbers

lesson_page.show(numbers.LESSON)
