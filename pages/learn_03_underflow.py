"""Lesson 3: gradients that are too small for fp16, and the loss scale that moves them."""

from app.learn import underflow
from app.lesson import lesson_page

lesson_page.show(underflow.LESSON)
