"""Lesson 11: what a training step holds in memory."""

from app import lesson_page
from app.learn import memory

lesson_page.show(memory.LESSON)
