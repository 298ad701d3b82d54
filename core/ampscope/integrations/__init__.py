"""Callbacks for Lightning, Transformers and Accelerate: thin shells over `ampscope.watch`.

Each module imports its own library, and nothing else in ampscope does.
"""
