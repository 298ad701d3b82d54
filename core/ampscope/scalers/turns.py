"""Which attempted steps share one update of which scaler.

A GAN steps two optimizers and updates once; a training may have a scaler for each loss, or make a
new one when it resumes. The log of calls tells: ``scaler.step`` joins the turn of its scaler, and
``scaler.update`` ends it.

    scaler0.step(d)  scaler0.step(g)  scaler0.update()   ->   Turn("scaler0", (0, 1))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampscope.observations import Call
from ampscope.records import StepRecord

ONLY = "scaler0"


@dataclass(frozen=True, slots=True)
class Turn:
    """Places of the attempts that one update of ``scaler`` looks back on."""

    scaler: str
    places: tuple[int, ...]


def turns_of(calls: Iterable[Call], steps: Sequence[StepRecord]) -> tuple[Turn, ...]:
    """In the order of the updates; attempts without a scaler are in none. Without a log of updates
    every step is a turn of the one scaler there is."""
    place_of = {step.step: place for place, step in enumerate(steps)}
    open_turns: dict[str, list[int]] = {}
    turns: list[Turn] = []
    logged = False
    for call in calls:
        if call.name == "scaler_step" and call.attempt in place_of:
            open_turns.setdefault(call.subject, []).append(place_of[call.attempt])
        elif call.name == "update":
            logged = True
            turns.append(Turn(call.subject, tuple(open_turns.pop(call.subject, ()))))
    if not logged:
        return tuple(Turn(ONLY, (place,)) for place, s in enumerate(steps) if s.scale is not None)
    turns += [Turn(name, tuple(places)) for name, places in open_turns.items()]
    return tuple(turn for turn in turns if turn.places)


def first_scales(turns: Iterable[Turn], steps: Sequence[StepRecord]) -> Mapping[str, float]:
    """The scale at which each scaler was first seen."""
    found: dict[str, float] = {}
    for turn in turns:
        scale = steps[turn.places[0]].scale
        if scale is not None:
            found.setdefault(turn.scaler, scale)
    return found
