"""Lesson 3: gradients that are too small for fp16, and the loss scale that moves them."""

from app.learn import lesson_page, underflow

lesson_page.show(underflow.LESSON)
