"""Faults of the calls: GradScaler's protocol, clipping, accumulation, half parameters."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, fault


def _after_window(s: Roles, rng: random.Random) -> tuple[ast.Call, ast.stmt] | None:
    """A ``scaler.step(optimizer)`` and its statement."""
    steps = [c for c in s.of_scaler("step") if c.args]
    if not steps:
        return None
    call = rng.choice(steps)
    return call, s.statement(call)


def _clip_lines(rng: random.Random, model: str, limit: float) -> tuple[str, str]:
    """Ways to clip: its name, its lines."""
    return rng.choice(
        [
            ("norm", f"torch.nn.utils.clip_grad_norm_({model}.parameters(), {limit})"),
            ("value", f"torch.nn.utils.clip_grad_value_({model}.parameters(), {limit})"),
            (
                "by hand",
                f"for p in {model}.parameters():\n"
                f"    if p.grad is not None:\n        p.grad.clamp_(-{limit}, {limit})",
            ),
        ]
    )


def _model_of(s: Roles, step: ast.Call) -> str | None:
    """The model that the optimizer of ``scaler.step(optimizer)`` trains, as named there."""
    optimizer = s.segment(step.args[0])
    for maker in s.optimizer_makers:
        targets = getattr(s.statement(maker), "targets", [])
        if targets and s.segment(targets[0]) == optimizer:
            name = s.trained(maker)
            same = s.function(maker) is s.function(step) or s.function(maker) is None
            return name if name and (same or name.startswith("self.")) else None
    return None


# ---- clip_before_unscale


@fault("clip_before_unscale")
def unscale_left_out(s: Roles, rng: random.Random) -> Draft | None:
    calls = [c for c in s.of_scaler("unscale_") if _clips_near(s, c)]
    if not calls:
        return None
    call = rng.choice(calls)
    clips = _clips_near(s, call)
    return Draft([s.delete(s.statement(call)), *(s.blame(s.statement(c)) for c in clips)])


@fault("clip_before_unscale")
def unscale_after_clip(s: Roles, rng: random.Random) -> Draft | None:
    calls = [c for c in s.of_scaler("unscale_") if _clips_near(s, c)]
    if not calls:
        return None
    call = rng.choice(calls)
    clips = _clips_near(s, call)
    moved = s.after(s.statement(clips[-1]), s.segment(s.statement(call)), blamed=False)
    return Draft([s.delete(s.statement(call)), s.blame(s.statement(clips[-1])), moved])


@fault("clip_before_unscale")
def clip_added_on_scaled(s: Roles, rng: random.Random) -> Draft | None:
    found = _after_window(s, rng)
    if found is None or s.of_scaler("unscale_"):
        return None
    call, step = found
    model = _model_of(s, call)
    if model is None:
        return None
    limit = rng.choice([0.5, 1.0, 2.0, 5.0])
    way, lines = _clip_lines(rng, model, limit)
    good = f"{s.owner(call)}.unscale_({s.segment(call.args[0])})\n{lines}"
    return Draft(
        [s.before(step, lines)],
        [s.before(step, good)],
        params={"limit": limit, "way": way},
    )


def _clips_near(s: Roles, unscale: ast.Call) -> list[ast.Call]:
    return [
        c for c in s.clips if s.function(c) is s.function(unscale) and c.lineno > unscale.lineno
    ]


# ---- scaler_bypassed


@fault("scaler_bypassed")
def optimizer_stepped_directly(s: Roles, rng: random.Random) -> Draft | None:
    found = _after_window(s, rng)
    if found is None:
        return None
    call, _ = found
    unscaled = [c for c in s.of_scaler("unscale_") if s.function(c) is s.function(call)]
    edits = [s.replace(call, f"{s.segment(call.args[0])}.step()")]
    edits += [s.delete(s.statement(c)) for c in unscaled]
    updates = [c for c in s.of_scaler("update") if s.function(c) is s.function(call)]
    edits += [s.delete(s.statement(c)) for c in updates]
    return Draft(edits, accept=("clip_before_unscale",) if unscaled else ())


@fault("scaler_bypassed")
def loss_not_scaled(s: Roles, rng: random.Random) -> Draft | None:
    """The scaled loss is made, and backward starts from the other one."""
    if not s.backwards:
        return None
    call, loss = rng.choice(s.backwards)
    text = s.segment(loss)
    scale = next(c for c in s.of_scaler("scale") if c in list(ast.walk(call)))
    name = "scaled_loss" if text != "scaled_loss" else "loss_times_scale"
    lines = f"{name} = {s.segment(scale)}"
    return Draft(
        [
            s.before(s.statement(call), lines),
            s.replace(call, f"({text}).backward()" if " " in text else f"{text}.backward()"),
            *_steps_blamed(s, call),
        ]
    )


@fault("scaler_bypassed")
def second_step_on_the_optimizer(s: Roles, rng: random.Random) -> Draft | None:
    """On gradients that are not finite wherever the scaler skips: from a scale that is searched."""
    found = _after_window(s, rng)
    if found is None or not s.scaler_makers:
        return None
    call, step = found
    power = rng.choice([20, 24, 28])
    maker = s.scaler_makers[0]
    device = s.segment(maker.args[0]) if maker.args else '"cpu"'
    high = s.replace(
        maker, f"torch.amp.GradScaler({device}, init_scale=2.0**{power})", blamed=False
    )
    lines = f"{s.segment(call.args[0])}.step()"
    return Draft([high, s.after(step, lines)], [high], params={"power": power})


@fault("scaler_bypassed")
def gradients_unscaled_in_part(s: Roles, rng: random.Random) -> Draft | None:
    """By hand, and the first tensors are left out."""
    found = _after_window(s, rng)
    if found is None:
        return None
    call, step = found
    model = _model_of(s, call)
    if model is None:
        return None
    owner, optimizer = s.owner(call), s.segment(call.args[0])
    first = rng.choice([1, 2, 3])
    lines = (
        f"for p in list({model}.parameters())[{first}:]:\n"
        f"    if p.grad is not None:\n        p.grad.div_({owner}.get_scale())\n"
        f"{optimizer}.step()"
    )
    whole = lines.replace(f"[{first}:]", "")
    gone = [
        s.delete(s.statement(c))
        for name in ("unscale_", "update")
        for c in s.of_scaler(name)
        if s.function(c) is s.function(call)
    ]
    if any(s.function(c) is s.function(call) for c in s.clips):
        return None
    return Draft(
        [*gone, s.replace(step, _inline(s, step, lines))],
        [*gone, s.replace(step, _inline(s, step, whole))],
        params={"first": first},
    )


def _inline(s: Roles, statement: ast.stmt, lines: str) -> str:
    return lines.replace("\n", "\n" + s.indent(statement))


def _steps_blamed(s: Roles, near: ast.AST) -> list[object]:
    return [s.blame(s.statement(c)) for c in s.steps_in(s.function(near))]


# ---- scaler_protocol_error


@fault("scaler_protocol_error")
def unscaled_twice(s: Roles, rng: random.Random) -> Draft | None:
    found = _after_window(s, rng)
    if found is None:
        return None
    call, step = found
    line = f"{s.owner(call)}.unscale_({s.segment(call.args[0])})"
    already = [c for c in s.of_scaler("unscale_") if s.function(c) is s.function(call)]
    if already:
        return Draft([s.before(step, line), *(s.blame(c) for c in already)])
    return Draft([s.before(step, f"{line}\n{line}")])


@fault("scaler_protocol_error")
def stepped_twice(s: Roles, rng: random.Random) -> Draft | None:
    found = _after_window(s, rng)
    if found is None:
        return None
    return Draft([s.after(found[1], s.segment(found[1])), s.blame(found[1])])


@fault("scaler_protocol_error")
def update_left_out(s: Roles, rng: random.Random) -> Draft | None:
    updates = s.of_scaler("update")
    if not updates:
        return None
    call = rng.choice(updates)
    if sum(s.function(c) is s.function(call) for c in updates) > 1:
        return None  # the other one is enough
    others = [c for n in ("step", "unscale_") for c in s.of_scaler(n)]
    near = [c for c in others if s.function(c) is s.function(call)]
    return Draft([s.delete(s.statement(call)), *(s.blame(s.statement(c)) for c in near)])


@fault("scaler_protocol_error")
def update_before_step(s: Roles, rng: random.Random) -> Draft | None:
    found = _after_window(s, rng)
    if found is None or s.of_scaler("unscale_"):
        return None
    updates = [c for c in s.of_scaler("update") if s.function(c) is s.function(found[0])]
    if len(updates) != 1:
        return None
    update = s.statement(updates[0])
    line = s.segment(update)
    return Draft([s.before(found[1], line), s.delete(update), s.blame(found[1])])


@fault("scaler_protocol_error")
def unscale_after_step(s: Roles, rng: random.Random) -> Draft | None:
    found = _after_window(s, rng)
    if found is None:
        return None
    call, step = found
    line = f"{s.owner(call)}.unscale_({s.segment(call.args[0])})"
    return Draft([s.after(step, line)])


@fault("scaler_protocol_error")
def scale_never_called(s: Roles, rng: random.Random) -> Draft | None:
    if len(s.backwards) != 1 or len(s.of_scaler("scale")) != 1:
        return None
    call, loss = s.backwards[0]
    near = [c for n in ("step", "unscale_") for c in s.of_scaler(n)]
    return Draft(
        [
            s.replace(call, f"({s.segment(loss)}).backward()"),
            *(s.blame(s.statement(c)) for c in near),
        ],
        accept=("scaler_bypassed",),
    )


# ---- accumulation_scale_mismatch


def _window(s: Roles) -> list[tuple[ast.If, ast.Call]]:
    """``if (i + 1) % n == 0:`` with a scaler.step in it, after a backward of the same loop."""
    found = []
    for call in s.of_scaler("step"):
        for at in s.above(call):
            if isinstance(at, ast.If) and any(isinstance(n, ast.Mod) for n in ast.walk(at.test)):
                found.append((at, call))
                break
    return found


@fault("accumulation_scale_mismatch")
def unscaled_within_the_window(s: Roles, rng: random.Random) -> Draft | None:
    windows = _window(s)
    if not windows:
        return None
    window, step = rng.choice(windows)
    inside = [
        s.statement(c)
        for name in ("unscale_", "update")
        for c in s.of_scaler(name)
        if window in s.above(c)
    ]
    owner, optimizer = s.owner(step), s.segment(step.args[0])
    lines = f"{owner}.unscale_({optimizer})\n{owner}.update()"
    keep = [x for x in inside if "unscale_" in s.segment(x)]
    edits = [s.before(window, lines)]
    edits += [s.delete(x) for x in keep]
    return Draft(edits)


@fault("accumulation_scale_mismatch")
def divided_by_hand_within_the_window(s: Roles, rng: random.Random) -> Draft | None:
    """The scale is taken out of gradients that later micro-batches add scaled ones to."""
    windows = _window(s)
    model = _model_of(s, windows[0][1]) if windows else None
    if not windows or model is None:
        return None
    window, step = windows[0]
    lines = (
        f"for p in {model}.parameters():\n"
        f"    if p.grad is not None:\n        p.grad.div_({s.owner(step)}.get_scale())"
    )
    return Draft([s.before(window, lines)], accept=("scaler_bypassed",))


@fault("accumulation_scale_mismatch")
def zeroed_every_other_time(s: Roles, rng: random.Random) -> Draft | None:
    """A window of two micro-batches whose scaler is called after each of them."""
    found = _after_window(s, rng)
    if found is None or _window(s) or len(s.of_scaler("step")) != 1 or len(s.backwards) != 1:
        return None
    call, step = found
    loops = s.loops(call)
    counter = loops[0].target if loops and isinstance(loops[0], ast.For) else None
    if not isinstance(counter, ast.Name):
        return None
    zeros = [c for c in s.calls(".zero_grad") if loops[0] in s.above(c)]
    if len(zeros) != 1:
        return None
    zero = s.statement(zeros[0])
    owner, optimizer = s.owner(call), s.segment(call.args[0])
    unscales = [s.statement(c) for c in s.of_scaler("unscale_")]
    if s.clips:
        return None
    n = rng.choice([2, 4])
    test = f"if {counter.id} % {n} == 0:\n{s.indent(zero)}    {s.segment(zero)}"
    window = f"if ({counter.id} + 1) % {n} == 0:\n{s.indent(step)}    {s.segment(step)}"
    bad = [
        s.replace(zero, test, blamed=False),
        *(s.delete(u) for u in unscales),
        s.before(step, f"{owner}.unscale_({optimizer})"),
        s.replace(step, window, blamed=False),
    ]
    update = s.statement(s.of_scaler("update")[0])
    inner = f"if ({counter.id} + 1) % {n} == 0:\n{s.indent(update)}    {s.segment(update)}"
    good = [
        s.replace(zero, test, blamed=False),
        *(s.delete(u) for u in unscales),
        s.replace(step, window, blamed=False),
        s.replace(update, inner, blamed=False),
    ]
    return Draft([*bad, s.blame(update)], good, params={"window": n})


# ---- fp16_params_with_scaler


@fault("fp16_params_with_scaler")
def model_in_half(s: Roles, rng: random.Random) -> Draft | None:
    makers = s.model_makers()
    if not makers or not s.scaler_makers:
        return None
    maker = rng.choice(makers)
    way = rng.choice([".half()", ".to(torch.float16)", ".to(dtype=torch.half)"])
    return Draft([s.replace(maker.value, s.segment(maker.value) + way)], params={"way": way})


@fault("fp16_params_with_scaler")
def layer_in_half(s: Roles, rng: random.Random) -> Draft | None:
    layers = s.layers("Linear", "Conv2d", "Conv1d")
    if not layers or not s.scaler_makers:
        return None
    _, attribute, made, _ = rng.choice(layers)
    way = rng.choice([".half()", ".to(torch.float16)"])
    return Draft([s.replace(made.value, s.segment(made.value) + way)], params={"layer": attribute})


@fault("fp16_params_with_scaler")
def parameters_cast_in_a_loop(s: Roles, rng: random.Random) -> Draft | None:
    makers = s.model_makers()
    if not makers or not s.scaler_makers:
        return None
    maker = rng.choice(makers)
    model = s.segment(maker.targets[0])
    size = rng.choice([1, 2])
    lines = (
        f"for p in {model}.parameters():\n    if p.dim() >= {size}:\n        p.data = p.data.half()"
    )
    return Draft([s.after(maker, lines)], params={"dim": size})
