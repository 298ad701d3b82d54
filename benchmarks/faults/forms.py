"""Other ways to write the same training."""

from __future__ import annotations

import random

from benchmarks.faults.planting import Draft, Roles, form
from benchmarks.faults.plants.scale import _without_scaler
from benchmarks.faults.plants.state import _in_bf16
from benchmarks.faults.source import Edit


def _guard(s: Roles, way: str) -> Draft | None:
    found = s.losses()
    if len(found) != 1 or len(s.backwards) != 1:
        return None
    name, _ = found[0]
    call = s.backwards[0][0]
    if not s.loops(call):
        return None
    return Draft([s.before(s.statement(call), f"if not torch.isfinite({name}):\n    {way}")])


@form
def guard_that_breaks(s: Roles, rng: random.Random) -> Draft | None:
    return _guard(s, "print('not finite, stopping early')\n    break")


@form
def guard_that_exits(s: Roles, rng: random.Random) -> Draft | None:
    return _guard(s, "raise SystemExit('training diverged')")


@form
def guard_that_skips(s: Roles, rng: random.Random) -> Draft | None:
    return _guard(s, "print('skipping a bad batch')\n    continue")


@form
def bf16_without_scaler(s: Roles, rng: random.Random) -> Draft | None:
    if not s.backwards or s.calls("autograd.grad"):
        return None
    edits = [*_in_bf16(s), *_without_scaler(s)]
    return Draft([Edit(e.start, e.end, e.new) for e in edits])


@form
def device_by_is_available(s: Roles, rng: random.Random) -> Draft | None:
    line = 'device_type = "cuda" if torch.cuda.is_available() else "cpu"'
    edits = [
        s.replace(c.args[0], "device_type", blamed=False)
        for c in [*s.calls("autocast"), *s.scaler_makers]
        if c.args and s.segment(c.args[0]) in ('"cpu"', "'cpu'")
    ]
    return Draft([s.top(line), *edits]) if edits else None


@form
def log_file(s: Roles, rng: random.Random) -> Draft | None:
    """Losses go to a file, too."""
    found = s.losses()
    if len(found) != 1 or len(s.backwards) != 1:
        return None
    name, _ = found[0]
    lines = f'with open("losses.csv", "a") as log:\n    log.write(f"{{{name}.item():.6f}}\\n")'
    return Draft([s.before(s.statement(s.backwards[0][0]), lines)])


@form
def step_in_a_function(s: Roles, rng: random.Random) -> Draft | None:
    """scaler.step and update through a helper."""
    steps, updates = s.steps(), s.of_scaler("update")
    if len(steps) != 1 or len(updates) != 1 or s.function(steps[0]) is not s.function(updates[0]):
        return None
    helper = (
        "def apply_gradients(scaler, optimizer):\n    scaler.step(optimizer)\n    scaler.update()\n"
    )
    call = f"apply_gradients({s.owner(steps[0])}, {s.segment(steps[0].args[0])})"
    return Draft([s.top(helper), s.replace(steps[0], call), s.delete(s.statement(updates[0]))])
