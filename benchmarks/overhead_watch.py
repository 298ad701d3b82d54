"""The contestants of `ampscope.watch`: its default schedule, everything, and asleep."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from overhead_contestants import Contestant, Session

import ampscope
from ampscope.watcher.schedule import FREE_S

DEFAULT, TENTH, EVERYTHING, ASLEEP = (
    "watch, default schedule",
    "watch, histograms at every tenth step",
    "watch, everything at every step",
    "watch, schedule asleep",
)
GOALS = {
    "cpu": {DEFAULT: 1.03, EVERYTHING: 1.15, ASLEEP: 1.01},
    "cuda": {DEFAULT: 1.01, EVERYTHING: 1.10, ASLEEP: 1.01},
}


def watch_contestants(session: Session, *, taps: bool = False) -> dict[str, Contestant]:
    """A turn is ten steps. Histograms at every tenth step are the first minutes of the default
    schedule; the default is measured as it is later, when the seconds that it gives away are used.
    Every tenth recorded step records the weights as well. ``taps``: inside compiled code, too."""
    return {
        DEFAULT: _watched(session, every=None, steps=10, taps=taps),
        TENTH: _watched(session, every=10, steps=10, taps=taps),
        EVERYTHING: _watched(session, every=1, steps=1, taps=taps),
        ASLEEP: _watched(session, every=0, steps=10, taps=taps),
    }


def _watched(session: Session, every: int | None, steps: int, *, taps: bool) -> Contestant:
    training, turns = session.training, itertools.count()
    store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
    run = ampscope.watch(training.model, training.optimizer, every=every, store=store, taps=taps)
    run._session.detach()
    run._session.schedule.took(FREE_S, 0.0)

    @contextlib.contextmanager
    def attached() -> Iterator[None]:
        # Goes on where the turn before ended: the schedule counts steps.
        run._session.attach(next(turns) * steps)
        try:
            yield
        finally:
            run._session.detach()

    return Contestant(lambda _: session.step(), attached, steps)
