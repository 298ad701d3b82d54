"""Keeps what a run has shown while it goes on, so that a kill loses at most what came since.

All evidence is written each time, which takes longer as it grows; the pauses grow with it.
"""

from __future__ import annotations

import time

from ampscope.frameworks.recorder import Recorder
from ampscope.observations import Outcome
from ampscope.store.writer import RunWriter

WRITING_SHARE = 0.05  # of a run's time goes into writing at most, after its first steps
FIRST_STEPS = 8  # each is written: most failures come early, when there is little to write


class Writing:
    """Writes a recorder's facts; ``keeps_evidence`` says whether observations are written too."""

    def __init__(self, writer: RunWriter, recorder: Recorder, *, keeps_evidence: bool) -> None:
        self._writer = writer
        self._recorder = recorder
        self._keeps_evidence = keeps_evidence
        self._next = 0.0

    def write_if_due(self) -> None:
        """Write what there is, unless that was done a moment ago."""
        started = time.monotonic()
        if started < self._next and self._recorder.steps > FIRST_STEPS:
            return
        self.write(self._recorder.outcome("killed"))
        took = time.monotonic() - started
        self._next = started + took / WRITING_SHARE

    def write(self, outcome: Outcome) -> None:
        """Everything so far, closed with ``outcome``."""
        self._recorder.take().write(self._writer)
        if self._keeps_evidence:
            self._writer.add_observations(self._recorder.observations(outcome))
        else:
            self._recorder.forget()
        self._writer.flush()
