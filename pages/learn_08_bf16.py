"""Lesson 8: the two half formats on the same model."""

from app.learn import bf16, lesson_page

lesson_page.show(bf16.LESSON)
