"""Lesson 2: in which powers of two a training's numbers lie."""

from app.learn import gradients, lesson_page

lesson_page.show(gradients.LESSON)
