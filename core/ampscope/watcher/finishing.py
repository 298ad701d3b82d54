"""Finishes a step: judges it, records it, and says which alarms begin with it."""

from __future__ import annotations

import dataclasses
import shlex
from collections import deque

from ampscope.exponents import NAN, NEG_INF, POS_INF
from ampscope.records import Event, Role
from ampscope.watcher import announcements
from ampscope.watcher.alarms import Alarms, Signs
from ampscope.watcher.bad_steps import BadSteps
from ampscope.watcher.forwards import Forward, Past
from ampscope.watcher.keeper import Keeper
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.numbers import first_nonfinite
from ampscope.watcher.recorder import Recorder
from ampscope.watcher.schedule import Schedule
from ampscope.watcher.step_end import Ended


class Finishing:
    """One step is finished after the other; at most one waits for its numbers."""

    def __init__(
        self, schedule: Schedule, alarms: Alarms, bad: BadSteps, recorder: Recorder,
        past: deque[Past], models: WatchedModels, rank: int, keeper: Keeper,
    ) -> None:  # fmt: skip
        self._schedule = schedule
        self._alarms = alarms
        self._bad = bad
        self._recorder = recorder
        self._past = past
        self._models = models
        self._rank = rank
        self._keeper = keeper
        self._parameters = len(models.parameters)
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
        gradients = ended.frames.get(Role.WEIGHT_GRAD)
        alarms = self._alarms.check(record, gradients, self._signs(ended))
        alarms = [self._placed(alarm, ended) for alarm in alarms]
        events += alarms
        self._recorder.step(record, ended)
        self._past.append(ended.past(self._parameters))
        return alarms

    def _signs(self, ended: Ended) -> Signs:
        norms = ended.reading.norms
        return Signs(
            optimizer=ended.optimizer,
            has_gradients=norms is not None and bool(norms.positions),
            bad_gradient=self._bad_gradient(ended),
            bad_weight=self._bad_weight(ended),
            stalled=ended.stalled,
        )

    def _bad_weight(self, ended: Ended) -> str:
        """A weight that is not finite now. Weights are read at a step that went bad, until one was
        told of (a bad weight makes GradScaler leave out every step); where the step's histograms
        say so; and where the look at some of them did."""
        counted = ended.frames.get(Role.WEIGHT)
        seen = counted is not None and bool(counted.rows[:, [NAN, POS_INF, NEG_INF]].any())
        if not (seen or ended.reading.is_bad or ended.has_bad_weight) or self._alarms.rings(
            "nonfinite_weight"
        ):
            return ""
        return first_nonfinite({p.name: p.tensor for p in self._models.parameters})

    def _placed(self, alarm: Event, ended: Ended) -> Event:
        """With where it happened, and what to run."""
        parts = [f"Rank {self._rank}, step {alarm.step}."]
        if ended.is_bad:
            if bad := self._bad_gradient(ended):
                module = bad.rpartition(".")[0] or "the model itself"
                parts.append(f"The first bad gradient is that of {bad} (module {module}).")
            kept = [e.path for e in ended.reading.events if e.kind == "capsule"]
            kept += [str(path) for path in self._keeper.paths[-1:]]
            if kept:
                parts.append(f"Capsule: {kept[0]}.")
                if not self._models.is_sharded:  # one rank alone cannot run it again
                    parts.append(
                        f"Run: ampscope replay {shlex.quote(kept[0])} --model YOUR_FILE.py:BUILD"
                    )
        return dataclasses.replace(alarm, text=" ".join([alarm.text, *parts]))

    def _bad_gradient(self, ended: Ended) -> str:
        norms = ended.reading.norms
        if ended.nonfinite:
            return ended.nonfinite[0].parameter  # the first that backward reached
        if norms is not None and norms.suspects:
            return self._models.parameters[norms.suspects[-1]].name
        return ""
