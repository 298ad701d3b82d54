"""Only one file asks a training's own modules what they hold, and none keys a table by them."""

from __future__ import annotations

import ast
from pathlib import Path

CORE = Path(__file__).parents[2] / "core" / "ampscope"
INSTRUMENTS = ("capture", "runner", "watcher")
LISTS = {
    "children", "named_children", "named_modules", "named_parameters", "named_buffers",
    "parameters",
}  # fmt: skip
HASHING = {"WeakKeyDictionary", "WeakSet"}
ALLOWED = {
    ("runner/probe.py", "parameters"),  # of a workload, which a probe trains itself
}


def test_no_instrument_runs_code_of_the_trainings_objects() -> None:
    found: set[tuple[str, str]] = set()
    for folder in INSTRUMENTS:
        for path in sorted((CORE / folder).rglob("*.py")):
            name = path.relative_to(CORE).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in HASHING:
                    found.add((name, node.attr))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    is_own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
                    if node.func.attr in LISTS and not is_own:
                        found.add((name, node.func.attr))
    assert found == ALLOWED
