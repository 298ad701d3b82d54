"""Ops that stay finite in half precision and are wrong all the same.

stall   a sum equals its first term although the second is not zero
drift   the rounding errors of a running sum, added up
coarse  a result far from the fp32 result of the same inputs
"""

from __future__ import annotations

from torch import Tensor

from ampscope.capture.script import op_facts
from ampscope.capture.script.bad_ops import BadOps
from ampscope.capture.script.op_call import OpCall
from ampscope.capture.script.op_marks import adds_to_what_lives_on
from ampscope.capture.script.running_sums import IN_PLACE, RunningSums
from ampscope.capture.script.source_lines import SourceLines
from ampscope.observations import COARSE_ERROR

DRIFTING = frozenset({*IN_PLACE, "add", "sub"})


class CoarseOps:
    """Looks at one finite half-precision result after the other."""

    def __init__(self, bad: BadOps, lines: SourceLines) -> None:
        self._bad = bad
        self._lines = lines
        self._sums = RunningSums()

    def note(self, call: OpCall, out: Tensor, autocast: str, *, in_optimizer: bool) -> None:
        """``in_optimizer``: the op belongs to an optimizer's own step, whose sums are its own."""
        if not in_optimizer:
            self._note_sum(call, out, autocast)
        if op_facts.is_accumulation(call.func):
            error = op_facts.fp32_error(call.func, call.args, call.kwargs, out)
            if error is not None and error > COARSE_ERROR:
                self._bad.remember("coarse", call, call.tensors, out, autocast, error)

    def _note_sum(self, call: OpCall, out: Tensor, autocast: str) -> None:
        stalled = op_facts.stalled_share(call.func, call.args, out, call.before)
        if stalled is not None and adds_to_what_lives_on(call.name, call.args):
            self._bad.remember("stall", call, call.tensors, out, autocast, stalled)
        first = call.before if call.before is not None else (call.args[0] if call.args else None)
        if call.node is not None or not isinstance(first, Tensor) or call.name not in DRIFTING:
            return
        if adds_to_what_lives_on(call.name, call.args):
            line = self._lines.where()
            drift = self._sums.drift(line, call.func, call.args, call.kwargs, first, out)
            if drift is not None and drift > COARSE_ERROR:
                self._bad.remember("drift", call, call.tensors, out, autocast, drift)
