"""The lessons: one module each, named as the measurement in ``ampscope.ext.lessons``; and a class.

A lesson is a question, what is drawn of its measurement, and lines for the reader's own code;
`lesson_page` gives all of them one shape, `prediction` asks the question, `lesson_runs` measures,
`lesson_diagnosis` diagnoses a lesson's script, `large_type`, `references` and `figures` are for all
lessons. `classroom` is the page of a class's teacher, and the queue in which a class measures.
"""
