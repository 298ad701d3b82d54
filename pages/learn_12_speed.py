"""Lesson 12: what half precision gains on this machine."""

from app.learn import speed
from app.lesson import lesson_page

lesson_page.show(speed.LESSON)
