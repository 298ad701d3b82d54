"""What a watched run says of itself: its row in the store, and what it cannot see."""

from __future__ import annotations

import sys
from dataclasses import replace

import torch

from ampscope.records import Event, Machine, RunSpec, watched
from ampscope.runner.device import describe
from ampscope.watcher.alarm_dispatcher import WatchSettings
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.place import RankPlace
from ampscope.watcher.schedule import EVERY

TAPS_TEXT = (
    "{} is compiled, with taps in its graphs: outputs of modules and the gradients there are "
    "counted. What computes nothing of its own there has no tap. A tensor that is read is kept in "
    "memory, so the last bits of a loss may differ from those of the same training without taps: "
    "docs/compiled.md has by how much, and how to measure it in yours."
)


def program() -> str:
    """The script as it was started; "" in a program that gives Python no arguments."""
    given = getattr(sys, "argv", None) or [""]
    return given[0] if isinstance(given[0], str) else ""


def run_of(
    models: WatchedModels, place: RankPlace, settings: WatchSettings, device: torch.device
) -> tuple[RunSpec, Machine]:
    """The run as the store lists it, and where it takes place."""
    every = EVERY if settings.every is None else settings.every
    spec = watched(program(), every, settings.name)
    spec = replace(spec, group=place.group, rank=place.rank, world=place.world)
    return spec, describe(spec, device)


def notes(models: WatchedModels, place: RankPlace, *, taps: bool) -> list[Event]:
    """What cannot be seen in this training, and why."""
    found = [
        TAPS_TEXT.format(root.name)
        if taps
        else f"{root.name} is compiled: what happens inside cannot be seen. Its parameters, their "
        "gradients, and the gradients at its output can. watch(…, taps=True) before the first step "
        "counts the outputs of its modules too."
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
