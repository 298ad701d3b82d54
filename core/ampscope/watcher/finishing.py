"""Finishes a step: judges it, records it, and says which alarms begin with it."""

from __future__ import annotations

from collections import deque

from ampscope.records import Event, Role
from ampscope.watcher import announcements
from ampscope.watcher.alarms import Alarms
from ampscope.watcher.bad_steps import BadSteps
from ampscope.watcher.forwards import Forward, Past
from ampscope.watcher.recorder import Recorder
from ampscope.watcher.schedule import Schedule
from ampscope.watcher.step_end import Ended


class Finishing:
    """One step is finished after the other; at most one waits for its numbers."""

    def __init__(
        self, schedule: Schedule, alarms: Alarms, bad: BadSteps, recorder: Recorder,
        past: deque[Past], parameters: int,
    ) -> None:  # fmt: skip
        self._schedule = schedule
        self._alarms = alarms
        self._bad = bad
        self._recorder = recorder
        self._past = past
        self._parameters = parameters
        self._late: tuple[Ended, list[Forward]] | None = None

    def wait_for(self, ended: Ended, forwards: list[Forward]) -> None:
        """Its numbers are on their way from the device; ``forwards`` are what it ran."""
        self._late = (ended, forwards)

    def late(self, step: int) -> list[Event]:
        """Finish the step that waits, whose numbers have had a whole step's time to arrive;
        ``step`` is the present one."""
        if self._late is None:
            return []
        (ended, forwards), self._late = self._late, None
        read = ended.reading
        read.norms = read.readout.norms()
        if read.is_bad:
            read.events += self._bad.examine(ended.step, read, forwards, is_late=True)
        return self.finish(ended, step)

    def finish(self, ended: Ended, step: int) -> list[Event]:
        """Record the step; returns its alarms. What tightens now, tightens after ``step``."""
        record, events = ended.record(), ended.reading.events
        if not ended.is_bad:
            self._bad.good()
        if self._schedule.saw(step, bad=ended.is_bad):
            events.append(announcements.tightened(record.step))
        alarms = self._alarms.check(record, ended.frames.get(Role.WEIGHT_GRAD))
        events += alarms
        self._recorder.step(record, ended)
        self._past.append(ended.past(self._parameters))
        return alarms
