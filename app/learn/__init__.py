"""The lessons: one module each, named as the measurement in ``ampscope.lessons``.

A lesson is a question, what is drawn of its measurement, and lines for the reader's own code;
:mod:`app.learn.lesson_page` gives all of them one shape.
"""
