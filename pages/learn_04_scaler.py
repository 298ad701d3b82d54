"""Lesson 4: how a dynamic loss scaler finds its scale."""

from app.learn import lesson_page, scaler

lesson_page.show(scaler.LESSON)
