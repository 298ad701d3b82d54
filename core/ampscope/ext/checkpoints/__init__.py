"""Checkpoints, read without loading them: what they hold, and whether they are poisoned."""

from ampscope.extensions import Extension

EXTENSION = Extension(
    docs="docs/checkpoints.md", commands={"check": "ampscope.ext.checkpoints.cli:check"}
)
