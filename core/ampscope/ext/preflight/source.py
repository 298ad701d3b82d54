"""A Python file as preflight reads it: text, syntax tree, names, suppressing comments.

Nothing is imported or run. A file that cannot be read as Python raises
:class:`~ampscope.errors.BadInput` with one sentence that says why.
"""

from __future__ import annotations

import ast
import contextlib
import io
import math
import re
import stat
import threading
import tokenize
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from ampscope.errors import BadInput
from ampscope.files import LARGEST_SOURCE

_IGNORE = re.compile(r"#\s*ampscope:\s*ignore(?:\[([^\]]*)\])?")
_OTHER_FRAMEWORKS = {"paddle", "mindspore", "tensorflow", "keras", "jax", "oneflow", "jittor"}


# Checks look at names and nodes again and again, and a file can be written so that they do so
# without an end. Of 794 files of libraries and the zoo, accelerate's accelerator.py needs the most:
# 290,000 looks, 18 for each node.
LOOKS = 250_000
LOOKS_PER_NODE = 16
MOST_LOOKS = 2_000_000


class TooMuchWorkError(Exception):
    """A file at which more would have to be looked than its size allows."""


class _Left(threading.local):
    looks = math.inf


_left = _Left()


@contextlib.contextmanager
def bounded_looks(source: SourceFile) -> Iterator[None]:
    """Within it, :class:`TooMuchWorkError` is raised where the looks that the size of ``source``
    allows are used up."""
    before = _left.looks
    _left.looks = min(LOOKS + LOOKS_PER_NODE * len(source.nodes), MOST_LOOKS)
    try:
        yield
    finally:
        _left.looks = before


def look(times: int = 1) -> None:
    """Count looks at the source."""
    _left.looks -= times
    if _left.looks < 0:
        raise TooMuchWorkError


