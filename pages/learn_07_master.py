"""Lesson 7: steps that are rounded away, and the weights that keep them."""

from app.learn import master
from app.lesson import lesson_page

lesson_page.show(master.LESSON)
