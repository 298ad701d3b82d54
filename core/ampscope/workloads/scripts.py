"""Whether a path names a training script or a file that builds a workload. Imports no torch."""

from __future__ import annotations

import ast
from pathlib import Path

BUILDER = "build"  # the function that a workload's file has


def is_script(workload: str) -> bool:
    """A Python file, named without ``:function``, in which nothing is called ``build`` at the top
    level."""
    path = Path(workload).expanduser()
    if path.suffix != ".py" or not path.is_file():
        return False
    try:
        body = ast.parse(path.read_bytes()).body
    except (SyntaxError, ValueError):
        return True  # the run says what is wrong with it
    names = {n.name for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
    return BUILDER not in names
