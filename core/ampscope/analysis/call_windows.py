"""The ordered call log cut into windows: what happened between two zero_grad calls."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.observations import Call


@dataclass(frozen=True, slots=True)
class Window:
    """Top-level calls for one optimizer, up to and with its step."""

    optimizer: str
    calls: tuple[Call, ...]

    @property
    def backwards(self) -> list[Call]:
        """The backward passes whose gradients the step used."""
        return [c for c in self.calls if c.name == "backward"]


def windows(run: RunView) -> list[Window]:
    """One a step of each optimizer: the user's own calls since its last zero_grad or step."""
    found: list[Window] = []
    pending: dict[str, list[Call]] = {}
    names = {c.note for c in run.calls if c.name == "scaler_step"}
    names |= {c.subject for c in run.calls if c.name == "optimizer_step"}
    for name in names:
        pending[name] = []
    for call in run.calls:
        if call.nested:
            continue
        if call.name == "zero_grad":
            for name in names if call.subject == "model" else {call.subject} & names:
                pending[name] = []
            continue
        for name in names:
            pending[name].append(call)
        owner = call.note if call.name == "scaler_step" else call.subject
        if call.name in ("scaler_step", "optimizer_step") and owner in names:
            found.append(Window(owner, tuple(pending[owner])))
            pending[owner] = []
    return found


@dataclass(frozen=True, slots=True)
class Bypasses:
    """Steps that a scaler should have taken, and steps it took on what it had not scaled."""

    direct: tuple[Call, ...]  # optimizer.step on gradients of a scaled loss
    unscaled: tuple[Call, ...]  # scaler.step on gradients of a loss that was not scaled


def bypasses(run: RunView) -> Bypasses:
    """Steps at which scaled and unscaled went together, in the order of the log."""
    direct: list[Call] = []
    unscaled: list[Call] = []
    last_scaled: dict[str, bool] = {}
    all_windows = windows(run)
    alone = len({w.optimizer for w in all_windows}) == 1
    for window in all_windows:
        step, backwards = window.calls[-1], window.backwards
        if backwards:
            # With several optimizers the last backward before a step is the one that is meant.
            last_scaled[window.optimizer] = backwards[-1].scaled
        if step.name == "optimizer_step" and last_scaled.get(window.optimizer):
            direct.append(step)
        elif step.name == "scaler_step" and backwards:
            mixed = alone and any(not c.scaled for c in backwards)
            if mixed or not backwards[-1].scaled:
                unscaled.append(step)
    return Bypasses(tuple(direct), tuple(unscaled))
