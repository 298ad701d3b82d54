"""Class: what is being measured, who waits for what, and the lessons made ready before a class."""

from app import classroom

classroom.show_classroom()
