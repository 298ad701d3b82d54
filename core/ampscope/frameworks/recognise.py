"""Which framework a script trains with, read from the imports of its text; nothing is run.

A script that imports torch is PyTorch's, whatever else it imports: Keras runs on torch too, and
its own text then says so.
"""

from __future__ import annotations

import ast
from pathlib import Path

from ampscope.frameworks.names import FRAMEWORKS, TORCH

MAX_FILES = 200  # of the script's own neighbours that its imports lead to


def framework_of(script: Path) -> str:
    """ "torch", "keras" or "paddle"; "torch" also for a script that imports none of them."""
    seen: set[Path] = set()
    names = _imports(script.resolve(), seen)
    if "torch" in names:
        return TORCH
    for framework in FRAMEWORKS.values():
        if names & set(framework.modules):
            return framework.name
    return TORCH


def _imports(file: Path, seen: set[Path]) -> set[str]:
    """Top-level names that ``file`` and the files beside it import."""
    if file in seen or len(seen) >= MAX_FILES:
        return set()
    seen.add(file)
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level:
            found |= {(node.module or "").partition(".")[0], *(a.name for a in node.names)}
    for name in sorted(found):
        for neighbour in (file.parent / f"{name}.py", file.parent / name / "__init__.py"):
            if neighbour.is_file():
                found |= _imports(neighbour, seen)
    return found
