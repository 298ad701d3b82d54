"""Instrument: the ordered log of scaler, clip, backward, zero_grad, autocast and checkpoint calls.

Public methods are wrapped and put back on exit. A call inside another watched call is marked
nested: the ``unscale_`` that ``scaler.step`` makes by itself is not the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ampscope.capture.script.attempts import Attempts
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.checkpoint_calls import CheckpointCalls
from ampscope.capture.script.gradient_calls import GradientCalls
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.patches import Patches
from ampscope.capture.script.region_calls import RegionCalls
from ampscope.capture.script.scaler_calls import ScalerCalls
from ampscope.observations import Call


class CallLog:
    """Wraps torch's methods while entered; the log is :attr:`calls`."""

    def __init__(
        self,
        watch: OpWatch,
        attempts: Attempts,
        on_raised: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._log = Calls(watch.lines, lambda: attempts.count)
        self._log.on_raised = on_raised
        self._scalers = ScalerCalls(self._log, attempts)
        self._wrapped = (
            self._scalers,
            GradientCalls(self._log, self._scalers, attempts, watch),
            RegionCalls(self._log, watch),
            CheckpointCalls(self._log),
        )
        self._patches = Patches()
        attempts.scale_of = self._scalers.scale_of
        attempts.on_optimizer = watch.set_in_optimizer
        attempts.on_direct_step = lambda name, lr: self._log.add("optimizer_step", subject=name)

    @property
    def calls(self) -> list[Call]:
        """All calls so far, in order."""
        return self._log.records

    @property
    def scalers(self) -> list[Any]:
        """Every GradScaler seen, in the order of their numbers."""
        return self._scalers.scalers

    def __enter__(self) -> CallLog:
        for group in self._wrapped:
            group.wrap(self._patches)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._patches.undo()
