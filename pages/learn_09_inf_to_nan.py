"""Lesson 9: from one overflow to weights that are NaN."""

from app.learn import inf_to_nan, lesson_page

lesson_page.show(inf_to_nan.LESSON)
