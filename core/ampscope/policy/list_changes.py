"""Changes of autocast's op lists in words, without torch: ``op_lists:softmax=half,mm=fp32``.

>>> dict(parse("softmax=half,mm=fp32"))
{'softmax': 'half', 'mm': 'fp32'}
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ampscope.errors import BadInput

WORD = "op_lists"  # the control that carries changes
LISTS = ("half", "fp32", "widest", "as it comes")
_OP = re.compile(r"[A-Za-z_]\w*")
_SPELLED = {"as_it_comes": "as it comes"}


def parse(text: str) -> Mapping[str, str]:
    """Op -> list. Raises BadInput for a list that there is not, a name that is none, and an op
    that is named twice."""
    changes: dict[str, str] = {}
    for part in text.split(","):
        op, equals, name = part.strip().partition("=")
        name = _SPELLED.get(name, name)
        if not equals or not _OP.fullmatch(op) or name not in LISTS:
            raise BadInput(
                f"{part.strip()!r} changes no list. Write OP=LIST, for example softmax=half; lists "
                "are half, fp32, widest and as_it_comes."
            )
        if op in changes:
            raise BadInput(f"{op} is put on two lists. Name each op once.")
        changes[op] = name
    return changes


def control(changes: Mapping[str, str]) -> str:
    """The control word for a run: ``op_lists:softmax=half``."""
    parts = (f"{op}={name.replace(' ', '_')}" for op, name in changes.items())
    return f"{WORD}:{','.join(parts)}"


def changes_of(control_words: str) -> Mapping[str, str]:
    """The changes in a run's control; none for a run without."""
    for word in control_words.split(";"):
        name, _, value = word.partition(":")
        if name == WORD:
            return parse(value)
    return {}
