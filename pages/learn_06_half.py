"""Lesson 6: what model.half() does to a tutorial's training."""

from app.learn import half, lesson_page

lesson_page.show(half.LESSON)
