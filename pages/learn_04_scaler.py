"""Lesson 4: how a dynamic loss scaler finds its scale."""

from app import lesson_page
from app.learn import scaler

lesson_page.show(scaler.LESSON)
