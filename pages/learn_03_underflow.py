"""Lesson 3: gradients that are too small for fp16, and the loss scale that moves them."""

from app import lesson_page
from app.learn import underflow

lesson_page.show(underflow.LESSON)
