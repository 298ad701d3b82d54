"""What a watched run says of itself: its row in the store, what it cannot see, small facts."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ampscope.records import Event, Machine, RunSpec, watched
from ampscope.run.device import describe
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.ranks import Place
from ampscope.watcher.schedule import EVERY, TIGHT_STEPS

if TYPE_CHECKING:
    from ampscope.watcher.telling import Settings


def run_of(
    models: WatchedModels, place: Place, settings: Settings, device: torch.device
) -> tuple[RunSpec, Machine]:
    """The run as the store lists it, and where it takes place."""
    every = EVERY if settings.every is None else settings.every
    spec = watched(sys.argv[0], every, settings.name)
    spec = replace(spec, group=place.group, rank=place.rank, world=place.world)
    return spec, describe(spec, device)


def notes(models: WatchedModels, place: Place) -> list[Event]:
    """What cannot be seen in this training, and why."""
    found = [
        f"{root.name} is compiled: what happens inside cannot be seen. Its parameters, their "
        "gradients, and the gradients at its output can."
        for root in models.roots
        if root.is_compiled
    ]
    if place.world > 1 and any(root.is_replicated for root in models.roots):
        found.append(
            "Every rank holds all parameters: rank 0 counts the weights and their gradients."
        )
    if models.is_sharded:
        found.append(
            "Parameters are sharded: each rank counts its own part, and gradient norms are of "
            "that part."
        )
    for reason, names in models.left_alone().items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        found.append(f"Parameter {names[0]}{more} cannot be read and is left alone: {reason}.")
    return [Event(0, "note", "cannot be seen", text) for text in found]


def tightened(step: int) -> Event:
    """The schedule records every step for a while."""
    text = f"A step went bad: the next {TIGHT_STEPS} steps are recorded with histograms."
    return Event(step, "schedule", "tightened", text)
