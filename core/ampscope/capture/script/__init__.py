"""Instruments for an unchanged script: public hooks, wrapped methods, taints on tensors.

Each is a context manager that leaves nothing behind; :mod:`ampscope.runner.script_recorder` puts
them together.
"""
