"""What preflight reports: one finding, and the edit of the text that repairs it."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from ampscope.causes import StableCode
from ampscope.ext.preflight.codes import CODES
from ampscope.ext.preflight.source import SourceFile


@dataclass(frozen=True, slots=True)
class Edit:
    """Replaces ``text[start:end]`` by ``new``."""

    start: int
    end: int
    new: str


@dataclass(frozen=True, slots=True)
class SourceFinding:
    """One place, with the sentence about it. Lines and columns count from 1; ``edits`` are a
    safe repair, or empty."""

    code: StableCode
    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    message: str
    edits: tuple[Edit, ...] = ()

    @classmethod
    def at(
        cls, source: SourceFile, node: ast.AST, name: str, message: str, edits: Sequence[Edit] = ()
    ) -> SourceFinding:
        """The finding of the code ``name`` (a key of ``codes.CODES``) at a node of ``source``."""
        line, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        return cls(
            CODES[name], source.path, line, source.column(line, node.col_offset),  # type: ignore[attr-defined]
            end, source.column(end, node.end_col_offset), message, tuple(edits),  # type: ignore[attr-defined]
        )  # fmt: skip
