"""The contestants of `ampscope.watch`: its default schedule, everything, and asleep."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from overhead_contestants import Contestant, Session
from sampler_cost import STARTED_S, Beside

import ampscope
from ampscope.telemetry.sampler_process import WANTED
from ampscope.watcher.schedule import FREE_S
from ampscope.watcher.session import _OPEN

DEFAULT, TENTH, EVERYTHING, ASLEEP = (
    "watch, default schedule",
    "watch, histograms at every tenth step",
    "watch, everything at every step",
    "watch, schedule asleep",
)
TELEMETRY = "telemetry alone"
GOALS = {
    "cpu": {DEFAULT: 1.03, EVERYTHING: 1.15, ASLEEP: 1.01},
    "cuda": {DEFAULT: 1.03, EVERYTHING: 1.3, ASLEEP: 1.01},
    "cuda, launches": {DEFAULT: 1.12, ASLEEP: 1.08},  # of a step that waits for its launches
}
FILLS_MS = 20.0  # a bare step on a GPU: from here on the GPU is what it waits for


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


def telemetry_contestant(session: Session) -> dict[str, Contestant]:
    """The process that reads the machine ten times a second; outside its turns it stands still. A
    turn of 50 steps is some readings long."""
    beside = Beside(Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")), session.device)
    atexit.register(beside.process.kill)  # one that stands still does not end by itself
    time.sleep(STARTED_S)
    beside.process.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def attached() -> Iterator[None]:
        beside.process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            beside.process.send_signal(signal.SIGSTOP)

    return {TELEMETRY: Contestant(lambda _: session.step(), attached, 50)}


def _watched(session: Session, every: int | None, steps: int, *, taps: bool) -> Contestant:
    training, turns = session.training, itertools.count()
    store = Path(tempfile.mkdtemp(prefix="ampscope-benchmark-")) / "runs.db"
    os.environ[WANTED] = "0"  # it would read beside the bare steps, too; TELEMETRY prices it apart
    run = ampscope.watch(training.model, training.optimizer, every=every, store=store, taps=taps)
    run._session.detach()
    _OPEN.discard(run._session)  # or else the next contestant's watch of this model would close it
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
