"""Lesson 11: what a training step holds in memory."""

from app.learn import memory
from app.lesson import lesson_page

lesson_page.show(memory.LESSON)