class SourceFile:
    """One file. ``path`` is shown in messages; offsets are characters of ``text``."""

    def __init__(self, path: str, text: str, newline: str = "\n", mark: str = "") -> None:
        self.path = path
        self.text = text
        self.is_cut = False  # whether the checks ended before they were done
        self.newline, self.mark = newline, mark  # of the file, to be written back as they were
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes are not this check's subject
                self.tree = ast.parse(text, path)
        except SyntaxError as error:
            at = f" at line {error.lineno}" if error.lineno else ""
            if (error.text or "").lstrip()[:1] in {"%", "!"}:
                at += ", a command of IPython: turn it into a comment"
            raise BadInput(f"{path} is not Python: {error.msg}{at}.") from error
        except (ValueError, RecursionError, MemoryError) as error:
            reason = str(error) or "it is nested too deeply"
            raise BadInput(f"{path} is not Python that can be parsed: {reason}.") from error
        self._parents: dict[ast.AST, ast.AST] = {}
        self.nodes: list[ast.AST] = []
        waiting: list[ast.AST] = [self.tree]
        while waiting:
            node = waiting.pop()
            self.nodes.append(node)
            found = list(ast.iter_child_nodes(node))
            node.children = found  # type: ignore[attr-defined]  # walked often: see children()
            for child in found:
                self._parents[child] = node
            waiting += found

    # ---- names

    @cached_property
    def imports(self) -> dict[str, str]:
        """Local name to the dotted name that it stands for: "F" to "torch.nn.functional"."""
        found: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first = alias.name.split(".")[0]
                    found[alias.asname or first] = alias.name if alias.asname else first
            elif isinstance(node, ast.ImportFrom):
                prefix = "." * node.level + (node.module or "")
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{prefix}.{alias.name}"
        return found

    @cached_property
    def uses_torch(self) -> bool:
        """Whether the file imports torch, and no other framework that has a GradScaler."""
        roots = {name.split(".")[0] for name in self.imports.values()}
        return "torch" in roots and not roots & _OTHER_FRAMEWORKS

    def full_name(self, node: ast.AST) -> str:
        """The dotted name of an expression with imports resolved; "" where it has none."""
        name = dotted(node)
        if not name:
            return ""
        first, dot, rest = name.partition(".")
        return self.imports.get(first, first) + dot + rest

    # ---- tree

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(node)

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around ``node``, nearest first."""
        while (up := self._parents.get(node)) is not None:
            look()
            yield up
            node = up

    def statement(self, node: ast.AST) -> ast.stmt:
        """The innermost statement that holds ``node``."""
        for at in (node, *self.above(node)):
            if isinstance(at, ast.stmt):
                return at
        raise ValueError("not within a statement")

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements that ``statement`` stands among, itself included."""
        up = self.parent(statement)
        for name in ("body", "orelse", "finalbody"):
            found = getattr(up, name, None)
            if isinstance(found, list) and statement in found:
                return found
        return [statement]

    def function(self, node: ast.AST) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The innermost function around ``node``."""
        for at in self.above(node):
            if isinstance(at, ast.FunctionDef | ast.AsyncFunctionDef):
                return at
        return None

    def owner(self, node: ast.AST) -> ast.ClassDef | None:
        """The innermost class around ``node``."""
        for at in self.above(node):
            if isinstance(at, ast.ClassDef):
                return at
        return None

    # ---- text

    @cached_property
    def _lines(self) -> list[str]:
        return [line + "\n" for line in self.text.split("\n")]  # as the parser counts lines

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        return starts

    def offset(self, line: int, column: int) -> int:
        """Characters before the place that the syntax tree names by line and UTF-8 column."""
        encoded = self._lines[line - 1].encode()[:column]
        return self._starts[line - 1] + len(encoded.decode(errors="ignore"))

    def start(self, node: ast.AST) -> int:
        return self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def column(self, line: int, byte: int) -> int:
        """The column in characters, from 1, of a place that the syntax tree names."""
        return self.offset(line, byte) - self.line_start(line) + 1

    def segment(self, node: ast.AST) -> str:
        return self.text[self.start(node) : self.end(node)]

    def line_start(self, line: int) -> int:
        return self._starts[line - 1]

    def indent(self, statement: ast.stmt) -> str:
        line = self._lines[statement.lineno - 1]
        return line[: len(line) - len(line.lstrip())]

    def alone_on_its_lines(self, statement: ast.stmt) -> bool:
        """Whether no other statement shares a line with it."""
        before = self.text[self.line_start(statement.lineno) : self.start(statement)]
        end = self.end(statement)
        after = self.text[end : self._starts[(statement.end_lineno or statement.lineno)]]
        return not before.strip() and (not after.strip() or after.strip().startswith("#"))

    @cached_property
    def ignored(self) -> dict[int, frozenset[str]]:
        """Codes that a comment suppresses, by line; an empty set stands for every code."""
        found: dict[int, frozenset[str]] = {}
        if "ampscope:" not in self.text:
            return found
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT and (seen := _IGNORE.search(token.string)):
                codes = (c.strip().upper() for c in (seen[1] or "").split(","))
                found[token.start[0]] = frozenset(filter(None, codes))
        return found

    def is_ignored(self, code: str, first: int, last: int) -> bool:
        """Whether a comment on one of these lines suppresses ``code``."""
        return any(
            line in self.ignored and (not self.ignored[line] or code in self.ignored[line])
            for line in range(first, last + 1)
        )


def read_source(path: Path, shown: str = "") -> SourceFile:
    """The file at ``path``. Raises BadInput for what cannot be read, is binary, too large or not
    Python."""
    shown = shown or str(path)
    if path.suffix == ".ipynb":  # JSON without null, true and false parses as Python
        raise BadInput(
            f"{shown} is a notebook: export it first, as with jupyter nbconvert --to script."
        )
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe would be waited for, a device never ends
            raise BadInput(f"{shown} is not a file.")
        size = about.st_size
        if size > LARGEST_SOURCE:
            raise BadInput(
                f"{shown} is too large for a script: {size:,} bytes; the limit is "
                f"{LARGEST_SOURCE:,}."
            )
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(f"There is no file {shown}.") from error
    except OSError as error:
        raise BadInput(f"Cannot read {shown}: {error.strerror}.") from error
    if b"\0" in data:
        raise BadInput(f"{shown} is not Python: it is a binary file.")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise BadInput(f"{shown} is not Python: its text cannot be decoded.") from error
    mark = "\ufeff" if data.startswith(b"\xef\xbb\xbf") else ""
    newline = "\r\n" if "\r\n" in text else "\n"
    text = text.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return SourceFile(shown, text, newline, mark)


def children(node: ast.AST) -> list[ast.AST]:
    """The nodes directly within a node of a :class:`SourceFile`."""
    found: list[ast.AST] = node.children  # type: ignore[attr-defined]
    return found


def dotted(node: ast.AST | None) -> str:
    """ "self.optims['g'].x" of such an expression; "" for anything else."""
    look()
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        base = dotted(node.value)
        return f"{base}[{node.slice.value!r}]" if base else ""
    return ""


def method_of(node: ast.AST) -> str:
    """ "step" of ``a.b.step(x)``; "" for anything else."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return node.func.attr if called else ""  # type: ignore[attr-defined]


def receiver_of(node: ast.AST) -> str:
    """ "a.b" of ``a.b.step(x)``; "" for anything else."""
    return dotted(node.func.value) if method_of(node) else ""  # type: ignore[attr-defined]


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The argument ``name=`` of a call."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument given by position or by name."""
    if len(call.args) > position and not any(isinstance(a, ast.Starred) for a in call.args):
        return call.args[position]
    return keyword(call, name)


def number(node: ast.AST | None) -> float | None:
    """The value of a literal number, also signed or as a power or product; None for others."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return None if isinstance(node.value, bool) else float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.BinOp):
        left, right = number(node.left), number(node.right)
        if left is None or right is None:
            return None
        try:
            if isinstance(node.op, ast.Pow):
                return float(left**right)
            if isinstance(node.op, ast.Mult):
                return left * right
        except (OverflowError, ZeroDivisionError):
            return None
    if isinstance(node, ast.Call) and dotted(node.func) == "float" and len(node.args) == 1:
        text = node.args[0]
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            try:
                return float(text.value)
            except ValueError:
                return None
    return None
