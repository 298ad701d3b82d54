"""Which framework a script trains with, read from the imports of its text; nothing is run.

A script that imports torch is PyTorch's, whatever else it imports: Keras runs on torch too, and
its own text then says so. What is imported only where it is there (``try: import torch``,
``except ImportError``), as helpers that seed every framework do, counts where nothing else tells.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from ampscope.frameworks.names import FRAMEWORKS, TORCH

MAX_FILES = 200  # of the script's own neighbours that its imports lead to
_CAUGHT = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}


def framework_of(script: Path) -> str:
    """ "torch", "keras" or "paddle"; "torch" also for a script that imports none of them."""
    script = script.resolve()
    for with_tried in (False, True):
        if name := _named(_modules(script, with_tried)):
            return name
    return TORCH


def _named(modules: set[str]) -> str:
    if "torch" in modules:
        return TORCH
    return next((f.name for f in FRAMEWORKS.values() if modules & set(f.modules)), "")


def _modules(script: Path, with_tried: bool) -> set[str]:
    """Top-level names that the script imports, and the files of its folder that it leads to."""
    found: set[str] = set()
    seen: set[Path] = set()
    waiting = [script]
    while waiting and len(seen) < MAX_FILES:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for folder, dotted in _imports(file, with_tried):
            parts = dotted.split(".")
            if folder is None:
                found.add(parts[0])
            # The script's folder is first on the path of imports when it runs.
            waiting += _files(folder or script.parent, parts)
    return found


def _imports(file: Path, with_tried: bool) -> Iterator[tuple[Path | None, str]]:
    """(folder that a relative import starts from, dotted name) of what ``file`` imports."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in _nodes(tree, with_tried):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[min(node.level, len(file.parents)) - 1] if node.level else None
            before = f"{node.module}." if node.module else ""
            yield from ((folder, before + alias.name) for alias in node.names)


def _nodes(tree: ast.AST, with_tried: bool) -> Iterator[ast.AST]:
    """All below ``tree``; without what is imported only where it is there."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.Try) and not with_tried and any(map(_catches, node.handlers)):
            waiting += node.finalbody
        else:
            waiting += ast.iter_child_nodes(node)


def _catches(handler: ast.ExceptHandler) -> bool:
    """Whether a failed import would end there."""
    if handler.type is None:
        return True
    return any(isinstance(n, ast.Name) and n.id in _CAUGHT for n in ast.walk(handler.type))


def _files(folder: Path, parts: list[str]) -> Iterator[Path]:
    """Where the text of ``a``, ``a.b`` and ``a.b.c`` may lie; a package needs no __init__.py."""
    for part in parts:
        yield folder / f"{part}.py"
        folder = folder / part
        yield folder / "__init__.py"
