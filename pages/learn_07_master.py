"""Lesson 7: steps that are rounded away, and the weights that keep them."""

from app.learn import lesson_page, master

lesson_page.show(master.LESSON)
