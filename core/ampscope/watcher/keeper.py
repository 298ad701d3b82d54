"""Which failing steps are worth a capsule, and where the files go.

GradScaler's calibration skips steps as a matter of course: finite loss, a few skips, a lower scale,
and on; many at the start, from 65536 down to 64 at most. A capsule is kept of what is more: a loss
that is not finite, bad gradients without a scaler to catch them, or many bad steps in a row. One of
each streak; the first ones stay, and the newest takes the last place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ampscope.records import Event
from ampscope.watcher import capsule_file
from ampscope.watcher.alarms import CALIBRATED_BELOW
from ampscope.watcher.capsule import About, Capsule, CapsuleLimits, collected
from ampscope.watcher.forwards import Forward, Past
from ampscope.watcher.models import WatchedModels

FIRST_STREAK = 10  # bad steps in a row: the scale has fallen from 65536 to 64
MAX_REASON = 300
STREAK = 3  # later on, where a scale that was right is off by a factor of 2 at most


class Keeper:
    """Keeps capsules of one run beside its store."""

    def __init__(
        self, models: WatchedModels, past: Iterable[Past], store: Path, limits: CapsuleLimits
    ) -> None:
        self.paths: list[Path] = []
        self.last: Capsule | None = None  # in the host's memory, for a replay at once
        self._models = models
        self._past = past
        self._folder = store.with_name(f"{store.name}.capsules").absolute()
        self._limits = limits
        self._streak = 0
        self._was_good = False  # any step so far
        self._has_kept = False  # of this streak

    def good(self) -> None:
        """A step went well: the streak is over."""
        self._streak, self._has_kept, self._was_good = 0, False, True

    def is_fault(self, scale: float | None, *, loss_is_bad: bool) -> bool:
        """A step went bad: whether it is more than a calibration of the loss scale."""
        self._streak += 1
        if loss_is_bad or scale is None:
            return True
        is_searching = not self._was_good and scale > CALIBRATED_BELOW
        return self._streak >= STREAK and not is_searching

    @property
    def has_room(self) -> bool:
        """Whether this streak has no capsule yet and any are wanted."""
        return bool(self._limits.count) and not self._has_kept

    def keep(
        self,
        about: About,
        forwards: Sequence[Forward],
        later: Callable[[Callable[[], None]], None],
        failed: Callable[[Event], None],
        *,
        without_weights: str,
    ) -> Event:
        """Copy what is needed now; the file is written by ``later``, and ``failed`` is told when
        that cannot be. The event says what is in it. ``without_weights`` is why the weights are
        not those of the step."""
        self._has_kept = True
        parameters = {p.name: p.tensor for p in self._models.parameters}
        past = list(self._past)
        self.last = capsule = collected(
            about, forwards, parameters, past, self._limits, without_weights=without_weights
        )
        name = f"{about.run}-rank{about.rank}-step{about.step}.safetensors"
        path = self._folder / name
        old = self.paths.pop() if len(self.paths) >= self._limits.count else None
        self.paths.append(path)

        def write() -> None:
            try:
                capsule_file.save(capsule, path)
                if old is not None:
                    old.unlink(missing_ok=True)
            except Exception as error:  # a full disk, a dtype that the format does not know
                self.paths = [kept for kept in self.paths if kept != path]
                reason = f"The capsule of step {about.step} could not be written: {error}"
                failed(Event(about.step, "note", "no capsule", reason[:MAX_REASON]))

        later(write)
        text = f"{about.reason} Kept: {capsule.contents}."
        return Event(about.step, "capsule", name, text, path=os.fspath(path))
