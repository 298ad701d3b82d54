"""Lesson 12: what half precision gains on this machine."""

from app import lesson_page
from app.learn import speed

lesson_page.show(speed.LESSON)
