"""Lesson 6: what model.half() does to a tutorial's training."""

from app import lesson_page
from app.learn import half

lesson_page.show(half.LESSON)
