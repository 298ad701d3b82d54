"""Which auto_cast region is open, and in which dtype an op runs in it.

Paddle keeps the arguments of the innermost ``amp_guard`` in a module variable, on a CPU too, where
the guard itself does nothing. :func:`dtype_of_op` is GetAmpDestDtype and GetPromoteType of Paddle
3.x (paddle/fluid/imperative/amp_utils.h), less what only a GPU build knows: ops that have no half
kernel there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import paddle  # noqa: F401  # loads the module below

from ampscope.ext.frameworks.paddle.op_names import FIRST_INPUT_ONLY

# `paddle.amp.auto_cast` is the function of that name, which hides its module.
AUTO_CAST: Any = sys.modules["paddle.amp.auto_cast"]
HALF = {"float16": "fp16", "bfloat16": "bf16"}
DTYPE_NAMES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class AutoCastRegion:
    """An enabled auto_cast region."""

    half: str  # fp16 | bf16
    level: str  # OD | O1 | O2
    white: frozenset[str]
    black: frozenset[str]
    promotes: bool = True

    def word(self, op: str) -> str:
        """Which of Paddle's lists holds the op."""
        return "white" if op in self.white else "black" if op in self.black else "grey"


class OpenRegion:
    """Follows Paddle's own variable; ``half`` replaces the script's dtype, "fp32" switches off."""

    def __init__(self, half: str = "") -> None:
        self._half = half
        self._state: Any = None
        self._region: AutoCastRegion | None = None

    def now(self) -> AutoCastRegion | None:
        """The open region, or None."""
        state = AUTO_CAST._g_amp_state_
        if state is not self._state:
            self._state = state
            self._region = None if state is None else self._read(state)
        return self._region

    def _read(self, state: dict[str, Any]) -> AutoCastRegion | None:
        level = str(state["level"]).upper()
        if not state["enable"] or level == "O0" or self._half == "fp32":
            return None
        dtype = state["dtype"]
        name = str(getattr(dtype, "name", dtype)).lower()
        half = self._half or HALF[name]
        lists = AUTO_CAST._update_list(
            state["custom_white_list"], state["custom_black_list"], level, DTYPE_NAMES[half]
        )
        white, black = (frozenset(names) for names in lists)
        return AutoCastRegion(
            half, level, white, black, bool(state["use_promote"]) or level != "O2"
        )


def dtype_of_op(region: AutoCastRegion | None, op: str, dtypes: Sequence[str]) -> str:
    """ "fp16", "bf16" or "fp32": what ``op`` computes in, given its floating-point inputs' dtypes.

    Outside a region an op runs in its inputs' own dtype; of different ones the wider is taken.
    """
    if not dtypes:
        return "fp32"
    seen = dtypes[:1] if op in FIRST_INPUT_ONLY else dtypes
    if region is None:
        return dtypes[0] if all(d == dtypes[0] for d in seen) else "fp32"
    word = region.word(op)
    if not region.promotes:
        return "fp32" if word == "black" else region.half
    if word != "grey":
        return region.half if word == "white" else "fp32"
    if region.level == "OD" or "fp32" in seen:
        return "fp32"
    return region.half
