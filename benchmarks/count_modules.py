"""How the code is cut: modules and lines of code of engine and extensions, small modules with one
reader.

    python benchmarks/count_modules.py             # this checkout
    python benchmarks/count_modules.py ../other    # another one

Counted are all modules of core/ and app/ but the zoo's scripts and the lessons' mistakes, which are
written as users write them. A line of code is one that is neither blank nor comment nor docstring.
"""

from __future__ import annotations

import ast
import sys
import tokenize
from pathlib import Path

SMALL = 60  # lines
EXTENSIONS = ("ampscope.ext.", "app.ext.")
LEFT_OUT = ("zoo/scripts", "lessons/scripts")
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
)  # fmt: skip


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    paths = modules(root)
    trees = {name: ast.parse(path.read_text()) for name, path in paths.items()}
    importers = imported_by(trees, paths)
    small = sorted(
        name for name in paths if is_small(name, paths[name], importers.get(name, set()))
    )
    source = "".join(path.read_text() for path in paths.values())
    lines = {name: code_lines(path) for name, path in paths.items()}
    for part, names in (
        ("engine", [n for n in lines if not n.startswith(EXTENSIONS)]),
        ("extensions", [n for n in lines if n.startswith(EXTENSIONS)]),
        ("together", list(lines)),
    ):
        print(f"{part:10} {len(names):4} modules, {sum(lines[n] for n in names):7,} lines of code")
    print(f"{source.count('= lambda')} callbacks that are assigned as lambdas or named lambdas")
    print(f"{len(small)} modules under {SMALL} lines with one importer, in their own folder:")
    print("".join(f"    {name}\n" for name in small), end="")


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for base, package in ((root / "core", "ampscope"), (root, "app")):
        for path in sorted((base / package).rglob("*.py")):
            if not any(part in path.as_posix() for part in LEFT_OUT):
                parts = path.relative_to(base).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_by(trees: dict[str, ast.Module], paths: dict[str, Path]) -> dict[str, set[str]]:
    """Module -> those that import it."""
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [one if one in paths else node.module for one in inner]
            else:
                continue
            for target in targets:
                found.setdefault(target, set()).add(name)
    return found


def is_small(name: str, path: Path, importers: set[str]) -> bool:
    """Whether it belongs into the one module that imports it."""
    if path.name == "__init__.py" or len(path.read_text().splitlines()) >= SMALL:
        return False
    return {one.rpartition(".")[0] for one in importers} == {name.rpartition(".")[0]} and (
        len(importers) == 1
    )


def code_lines(path: Path) -> int:
    """Lines that hold code."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    lines: set[int] = set()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type not in NO_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


if __name__ == "__main__":
    main()
