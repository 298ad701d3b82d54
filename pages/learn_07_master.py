"""Lesson 7: steps that are rounded away, and the weights that keep them."""

from app import lesson_page
from app.learn import master

lesson_page.show(master.LESSON)
