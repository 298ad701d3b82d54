"""Lesson 11: what a training step holds in memory."""

from app.learn import lesson_page, memory

lesson_page.show(memory.LESSON)
