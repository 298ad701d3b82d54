"""How the tests are laid out: one folder per package, and what is shared lies in tests/helpers."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_test_module_imports_another() -> None:
    readers = [*TESTS.rglob("*.py"), *(TESTS.parent / "benchmarks").glob("*.py")]
    bad = {
        str(path.relative_to(TESTS.parent)): sorted(
            name for name in imported(path) if ".test_" in name
        )
        for path in readers
        if "scripts" not in path.parts
    }
    assert {path: names for path, names in bad.items() if names} == {}


def test_every_test_module_lies_in_a_folder_and_every_helper_in_helpers() -> None:
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    assert [path.name for path in (TESTS / "helpers").glob("test_*.py")] == []


def test_the_slow_tests_are_tests_that_exist() -> None:
    """By file and function: parameters depend on the machine."""
    lost = set()
    for line in (TESTS / "slow_tests.txt").read_text().splitlines():
        path, _, test = line.split(" ", 1)[1].partition("::")
        file = TESTS.parent / path
        if not file.is_file() or f"def {test.partition('[')[0]}(" not in file.read_text():
            lost.add(line)
    assert lost == set()
