"""Which failing steps are worth a capsule, and where the files go.

GradScaler's calibration skips steps as a matter of course: finite loss, a few skips, a lower scale,
and on; many at the start, from 65536 down to 64 at most. A capsule is kept of what is more: a loss
that is not finite, bad gradients without a scaler to catch them, or many bad steps in a row. One of
each streak, and one more where the first has no forward; the first ones stay, and the newest takes
the last place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ampscope.records import Event
from ampscope.watcher.alarms import CALIBRATED_BELOW
from ampscope.watcher.capsule import About, Capsule, CapsuleLimits, collected, save
from ampscope.watcher.flight import Forward, StepSummary
from ampscope.watcher.models import WatchedModels

if TYPE_CHECKING:
    from ampscope.watcher.recorder import Recorder


MAX_REASON = 300
STREAK = 3  # later on, where a scale that was right is off by a factor of 2 at most


class CapsuleStore:
    """Keeps capsules of one run beside its store."""

    def __init__(
        self,
        models: WatchedModels,
        past: Iterable[Callable[[], StepSummary]],
        store: Path,
        limits: CapsuleLimits,
    ) -> None:
        self.paths: list[Path] = []
        self.last: Capsule | None = None  # in the host's memory, for a replay at once
        self._models = models
        self._past = past
        self._folder = store.with_name(f"{store.name}.capsules").absolute()
        self._limits = limits
        self._streak = 0
        self._was_good = False  # any step so far
        self._has_kept = self._has_bare = False  # of this streak; one without a forward

    def good(self) -> None:
        """A step went well: the streak is over."""
        self._streak, self._was_good = 0, True
        self._has_kept = self._has_bare = False

    def is_fault(self, scale: float | None, *, loss_is_bad: bool) -> bool:
        """A step went bad: whether it is more than a calibration of the loss scale."""
        self._streak += 1
        if loss_is_bad or scale is None:
            return True
        is_searching = not self._was_good and scale > CALIBRATED_BELOW
        return self._streak >= STREAK and not is_searching

    @property
    def has_room(self) -> bool:
        """Whether this streak has no capsule yet that can be run again, and any are wanted."""
        return bool(self._limits.count) and not self._has_kept

    def keep(
        self, about: About, forwards: Sequence[Forward], recorder: Recorder, *, without_weights: str
    ) -> Event:
        """Copy what is needed now; the recorder's thread writes the file, and an event of its own
        says so if that fails. The event says what is in it. ``without_weights`` is why the weights
        are not those of the step."""
        self._has_kept = True
        parameters = {p.name: p.tensor for p in self._models.parameters}
        past = [make() for make in self._past]
        self.last = capsule = collected(
            about, forwards, parameters, past, self._limits, without_weights=without_weights
        )
        self._has_kept = bool(capsule.forwards) or self._has_bare
        self._has_bare = not capsule.forwards
        name = f"{about.run}-rank{about.rank}-step{about.step}.safetensors"
        path = self._folder / name
        old = self.paths.pop() if len(self.paths) >= self._limits.count else None
        self.paths.append(path)

        def write() -> None:
            try:
                save(capsule, path)
                if old is not None:
                    old.unlink(missing_ok=True)
            except Exception as error:  # a full disk, a dtype that the format does not know
                self.paths = [kept for kept in self.paths if kept != path]
                reason = f"The capsule of step {about.step} could not be written: {error}"
                recorder.event(Event(about.step, "note", "no capsule", reason[:MAX_REASON]))

        recorder.later(write)
        text = f"{about.reason} Kept: {capsule.contents}."
        return Event(about.step, "capsule", name, text, path=os.fspath(path))
