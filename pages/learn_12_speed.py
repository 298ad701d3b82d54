"""Lesson 12: what half precision gains on this machine."""

from app.learn import lesson_page, speed

lesson_page.show(speed.LESSON)
