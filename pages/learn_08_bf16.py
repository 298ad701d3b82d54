"""Lesson 8: the two half formats on the same model."""

from app import lesson_page
from app.learn import bf16

lesson_page.show(bf16.LESSON)
