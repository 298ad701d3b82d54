"""A script's text with its syntax tree, and edits by position that leave everything else as written.

A transformation finds its places in the tree and returns edits of text segments; comments, line
breaks and names elsewhere stay. ``apply`` also tells where the edited lines lie in the new text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces ``text[start:end]`` by ``new``; ``blamed`` when the fault is to be found there."""

    start: int
    end: int
    new: str
    blamed: bool = False


class Script:
    """A script that can be searched and edited. Offsets are characters of ``text``."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }

    @cached_property
    def _line_starts(self) -> list[int]:
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines(keepends=True)

    # ---- searching

    def all(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        """All nodes of these kinds, in the order of the text."""
        yield from (n for n in self._nodes if isinstance(n, kinds))

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        found = [n for n in ast.walk(self.tree) if hasattr(n, "lineno")]
        return sorted(found, key=lambda n: (n.lineno, n.col_offset))

    def calls(self, *names: str) -> list[ast.Call]:
        """Calls of functions so named: "autocast", "F.relu", or ".step" for a method of anything."""
        return [c for c in self.all(ast.Call) if _is_named(dotted(c.func), names)]  # type: ignore

    def assigned(self, name: str) -> list[ast.Assign]:
        """Assignments to ``name`` or to an attribute so named."""
        return [
            node
            for node in self.all(ast.Assign)
            if any(dotted(t).split(".")[-1] == name for t in node.targets)  # type: ignore
        ]  # type: ignore[return-value]

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Its parents, nearest first."""
        while (up := self._parents.get(node)) is not None:
            yield up
            node = up

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds ``node``."""
        for at in (node, *self.above(node)):
            if isinstance(at, ast.stmt):
                return at
        raise ValueError("not within a statement")

    def function(self, node: ast.AST) -> ast.FunctionDef | None:
        for at in self.above(node):
            if isinstance(at, ast.FunctionDef):
                return at
        return None

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        for at in self.above(node):
            if isinstance(at, ast.ClassDef):
                return at
        return None

    def module_class(self, node: ast.AST) -> str | None:
        """Name of the class in whose ``forward`` (or helper) ``node`` lies, if it is a Module."""
        owner = self.class_of(node)
        if owner is None or not any(dotted(b).endswith("Module") for b in owner.bases):
            return None
        return owner.name

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """Loops around ``node`` within its function, innermost first."""
        found: list[ast.For | ast.While] = []
        for at in self.above(node):
            if isinstance(at, ast.FunctionDef):
                break
            if isinstance(at, ast.For | ast.While):
                found.append(at)
        return found

    def segment(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)]

    # ---- positions

    def start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        encoded = self._lines[line - 1].encode()[:column]
        return self._line_starts[line - 1] + len(encoded.decode())

    def indent(self, statement: ast.stmt) -> str:
        line = self._lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    # ---- edits

    def replace(self, node: ast.AST, new: str, *, blamed: bool = True) -> Edit:
        return Edit(self.start(node), self.end(node), new, blamed)

    def blame(self, node: ast.AST) -> Edit:
        """No change; the fault may be found there."""
        return Edit(self.start(node), self.end(node), self.segment(node), True)

    def before(self, statement: ast.stmt, lines: str, *, blamed: bool = True) -> Edit:
        """``lines`` (unindented) as statements of their own in front of ``statement``."""
        at = self._line_starts[_first_line(statement) - 1]
        return Edit(at, at, _indented(lines, self.indent(statement)), blamed)

    def after(self, statement: ast.stmt, lines: str, *, blamed: bool = True) -> Edit:
        at = self._line_starts[statement.end_lineno or statement.lineno]
        return Edit(at, at, _indented(lines, self.indent(statement)), blamed)

    def delete(self, statement: ast.stmt) -> Edit:
        """The statement with its lines; ``pass`` where a block would be empty."""
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        start, end = self._line_starts[first - 1], self._line_starts[last]
        for name in ("body", "orelse"):
            if getattr(self.parent(statement), name, None) == [statement]:
                return Edit(start, end, self.indent(statement) + "pass\n")
        return Edit(start, end, "")

    def top(self, lines: str) -> Edit:
        """``lines`` behind the last import at the top level."""
        last = [n for n in self.tree.body if isinstance(n, ast.Import | ast.ImportFrom)][-1]
        at = self._line_starts[last.end_lineno or last.lineno]
        return Edit(at, at, "\n\n" + lines.strip("\n") + "\n")

    def apply(self, edits: Sequence[Edit]) -> tuple[str, tuple[int, ...]]:
        """The new text, and the line numbers of what is blamed in it."""
        out: list[str] = []
        spans: list[tuple[int, int]] = []
        done = length = 0
        for edit in sorted(edits, key=lambda e: (e.start, e.end)):
            if edit.start < done:
                raise ValueError("edits overlap")
            out += [self.text[done : edit.start], edit.new]
            length += edit.start - done
            if edit.blamed and edit.new.strip():
                begin = length + len(edit.new) - len(edit.new.lstrip())
                spans.append((begin, length + len(edit.new.rstrip())))
            length += len(edit.new)
            done = edit.end
        text = "".join([*out, self.text[done:]])
        ast.parse(text)
        lines = {
            n
            for begin, end in spans
            for n in range(text.count("\n", 0, begin) + 1, text.count("\n", 0, end) + 2)
        }
        return text, tuple(sorted(lines))


def dotted(node: ast.AST | None) -> str:
    """ "self.fc.weight" of such an expression; inner calls and subscripts show as "()" and "[]"."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    return "?"


def number(node: ast.AST | None) -> float | None:
    """The value of a literal number, also with a sign or as a power; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return None if isinstance(node.value, bool) else float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        left, right = number(node.left), number(node.right)
        return None if left is None or right is None else left**right
    return None


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((k.value for k in call.keywords if k.arg == name), None)


def _is_named(full: str, names: Sequence[str]) -> bool:
    return any(full == n or full.endswith(n if n.startswith(".") else "." + n) for n in names)


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _indented(lines: str, indent: str) -> str:
    return "".join(
        f"{indent}{line}\n" if line.strip() else "\n" for line in lines.strip("\n").splitlines()
    )
