"""Lesson 9: from one overflow to weights that are NaN."""

from app import lesson_page
from app.learn import inf_to_nan

lesson_page.show(inf_to_nan.LESSON)
