"""Class: what is being measured, who waits for what, and the lessons made ready before a class."""

from app.classes import class_page

class_page.show()
