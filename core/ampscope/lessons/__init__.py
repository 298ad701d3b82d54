"""Lessons: small measurements that each teach one thing about mixed precision.

``catalog`` is data and imports no torch. Every other module measures one lesson in a child process:
``measure(asked, device) -> results``. The page of the same name (``app/learn/``) draws them.
"""
