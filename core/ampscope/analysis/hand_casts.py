"""Casts to half precision that a script writes itself.

Autocast owns none of them: it neither made them nor, switched to bf16, changes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampscope.analysis.line_view import CASTS, place
from ampscope.analysis.run_view import RunView

MOST_CASTS = 8  # lines that are changed together
_HALF = r"torch\.(?:float16|half|bfloat16)"
_CAST = re.compile(
    rf"""\.(?:half|bfloat16)\(\)|\.(?:to|type)\(\s*(?:dtype\s*=\s*)?{_HALF}\s*\)"""
    r"""|\.type\(\s*["']torch\.(?:cuda\.)?(?:Half|BFloat16)Tensor["']\s*\)"""
)
_CAST_BESIDE = re.compile(rf"(\.to\([^()]*?),\s*(?:dtype\s*=\s*)?{_HALF}")  # .to("cuda", HALF)


@dataclass(frozen=True, slots=True)
class HandCast:
    """A line that casts to ``dtype`` in so many words; ``without``: its text without the cast."""

    line: str
    dtype: str
    without: str


def without_casts(code: str) -> str:
    """A line of a script without the casts to half precision that it spells out."""
    return _CAST_BESIDE.sub(r"\1", _CAST.sub("", code))


def hand_casts(run: RunView) -> list[HandCast]:
    """The lines whose casts were seen to make half precision of wider numbers, in the order in
    which they ran. None where autocast makes some as well, or where there are more than
    :data:`MOST_CASTS`."""
    if run.outcome.uses_autocast:
        return []
    texts = {source.file: source.lines for source in run.sources}
    found: dict[str, HandCast] = {}
    for use in run.line_uses:
        if use.op not in CASTS or use.backward or use.makes not in ("fp16", "bf16"):
            continue
        file, number = place(use.line)
        text = texts.get(file, ())[number - 1 : number]
        if use.takes[-1:] in (("fp32",), ("fp64",)) and text and without_casts(text[0]) != text[0]:
            cast = HandCast(use.line, use.makes, without_casts(text[0]).strip())
            found.setdefault(use.line, cast)
    return list(found.values()) if len(found) <= MOST_CASTS else []
