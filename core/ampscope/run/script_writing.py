"""Keeps what a script's run has shown while it goes on: it may be killed at any instant.

Each time everything so far is written anew, over what was there, closed with an outcome "killed"
that the real one replaces. The time between two writings follows what one takes, so that a run
spends a twentieth of its time on it, however much there is to write.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ampscope.capture.script.script_histograms import Measured
from ampscope.observations import Attempt, Observation
from ampscope.records import StepRecord
from ampscope.run.script_recorder import ScriptRecorder
from ampscope.store.writer import RunWriter

WRITING_SHARE = 0.05
LONGEST_PAUSE_S = 10.0
FIRST_STEPS = 8  # each is written: most failures come early, when there is little to write


class ScriptWriting:
    """Writes a script's observations and steps to its run."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self.attempts = 0  # seen so far
        self._steps = 0  # written so far
        self._op_sets: dict[int, int] = {}  # of steps that wait to be written
        self._next = 0.0  # time at which the next writing is due

    def write_if_due(self, recorder: ScriptRecorder) -> None:
        """Write what there is, unless that was done a moment ago."""
        self.attempts = recorder.attempts.count
        started = time.monotonic()
        if started < self._next and self.attempts > FIRST_STEPS:
            return
        self.write(recorder.so_far(), recorder.histograms.take())
        took = time.monotonic() - started
        self._next = started + min(took / WRITING_SHARE, LONGEST_PAUSE_S)

    def write(
        self, observations: Sequence[Observation], measured: Measured, *, last: bool = False
    ) -> None:
        """Write all of a run's observations over those that were there, and its new steps.

        A fused optimizer tells only after its step that it left it out, so the newest step waits.
        """
        self._writer.add_observations(observations)
        self._add(measured)
        attempts = [o for o in observations if isinstance(o, Attempt)]
        settled = attempts if last else attempts[:-1]
        for record in settled[self._steps :]:
            self._writer.add_step(_step(record, self._op_sets.pop(record.attempt, None)))
        self._steps = max(self._steps, len(settled))
        self._writer.flush()

    def _add(self, measured: Measured) -> None:
        writer = self._writer
        writer.add_modules(measured.modules)
        writer.add_nonfinite(measured.nonfinite)
        for frame in measured.frames:
            writer.add_frame(frame)
        for op_set, ops in measured.ops:
            writer.add_ops(op_set, ops)
        self._op_sets.update(measured.op_sets)


def _step(record: Attempt, op_set: int | None) -> StepRecord:
    return StepRecord(
        step=record.attempt,
        loss=record.loss,
        scale=record.scale if record.scaler else None,
        skipped=record.skipped,
        grad_norm=record.grad_norm if not record.grad_nonfinite else float("nan"),
        lr=record.lr,
        moved_share=record.moved_share,
        op_set=op_set,
        ended_at=record.ended_at,
        unclipped_norm=record.unclipped_norm,
    )
