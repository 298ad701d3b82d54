"""Faults of the loss and its scale: too small, too high, too large a loss, lost state."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, fault
from benchmarks.faults.source import Edit


def _made(s: Roles, call: ast.Call, **options: object) -> Edit:
    device = s.segment(call.args[0]) if call.args else '"cpu"'
    given = "".join(f", {k}={v}" for k, v in options.items())
    return s.replace(call, f"torch.amp.GradScaler({device}{given})")


def _smaller_loss(s: Roles, rng: random.Random) -> tuple[list[Edit], float] | None:
    """The loss divided by a constant, which Adam does not mind."""
    if not s.backwards or s.clips or s.calls("autograd.grad"):
        return None
    if any(".SGD" in s.segment(c.func) for c in s.optimizer_makers):
        return None
    by = rng.choice([1e4, 1e5])
    edits = [
        s.replace(loss, f"{_operand(s, loss)} / {by:.0f}", blamed=False) for _, loss in s.backwards
    ]
    return edits, by


def _operand(s: Roles, node: ast.expr) -> str:
    return s.segment(node) if isinstance(node, ast.Name) else f"({s.segment(node)})"


def _without_scaler(s: Roles, by: float = 1) -> list[Edit]:
    """Every call of the scaler taken out, the loss divided by ``by``."""
    edits = []
    for call, loss in s.backwards:
        text = _operand(s, loss)
        edits.append(
            s.replace(call, f"({text} / {by:.0f}).backward()" if by != 1 else f"{text}.backward()")
        )
    edits += [s.replace(c, f"{s.segment(c.args[0])}.step()") for c in s.of_scaler("step") if c.args]
    edits += [s.replace(c, "1.0", blamed=False) for c in s.of_scaler("get_scale")]
    gone = {s.statement(c) for name in ("unscale_", "update") for c in s.of_scaler(name)} | {
        s.statement(c) for c in s.scaler_makers
    }
    return edits + [s.delete(x) for x in sorted(gone, key=lambda x: x.lineno)]


def _high(s: Roles) -> list[Edit]:
    """A scale that suits the small loss."""
    return [_made(s, c, init_scale="2.0**22") for c in s.scaler_makers]


# ---- gradient_underflow


@fault("gradient_underflow", fp32="trains")
def no_scaler_at_all(s: Roles, rng: random.Random) -> Draft | None:
    smaller = _smaller_loss(s, rng)
    if smaller is None or not s.backwards:
        return None
    return Draft(
        _without_scaler(s, smaller[1]), [*smaller[0], *_high(s)], params={"divisor": smaller[1]}
    )


@fault("gradient_underflow", fp32="trains")
def scale_starts_at_one(s: Roles, rng: random.Random) -> Draft | None:
    smaller = _smaller_loss(s, rng)
    if smaller is None or not s.scaler_makers:
        return None
    start, every = rng.choice(["1.0", "2.0", "0.5", "8.0"]), rng.choice([2000, 500, 10000])
    options = {"init_scale": start, "growth_interval": every}
    edits = [_made(s, c, **options) for c in s.scaler_makers]
    return Draft(
        [*smaller[0], *edits], [*smaller[0], *_high(s)], params={**options, "divisor": smaller[1]}
    )


@fault("gradient_underflow", fp32="trains")
def scaler_disabled(s: Roles, rng: random.Random) -> Draft | None:
    smaller = _smaller_loss(s, rng)
    if smaller is None or not s.scaler_makers:
        return None
    edits = [_made(s, c, enabled="False") for c in s.scaler_makers]
    return Draft([*smaller[0], *edits], [*smaller[0], *_high(s)], params={"divisor": smaller[1]})


@fault("gradient_underflow", fp32="trains")
def scale_capped_low(s: Roles, rng: random.Random) -> Draft | None:
    smaller = _smaller_loss(s, rng)
    updates = s.of_scaler("update")
    if smaller is None or not updates:
        return None
    cap = rng.choice([1.0, 4.0, 16.0])
    edits = [s.replace(c, f"{s.owner(c)}.update({cap})") for c in updates]
    edits += [_made(s, c, init_scale=cap) for c in s.scaler_makers]
    return Draft(
        [*smaller[0], *edits], [*smaller[0], *_high(s)], params={"cap": cap, "divisor": smaller[1]}
    )


# ---- loss_scale_too_high


@fault("loss_scale_too_high", fp32="trains")
def grows_every_step(s: Roles, rng: random.Random) -> Draft | None:
    if not s.scaler_makers:
        return None
    options = {
        "init_scale": f"2.0**{rng.choice([16, 18, 20])}",
        "growth_interval": rng.choice([1, 2]),
        "growth_factor": rng.choice([16.0, 64.0, 256.0]),
        "backoff_factor": rng.choice([0.5, 0.25]),
    }
    edits = [_made(s, c, **options) for c in s.scaler_makers]
    return Draft(edits, params=options)


@fault("loss_scale_too_high", fp32="trains")
def starts_absurdly_high(s: Roles, rng: random.Random) -> Draft | None:
    if not s.scaler_makers:
        return None
    power = rng.choice([56, 64, 72, 80])
    edits = [_made(s, c, init_scale=f"2.0**{power}") for c in s.scaler_makers]
    return Draft(edits, params={"power": power})


@fault("loss_scale_too_high", fp32="trains")
def scale_has_a_floor(s: Roles, rng: random.Random) -> Draft | None:
    updates = s.of_scaler("update")
    if not updates:
        return None
    power = rng.choice([26, 30, 34])
    edits = []
    for call in updates:
        owner = s.owner(call)
        lines = f"if {owner}.get_scale() < 2.0**{power}:\n    {owner}.update(2.0**{power})"
        edits.append(s.after(s.statement(call), lines))
    return Draft(edits, params={"power": power})


@fault("loss_scale_too_high", fp32="trains")
def scale_never_backs_off(s: Roles, rng: random.Random) -> Draft | None:
    updates = s.of_scaler("update")
    if not updates or not s.scaler_makers:
        return None
    power = rng.choice([24, 28, 32])
    edits = [s.replace(c, f"{s.owner(c)}.update(2.0**{power})") for c in updates]
    edits += [_made(s, c, init_scale=f"2.0**{power}") for c in s.scaler_makers]
    return Draft(edits, params={"power": power})


# ---- loss_magnitude_overflow


@fault("loss_magnitude_overflow", fp32="trains")
def loss_times_a_constant(s: Roles, rng: random.Random) -> Draft | None:
    found = s.losses()
    if not found or any(".SGD" in s.segment(c.func) for c in s.optimizer_makers) or s.clips:
        return None
    by = rng.choice([1e11, 1e12, 1e13])
    way = rng.choice([f"{by:.0f}.0 * ", f"{by:.0e} * "])
    return Draft([s.after(a, f"{n} = {way}{n}") for n, a in found], params={"factor": by})


@fault("loss_magnitude_overflow", fp32="trains")
def loss_summed(s: Roles, rng: random.Random) -> Draft | None:
    """Over the batch, times pixels or tokens of a full-size problem."""
    found = s.losses()
    if not found or any(".SGD" in s.segment(c.func) for c in s.optimizer_makers) or s.clips:
        return None
    side = rng.choice([262144, 1048576])
    lines = "{0} = {0} * {1} * {1}  # sum over the full-resolution grid"
    return Draft([s.after(a, lines.format(n, side)) for n, a in found], params={"side": side})


@fault("loss_magnitude_overflow", fp32="trains")
def gradients_overflow_without_scale(s: Roles, rng: random.Random) -> Draft | None:
    found = s.losses()
    if not found or any(".SGD" in s.segment(c.func) for c in s.optimizer_makers) or s.clips:
        return None
    by = rng.choice([1e7, 1e8, 1e9])
    edits = [s.after(a, f"{n} = {n} * {by:.0f}.0") for n, a in found]
    return Draft([*edits, *_without_scaler(s)], params={"factor": by})


# ---- scaler_state_lost


def _resumed(s: Roles, rng: random.Random, keep: str, give: str, start: str) -> Draft | None:
    """The training is preempted every so many steps and goes on from a file."""
    steps, updates = s.steps(), s.of_scaler("update")
    if len(steps) != 1 or len(updates) != 1 or len(s.scaler_makers) != 1:
        return None
    if s.function(steps[0]) is not s.function(updates[0]) or not s.loops(updates[0]):
        return None
    maker, optimizer = s.scaler_makers[0], s.segment(steps[0].args[0])
    scaler = s.owner(updates[0])
    power, every = rng.choice([20, 21, 22]), rng.choice([7, 9, 11])
    made = _made(s, maker, init_scale=f"2.0**{power}")
    made = Edit(made.start, made.end, made.new)
    first = s.before(s.loops(updates[0])[0], "done = 0", blamed=False)
    body = (
        "done += 1\n"
        f"if done % {every} == 0:\n"
        f'    torch.save({{"optimizer": {optimizer}.state_dict(){{0}}}}, "last.pt")\n'
        '    checkpoint = torch.load("last.pt")\n'
        f'    {optimizer}.load_state_dict(checkpoint["optimizer"])\n'
        f"    {scaler} = {made.new}"
    )
    at = s.statement(updates[0])
    saved = f', "scaler": {scaler}.state_dict()'
    loaded = f'\n    {scaler}.load_state_dict(checkpoint["scaler"])'
    bad = body.replace("{0}", saved if keep else "") + (give.format(scaler) if give else "")
    good = body.replace("{0}", saved) + loaded
    return Draft(
        [made, first, s.after(at, bad)],
        [made, first, s.after(at, good)],
        params={"power": power, "every": every},
    )


@fault("scaler_state_lost", fp32="trains")
def scaler_not_saved(s: Roles, rng: random.Random) -> Draft | None:
    return _resumed(s, rng, "", "", "")


@fault("scaler_state_lost", fp32="trains")
def scaler_saved_and_not_loaded(s: Roles, rng: random.Random) -> Draft | None:
    return _resumed(s, rng, "saved", "", "")


@fault("scaler_state_lost", fp32="trains")
def state_loaded_into_another_scaler(s: Roles, rng: random.Random) -> Draft | None:
    give = '\n    restored = torch.amp.GradScaler("cpu")\n    restored.load_state_dict(checkpoint["scaler"])'
    return _resumed(s, rng, "saved", give, "")


# ---- shared_scaler_interference


def _shared(s: Roles, rng: random.Random, large: int) -> Draft | None:
    """Two losses of far different size and one scaler; the repair keeps one for each."""
    makers, losses = s.scaler_makers, s.losses()
    if len(makers) != 2 or len(losses) != 2 or s.calls("autograd.grad"):
        return None
    names = [s.segment(s.statement(m).targets[0]) for m in makers]  # type: ignore[attr-defined]
    times = [0.0, 0.0]
    times[large], times[1 - large] = rng.choice([1e7, 1e8]), rng.choice([1e-5, 1e-6])
    context = [
        s.after(a, f"{n} = {n} * {by}", blamed=False)
        for (n, a), by in zip(losses, times, strict=True)
    ]
    # the scaler of each loss, by the name that scales it
    owner = {s.segment(loss): s.owner(call.func.value) for call, loss in s.backwards}  # type: ignore
    starts = {owner[losses[large][0]]: "2.0**-12", owner[losses[1 - large][0]]: "2.0**20"}
    good = [_made(s, m, init_scale=starts[n]) for m, n in zip(makers, names, strict=True)]
    bad = [
        _made(s, makers[0], init_scale="2.0**16"),
        s.replace(makers[1], names[0]),
        *(s.blame(s.statement(c)) for c in s.steps()),
    ]
    updates = [c for c in s.of_scaler("update") if s.owner(c) == names[0]]
    bad += [s.delete(s.statement(c)) for c in updates]
    return Draft([*context, *bad], [*context, *good], params={"factors": times})


@fault("shared_scaler_interference", fp32="trains")
def first_loss_drags_the_scale(s: Roles, rng: random.Random) -> Draft | None:
    return _shared(s, rng, 0)


@fault("shared_scaler_interference", fp32="trains")
def second_loss_drags_the_scale(s: Roles, rng: random.Random) -> Draft | None:
    return _shared(s, rng, 1)
