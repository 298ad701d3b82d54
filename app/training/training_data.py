"""What the Training page reads of one run."""

from __future__ import annotations

from ampscope.analysis.training import Training, training_of
from ampscope.records import Event, Role, RunInfo, StepRecord, StepTotals
from app import states, store

MOST_POINTS, FEWEST_POINTS = 1000, 100  # of a run's curve; of each of very many ranks


def read(run: RunInfo, ranks: int = 1) -> Training:
    """In a time that does not depend on how long the run is."""
    points = max(FEWEST_POINTS, MOST_POINTS // ranks)
    steps, totals, events = list[StepRecord](), StepTotals(), list[Event]()
    with states.part():  # each says for itself that it is damaged
        steps = store.steps(run, points=points)
    with states.part():
        totals = store.totals(run)
    with states.part():
        events = store.events(run)
    return training_of(run, steps, totals, events)


def spans(run: RunInfo) -> list[tuple[int, int]]:
    """First and last step of the frames, of the role that has most."""
    return max((store.frame_spans(run, role) for role in Role), key=len)
