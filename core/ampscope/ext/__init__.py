"""Extensions: what ampscope offers beyond the engine. Each may be deleted; the engine imports none.

A package here holds one ``EXTENSION`` (:mod:`ampscope.extensions`), its code, its commands in
``cli.py``; its tests lie in ``tests/ext``, its pages' code in ``app/ext``.
"""
