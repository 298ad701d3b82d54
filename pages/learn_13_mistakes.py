"""Lesson 13: eight common mistakes, and what a diagnosis says of them."""

from app.learn import mistakes

mistakes.show()
