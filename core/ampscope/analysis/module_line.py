"""A module's own lines in a script, for a page that shows modules: recorded are its path and its
class's name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampscope.observations import SourceText


@dataclass(frozen=True, slots=True)
class ModuleLine:
    """Where a recorded source speaks of a module."""

    line: str  # "train.py:41"
    of: str  # the class whose forward that is
    is_called: bool  # it runs there, in the forward of a module above it


def module_line(
    sources: Sequence[SourceText], types: Mapping[str, str], path: str
) -> ModuleLine | None:
    """Where the forward of the module ``path`` begins; of one whose class the sources do not hold
    the line on which the nearest module above it uses it. ``types``: path -> name of the class.

    None where no source says so, or two classes have that name.
    """
    known: dict[str, list[tuple[str, ast.ClassDef]]] = defaultdict(list)
    for source in sources:
        for found in _classes(source.lines):
            known[found.name].append((source.file, found))
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        defined = known[types.get(".".join(parts[:depth]), "")]
        if len(defined) == 1:
            file, of = defined[0]
            line = _forward_line(of, parts[depth] if depth < len(parts) else "")
            return ModuleLine(f"{file}:{line}", of.name, depth < len(parts)) if line else None
        if defined:
            return None
    return None


def _classes(lines: Sequence[str]) -> list[ast.ClassDef]:
    try:
        tree = ast.parse("\n".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # cut off, or no Python
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _forward_line(of: ast.ClassDef, child: str) -> int:
    """Of its forward, or of the first use of its ``child`` in there; 0 where there is none."""
    forward = next(
        (n for n in of.body if isinstance(n, ast.FunctionDef) and n.name == "forward"), None
    )
    if forward is None or not child:
        return 0 if child else (forward or of).lineno
    uses = (
        node.lineno
        for node in ast.walk(forward)
        if isinstance(node, ast.Attribute)
        and node.attr == child
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
    return min(uses, default=0)
