"""Texts from runs as plain text that cannot mislead: what is invisible or turns the line round is
spelled out, and what is far too long is cut in the middle.

    visible("a\\x1b[31mb")   ->  'a\\\\x1b[31mb'
    visible("\\u202egpj.x")  ->  '\\\\u202egpj.x'
"""

from __future__ import annotations

import unicodedata

TEXT_LENGTH = 4_000  # of a paragraph; a reason of the rules has at most about 1,000
NAME_LENGTH = 300  # in tables and charts; module paths of real models have about 100
CODE_LENGTH = 40_000  # a traceback; Python's own end after 1,000 frames
_KEPT = {"\n", "\t"}
# Control, format (bidirectional marks, joiners, BOM), surrogate, private use, line and paragraph
# separators, unassigned: unicode.org/reports/tr44, General_Category.
_SPELLED = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp", "Cn"}


def visible(text: str, length: int = TEXT_LENGTH) -> str:
    """``text`` with every such character spelled as Python would, cut to about ``length``."""
    return "".join(map(_spelled, shortened(text, length)))


def line(text: str, length: int = NAME_LENGTH) -> str:
    """The same in one line."""
    return visible(" ".join(text.split()), length)


def shortened(text: str, length: int) -> str:
    """Cut in the middle, saying how much is left out."""
    if len(text) <= length:
        return text
    left, right = length * 2 // 3, length // 3
    return f"{text[:left]} … {len(text) - left - right:,} characters … {text[-right:]}"


def _spelled(char: str) -> str:
    if char in _KEPT or unicodedata.category(char) not in _SPELLED:
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
