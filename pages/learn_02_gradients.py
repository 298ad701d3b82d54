"""Lesson 2: in which powers of two a training's numbers lie."""

from app import lesson_page
from app.learn import gradients

lesson_page.show(gradients.LESSON)
