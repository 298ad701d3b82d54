"""Lessons: small measurements that each teach one thing about mixed precision.

A lesson is two modules of one name: here its ``INFO`` (:class:`catalog.LessonInfo`) and the
measurement in a child process, ``measure(asked, device) -> results``; in ``app/learn/`` what is
shown of that. ``mistakes`` brings scripts instead, which are diagnosed. ``catalog`` lists the
lessons and imports no torch; ``teach`` runs one.
"""
