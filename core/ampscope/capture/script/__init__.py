"""Instruments for a script that nobody changed: public hooks, wrapped methods, marks on tensors.

Each is a context manager that leaves nothing behind; :mod:`ampscope.runner.script_recorder` puts
them together.
"""
