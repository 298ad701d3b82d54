"""The ordered call log cut into windows: what happened between two zero_grad calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ampscope.analysis.run_view import RunView
from ampscope.observations import Call


@dataclass(frozen=True, slots=True)
class CallWindow:
    """Top-level calls for one optimizer, up to and with its step."""

    optimizer: str
    calls: tuple[Call, ...]

    @property
    def backwards(self) -> list[Call]:
        """The backward passes whose gradients the step used."""
        return [c for c in self.calls if c.name == "backward"]


def windows(run: RunView) -> list[CallWindow]:
    """One a step of each optimizer: the user's own calls since its last zero_grad or step."""
    found: list[CallWindow] = []
    names = {c.note for c in run.calls if c.name == "scaler_step"}
    names |= {c.subject for c in run.calls if c.name == "optimizer_step"}
    pending: dict[str, list[Call]] = {name: [] for name in names}
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
            found.append(CallWindow(owner, tuple(pending[owner])))
            pending[owner] = []
    return found


@dataclass(frozen=True, slots=True)
class Bypasses:
    """Steps that a scaler should have taken, and steps it took on what it had not scaled."""

    direct: tuple[Call, ...]  # optimizer.step on gradients of a scaled loss
    unscaled: tuple[Call, ...]  # scaler.step on gradients of a loss that was not scaled
    again: tuple[Call, ...] = ()  # of direct: without a backward since the step before
    after_unscale: tuple[Call, ...] = ()  # of direct: unscale_ came after the last backward
    mixed: tuple[Call, ...] = ()  # of unscaled: another loss of the same step was scaled


def _never(_: str) -> bool:
    return False


def bypasses(run: RunView, scaled_by_hand: Callable[[str], bool] = _never) -> Bypasses:
    """Steps at which scaled and unscaled went together, in the order of the log.
    ``scaled_by_hand`` says of a line whether the loss that it calls backward on is multiplied by
    the scale, though not by ``scaler.scale``."""
    direct: list[Call] = []
    unscaled: list[Call] = []
    again: list[Call] = []
    after_unscale: list[Call] = []
    mixed: list[Call] = []
    plain = {c.line for c in run.calls if c.name == "backward" and not c.scaled}
    by_hand = {line for line in plain if scaled_by_hand(line)}

    def is_scaled(backward: Call) -> bool:
        return backward.scaled or backward.line in by_hand

    last_scaled: dict[str, bool] = {}
    all_windows = windows(run)
    alone = len({w.optimizer for w in all_windows}) == 1
    for window in all_windows:
        step, backwards = window.calls[-1], window.backwards
        if backwards:
            # With several optimizers the last backward before a step is the one that is meant.
            last_scaled[window.optimizer] = is_scaled(backwards[-1])
        if step.name == "optimizer_step" and last_scaled.get(window.optimizer):
            direct.append(step)
            if not backwards:
                again.append(step)
            elif _unscales_last(window):
                after_unscale.append(step)
        elif step.name == "scaler_step" and backwards:
            some = any(map(is_scaled, backwards))
            if (alone and not all(map(is_scaled, backwards))) or not is_scaled(backwards[-1]):
                unscaled.append(step)
                mixed += [step] if some else []
    return Bypasses(*map(tuple, (direct, unscaled, again, after_unscale, mixed)))


def _unscales_last(window: CallWindow) -> bool:
    """The optimizer's gradients were unscaled after the window's last backward."""
    last = max(n for n, c in enumerate(window.calls) if c.name == "backward")
    after = window.calls[last:]
    return any(c.name == "unscale_" and c.note == window.optimizer for c in after)
