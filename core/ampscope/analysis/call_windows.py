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
