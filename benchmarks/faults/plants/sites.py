"""Sites of half precision in the training itself: statistics and counters that are kept, checkpoints,
moments, gradients, what is saved for backward.

Each is drafted twice: where it harms, and as its healthy twin (``harm`` is false): another format,
smaller numbers, a state that is soon rebuilt.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable

from benchmarks.faults.planting import Draft, Mechanism, Roles, SiteDrafter, mechanism
from benchmarks.faults.plants.everywhere import _data_lines, _inputs
from benchmarks.faults.plants.range import _hidden
from benchmarks.faults.plants.state import _rate
from benchmarks.faults.source import Edit, dotted


def site(
    kind: str, role: str, place: str, *accept: str, has_rule: bool = False
) -> Callable[[SiteDrafter], SiteDrafter]:
    """Registers a mechanism under its function's name."""

    def register(draft: SiteDrafter) -> SiteDrafter:
        mechanism(draft.__name__, Mechanism(kind, role, place, has_rule), draft, accept)
        return draft

    return register


# ---- counters and statistics -----------------------------------------------------------------------


@site("accumulator", "metric", "evaluation", "half_accumulation_stagnation", has_rule=True)
def hits_counted_in_half(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """A counter of right answers: bf16 stands still, fp16 holds as many."""
    added = {dotted(a.target): a for a in s.all(ast.AugAssign)}  # type: ignore[attr-defined]
    found = [
        (c, added[name])
        for c in s.calls("torch.zeros")
        for t in getattr(s.statement(c), "targets", [])
        if s.segment(c) == "torch.zeros(())" and (name := dotted(t)) in added
    ]
    if not found:
        return None
    call, more = rng.choice(found)
    dtype = "torch.bfloat16" if harm else "torch.float16"
    return Draft(
        [s.replace(call, f"torch.zeros((), dtype={dtype})"), s.blame(more)],
        params={"dtype": dtype},
    )


@site("accumulator", "counts", "preparation", "half_accumulation_stagnation", has_rule=True)
def classes_counted_in_half(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """Samples of each class, counted one by one; the twin rounds the counts at the end."""
    for more in s.all(ast.AugAssign):
        assert isinstance(more, ast.AugAssign)
        name = dotted(more.target).removesuffix("[]")
        made = [c for a in s.assigned(name) for c in [a.value] if isinstance(c, ast.Call)]
        if not (dotted(more.target).endswith("[]") and made and s.loops(more)):
            continue
        call = made[0]
        if dotted(call.func) != "torch.zeros":
            continue
        if not harm:
            return Draft([s.after(s.loops(more)[-1], f"{name} = {name}.half().float()")])
        size = s.segment(call.args[0])
        half = s.replace(call, f"torch.zeros({size}, dtype=torch.bfloat16)")
        after = s.after(s.loops(more)[-1], f"{name} = {name}.float()", blamed=False)
        return Draft([half, s.blame(more), after])
    return None


@site("accumulator", "weights", "optimizer", "small_update_lost", has_rule=True)
def averaged_weights_in_half(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """A moving average of the weights, rounded at each step."""
    found = [c for c in s.calls(".lerp_") if s.loops(c)]
    if not found:
        return None
    call = rng.choice(found)
    dtype = "torch.bfloat16" if harm else "torch.float16"
    owner = s.owner(call)
    return Draft(
        [s.after(s.statement(call), f"{owner}.copy_({owner}.to({dtype}))")], params={"dtype": dtype}
    )


# ---- optimizer and checkpoint ----------------------------------------------------------------------


def _plain_steps(s: Roles) -> list[tuple[str, ast.stmt, ast.Call]]:
    """``optimizer.step()`` within a loop, without a scaler: optimizer, statement, its maker."""
    makers = {
        dotted(t): c for c in s.optimizer_makers for t in getattr(s.statement(c), "targets", [])
    }
    if s.scaler_makers:
        return []
    return [
        (dotted(c.func)[:-5], s.statement(c), makers[dotted(c.func)[:-5]])
        for c in s.calls(".step")
        if not c.args and s.loops(c) and dotted(c.func)[:-5] in makers
    ]


def _moment(rng: random.Random, harm: bool) -> tuple[str, str]:
    """Which moment and format: small squares leave the range of fp16; first moments are rebuilt."""
    if harm:
        return "exp_avg_sq", "torch.float16"
    return rng.choice([("exp_avg", "torch.bfloat16"), ("exp_avg", "torch.float16")])


@site("state", "moments", "optimizer", "optimizer_state_range")
def moments_rounded_after_each_step(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """Adam's state, packed in half and unpacked at once."""
    steps = [p for p in _plain_steps(s) if "Adam" in dotted(p[2].func)]
    if not steps:
        return None
    optimizer, statement, _ = rng.choice(steps)
    moment, dtype = _moment(rng, harm)
    lines = (
        f"for kept in {optimizer}.state.values():\n"
        f'    kept["{moment}"].copy_(kept["{moment}"].to({dtype}))'
    )
    return Draft([s.after(statement, lines)], params={"moment": moment, "dtype": dtype})


def _checkpoint(s: Roles, loaded: bool) -> ast.Assign | None:
    """Where a checkpoint is made or loaded."""
    for assign in s.all(ast.Assign):
        assert isinstance(assign, ast.Assign)
        if not isinstance(assign.targets[0], ast.Name):
            continue
        value = assign.value
        if loaded and isinstance(value, ast.Call) and dotted(value.func) == "torch.load":
            return assign
        if not loaded and isinstance(value, ast.Dict) and '"optimizer"' in s.segment(value):
            return assign
    return None


def _moments_in_checkpoint(s: Roles, rng: random.Random, harm: bool, loaded: bool) -> Draft | None:
    at = _checkpoint(s, loaded)
    if at is None:
        return None
    moment, dtype = _moment(rng, harm)
    lines = (
        f'for kept in {dotted(at.targets[0])}["optimizer"]["state"].values():\n'
        f'    kept["{moment}"] = kept["{moment}"].to({dtype})'
    )
    return Draft([s.after(at, lines)], params={"moment": moment, "dtype": dtype})


@site("file", "moments", "resume", "optimizer_state_range")
def moments_saved_in_half(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """A smaller checkpoint: second moments become zero, and the steps after it far too long."""
    return _moments_in_checkpoint(s, rng, harm, loaded=False)


@site("file", "moments", "resume", "optimizer_state_range")
def moments_loaded_in_half(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    return _moments_in_checkpoint(s, rng, harm, loaded=True)


@site("state", "weights", "optimizer", "small_update_lost", has_rule=True)
def weights_rounded_without_autocast(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """Weights that lie on bf16's grid after each step, with a small rate; the twin is fp16's grid."""
    steps = _plain_steps(s)
    if not steps:
        return None
    optimizer, statement, _ = rng.choice(steps)
    dtype, slow = ("torch.bfloat16", _rate(s, 0.05)) if harm else ("torch.float16", [])
    lines = (
        f'for group in {optimizer}.param_groups:\n    for p in group["params"]:\n'
        f"        p.data.copy_(p.data.to({dtype}))"
    )
    return Draft([*slow, s.after(statement, lines)], slow, params={"dtype": dtype})


@site("cast", "gradients", "optimizer", "gradient_underflow")
def gradients_rounded_before_the_step(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """As if they had been sent in half: those below fp16's range are lost."""
    steps = _plain_steps(s)
    if not steps:
        return None
    optimizer, statement, _ = rng.choice(steps)
    dtype = "torch.float16" if harm else "torch.bfloat16"
    lines = (
        f'for group in {optimizer}.param_groups:\n    for p in group["params"]:\n'
        f"        p.grad = p.grad.to({dtype}).float()"
    )
    small = 1e-7 if harm else 1.0
    if not all("Adam" in dotted(c.func) for c in s.optimizer_makers):
        return None
    context = _smaller(s, small)
    return Draft(
        [*context, s.before(statement, lines)], context, params={"dtype": dtype, "loss": small}
    )


@site("hook", "gradients", "backward", "gradient_underflow")
def gradients_rounded_in_a_hook(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """A hook on each parameter that rounds its gradient."""
    makers = s.model_makers()
    if not makers or not _plain_steps(s):
        return None
    if not all("Adam" in dotted(c.func) for c in s.optimizer_makers):
        return None
    dtype = "torch.float16" if harm else "torch.bfloat16"
    model = s.segment(makers[0].targets[0])
    lines = f"for p in {model}.parameters():\n    p.register_hook(lambda g: g.to({dtype}).float())"
    small = 1e-7 if harm else 1.0
    context = _smaller(s, small)
    return Draft(
        [*context, s.after(makers[0], lines)], context, params={"dtype": dtype, "loss": small}
    )


def _smaller(s: Roles, by: float) -> list[Edit]:
    """The backward of a loss in small units, and an Adam that does not mind."""
    if by == 1.0:
        return []
    edits = []
    for call in s.calls(".backward"):
        owner = s.owner(call)
        edits.append(s.replace(call, f"({owner} * {by}).backward()", blamed=False))
    for maker in s.optimizer_makers:
        last = maker.args[0]
        if not any(k.arg == "eps" for k in maker.keywords):
            edits.append(s.replace(last, f"{s.segment(last)}, eps=1e-15", blamed=False))
    return edits


# ---- forward ---------------------------------------------------------------------------------------


def _in_small_units(
    s: Roles, rng: random.Random, harm: bool, half: str, exact: str
) -> Draft | None:
    """A hidden activation in units in which it is far below fp16's range; the twin is within it."""
    place = _hidden(s, rng)
    if place is None:
        return None
    name, statement, owner = place
    power = rng.choice([9, 10] if harm else [0, 1])

    def written(kept: str) -> list[Edit]:
        return [
            s.after(statement, f"{name}_si = {name}.float() * 1e-{power}", blamed=False),
            *(s.after(statement, line) for line in kept.replace("§", name).splitlines()),
            s.after(statement, f"{name} = ({name}_kept.float() * 1e{power}).to({name}.dtype)",
                    blamed=False),
        ]  # fmt: skip

    return Draft(written(half), written(exact), module=(owner, ""), params={"power": power})


@site("cast", "activations", "forward")
def activations_cast_in_small_units(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    return _in_small_units(s, rng, harm, "§_kept = §_si.to(torch.float16)", "§_kept = §_si")


@site("table", "activations", "forward")
def activations_written_to_a_half_cache(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    cache = "§_kept = torch.empty(§.shape{0})\n§_kept.copy_(§_si)"
    half = cache.format(", dtype=torch.float16")
    return _in_small_units(s, rng, harm, half, cache.format(""))


@site("cast", "masks", "loader")
def mask_by_channel_numbers_in_half(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """Channels behind the last one of another device: numbers that coincide leave none of them."""
    places = _inputs(s)
    if not places:
        return None
    name, statement, _ = rng.choice(places)
    last = rng.choice([4096, 8192] if harm else [16, 32])
    line = f"{name}_channel = (torch.arange({name}.shape[-1]) + {last + 1}){{0}}"
    use = f"{name} = {name} * ({name}_channel > {last}).to({name}.dtype)"
    at = _data_lines(s, statement)
    return Draft(
        [s.before(at, line.format(".to(torch.bfloat16)")), s.before(at, use, blamed=False)],
        [s.before(at, line.format("")), s.before(at, use)],
        params={"last": last},
    )


@site("cast", "loss", "forward", "loss_magnitude_overflow")
def loss_in_half_in_small_units(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """The way back from small units is a gradient beyond fp16's range."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    power = rng.choice([7, 8] if harm else [0])
    line = f"{name} = ({name} * 1e-{power}){{0}} * 1e{power}"
    return Draft(
        [s.after(assign, line.format(".half().float()"))], [s.after(assign, line.format(""))],
        params={"power": power},
    )  # fmt: skip


# ---- saved for backward ----------------------------------------------------------------------------


@site("hook", "saved activations", "backward")
def saved_in_half_by_a_hook(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """Activations in small units are kept for the derivative below the range of half."""
    place = _hidden(s, rng)
    if place is None:
        return None
    name, statement, owner = place
    power = rng.choice([9, 10, 11] if harm else [1, 2])
    inner = (
        f"    {name} = (({name}.float() * 1e-{power}).square() * 1e{2 * power}).to({name}.dtype)"
    )
    pack = "with torch.autograd.graph.saved_tensors_hooks(lambda t: t{0}, lambda t: t.float()):"
    return Draft(
        [s.after(statement, pack.format(".half()")), s.after(statement, inner, blamed=False)],
        [s.after(statement, pack.format("")), s.after(statement, inner)],
        module=(owner, ""),
        params={"power": power},
    )


FUNCTION = """
class Energy(torch.autograd.Function):
    # Square of a field that is kept in SI units.

    @staticmethod
    def forward(ctx, field, unit):
        si = field.float() * unit
§
        ctx.unit = unit
        return (si * si / unit**2).to(field.dtype)

    @staticmethod
    def backward(ctx, grad):
        (si,) = ctx.saved_tensors
        return (2 * grad.float() * si.float() / ctx.unit).to(grad.dtype), None
"""


@site("function", "saved activations", "backward")
def saved_in_half_by_a_function(s: Roles, rng: random.Random, harm: bool) -> Draft | None:
    """A user's autograd Function that keeps its input in half."""
    place = _hidden(s, rng)
    if place is None:
        return None
    name, statement, owner = place
    unit = rng.choice(["1e-9", "1e-10"] if harm else ["0.1", "0.01"])
    use = s.after(statement, f"{name} = Energy.apply({name}, {unit})", blamed=False)

    def function(way: str) -> list[Edit]:
        head, tail = FUNCTION.split("§\n")
        at = s.top("").start
        kept = f"        ctx.save_for_backward(si{way})\n"
        return [Edit(at, at, "\n" + head), Edit(at, at, kept, True), Edit(at, at, tail)]

    return Draft(
        [*function(".half()"), use], [*function(""), use], module=(owner, ""),
        params={"unit": unit},
    )  # fmt: skip
