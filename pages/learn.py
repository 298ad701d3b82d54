"""Learn: the lessons with one line each, and a way through them for a newcomer."""

from app.learn import lesson_page

lesson_page.show_overview()
