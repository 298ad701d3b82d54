"""Lesson 4: how a dynamic loss scaler finds its scale."""

from app.learn import scaler
from app.lesson import lesson_page

lesson_page.show(scaler.LESSON)
