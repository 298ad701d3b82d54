"""Learn: the lessons with one line each, and a way through them for a newcomer."""

from app.lesson import learn_overview

learn_overview.show()
