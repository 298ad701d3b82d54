"""Faults of the backward pass: derivatives that are infinite, and Functions without autocast."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, fault
from benchmarks.faults.plants.everywhere import _data_lines, _inputs
from benchmarks.faults.plants.range import ROWS_DROPPED, _hidden, _inserted
from benchmarks.faults.source import keyword

# ---- singular_gradient


def _singular(
    s: Roles, rng: random.Random, bad: str, good: str, rows: bool = False
) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    before = ROWS_DROPPED.format(rng.choice([3, 5, 8])) if rows else ""
    return _inserted(s, place, bad, good, before)


@fault("singular_gradient", fp32="fails")
def signed_root(s: Roles, rng: random.Random) -> Draft | None:
    line = "§ = torch.sign(§) * torch.sqrt(§.abs(){0})"
    return _singular(s, rng, line.format(""), line.format(" + 1e-2"), rows=True)


@fault("singular_gradient", fp32="fails")
def power_below_one(s: Roles, rng: random.Random) -> Draft | None:
    line = "§ = §.abs(){0}.pow(" + rng.choice(["0.5", "0.75", "1 / 3"]) + ")"
    return _singular(s, rng, line.format(""), line.format(".add(1e-2)"), rows=True)


@fault("singular_gradient", fp32="fails")
def root_of_a_row_energy(s: Roles, rng: random.Random) -> Draft | None:
    line = "§ = § / (1 + torch.sqrt(§.pow(2).sum(dim=-1, keepdim=True){0}))"
    return _singular(s, rng, line.format(""), line.format(" + 1e-2"), rows=True)


@fault("singular_gradient", fp32="fails")
def deviation_of_constant_rows(s: Roles, rng: random.Random) -> Draft | None:
    line = "§ = § / (torch.sqrt(§.var(dim=-1, keepdim=True){0}) + 0.1)"
    return _singular(s, rng, line.format(""), line.format(" + 1e-2"), rows=True)


@fault("singular_gradient", fp32="fails")
def angle_of_a_saturated_cosine(s: Roles, rng: random.Random) -> Draft | None:
    gain = rng.choice([20.0, 50.0])
    line = f"§ = § + 0.1 * torch.acos(torch.tanh({gain} * §){{0}})"
    return _singular(s, rng, line.format(""), line.format(".clamp(-0.9, 0.9)"))


@fault("singular_gradient", fp32="fails")
def distance_from_the_start(s: Roles, rng: random.Random) -> Draft | None:
    """A pull towards the initial weights, through the norm, which is zero at first."""
    losses = s.losses()
    if len(losses) != 1 or len(s.optimizer_makers) != 1:
        return None
    name, assign = losses[0]
    maker = s.optimizer_makers[0]
    model = s.trained(maker)
    if model is None:
        return None
    same = s.function(maker) is s.function(assign)
    if same or s.function(maker) is None:
        start = "start"
    elif model.startswith("self."):
        start = "self.start"
    else:
        return None
    weight = rng.choice([1e-3, 1e-2])
    copy = f"{start} = [p.detach().clone() for p in {model}.parameters()]"
    made = s.after(s.statement(maker), copy, blamed=False)
    line = (
        f"{name} = {name} + {weight} * sum("
        f"((p - q) ** 2).sum(){{0}} for p, q in zip({model}.parameters(), {start}))"
    )
    return Draft(
        [made, s.after(assign, line.format(".sqrt()"))],
        [made, s.after(assign, line.format(""))],
        params={"weight": weight},
    )


# ---- masked_branch_gradient


@fault("masked_branch_gradient", fp32="fails")
def signed_root_by_where(s: Roles, rng: random.Random) -> Draft | None:
    power = rng.choice(["0.5", "0.7"])
    bad = f"§ = torch.where(§ > 0, §.pow({power}), -((-§).pow({power})))"
    good = f"§ = torch.sign(§) * (§.abs() + 1e-2).pow({power})"
    return _singular(s, rng, bad, good)


@fault("masked_branch_gradient", fp32="fails")
def root_of_the_positive_part(s: Roles, rng: random.Random) -> Draft | None:
    shift = rng.choice([0.05, 0.1, 0.2])
    bad = f"§ = torch.where(§ > {shift}, torch.sqrt(§), torch.zeros_like(§))"
    good = (
        f"§_ok = § > {shift}\n"
        "§ = torch.where(§_ok, torch.sqrt(torch.where(§_ok, §, torch.ones_like(§))), torch.zeros_like(§))"
    )
    return _singular(s, rng, bad, good)


@fault("masked_branch_gradient", fp32="fails")
def quotient_where_there_is_a_divisor(s: Roles, rng: random.Random) -> Draft | None:
    bad = "§_t = §.sum(dim=-1, keepdim=True)\n§ = torch.where(§_t != 0, § / §_t.abs().sqrt(), torch.zeros_like(§))"
    good = "§_t = §.sum(dim=-1, keepdim=True).abs()\n§ = § / (§_t + 0.05).sqrt()"
    return _singular(s, rng, bad, good, rows=True)


@fault("masked_branch_gradient", fp32="fails")
def logarithm_filled_afterwards(s: Roles, rng: random.Random) -> Draft | None:
    floor = rng.choice([0.02, 0.05])
    bad = f"§ = torch.log(§.abs()).masked_fill(§.abs() < {floor}, -3.0)"
    good = f"§ = torch.log(§.abs().clamp(min={floor}))"
    return _singular(s, rng, bad, good, rows=True)


@fault("masked_branch_gradient", fp32="fails")
def power_clamped_afterwards(s: Roles, rng: random.Random) -> Draft | None:
    power = rng.choice(["0.3", "0.5", "1.5"])
    bad = f"§ = §.pow({power}).masked_fill(§ <= 0.05, 0.0)"
    good = f"§ = §.clamp(min=0.05).pow({power})"
    draft = _singular(s, rng, bad, good)
    if draft is not None:  # an exact zero has an infinite slope as well
        draft.accept = ("singular_gradient",)
    return draft


# ---- unsafe_op_under_autocast

FUNCTION = """
class {name}(torch.autograd.Function):
    @staticmethod{forward}
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return {forward_product}

    @staticmethod{backward}
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return {backward_product}, grad.flatten(0, -2).t() @ x.flatten(0, -2)
"""


def _function(s: Roles, rng: random.Random, name: str, there: str, back: str) -> Draft | None:
    layers = s.layers("Linear")
    if not layers:
        return None
    owner, attribute, made, uses = rng.choice(layers)
    use = uses[0]
    biased = keyword(made.value, "bias") is None  # type: ignore[arg-type]
    call = f"{name}.apply({s.segment(use.args[0])}, self.{attribute}.weight)"
    call = f"({call} + self.{attribute}.bias)" if biased else call
    wraps = (
        '\n    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)',
        '\n    @torch.amp.custom_bwd(device_type="cpu")',
    )
    products = {"name": name, "forward_product": there, "backward_product": back}
    bad = FUNCTION.format(**products, forward="", backward="")
    good = FUNCTION.format(**products, forward=wraps[0], backward=wraps[1])
    top, edit = s.top(bad), s.replace(use, call)
    return Draft(
        [type(top)(top.start, top.end, top.new, True), edit],
        [s.top(good), edit],
        module=(owner, ""),
        params={"layer": attribute},
    )


@fault("unsafe_op_under_autocast", fp32="trains")
def linear_function_without_custom_fwd(s: Roles, rng: random.Random) -> Draft | None:
    name = rng.choice(["FastLinear", "LinearFn", "SaveMemoryLinear"])
    return _function(s, rng, name, "x @ weight.t()", "grad @ weight")


@fault("unsafe_op_under_autocast", fp32="trains")
def functional_linear_without_custom_fwd(s: Roles, rng: random.Random) -> Draft | None:
    there = "torch.nn.functional.linear(x, weight)"
    return _function(s, rng, "RecomputedLinear", there, "torch.matmul(grad, weight)")


@fault("unsafe_op_under_autocast", fp32="trains")
def einsum_function_without_custom_fwd(s: Roles, rng: random.Random) -> Draft | None:
    there = 'torch.einsum("...i,oi->...o", x, weight)'
    return _function(s, rng, "Project", there, 'torch.einsum("...o,oi->...i", grad, weight)')


# ---- scaled_gradient_penalty


def _penalty(s: Roles, rng: random.Random, of: str) -> Draft | None:
    """A penalty on the gradient at the inputs, of a scaled loss; the repair divides first."""
    losses, inputs = s.losses(), _inputs(s)
    if len(losses) != 1 or not inputs or len(s.of_scaler("scale")) != 1:
        return None
    (name, assign), (x, statement, _) = losses[0], inputs[0]
    if s.function(assign) is not s.function(statement) or assign.lineno < statement.lineno:
        return None
    scaler = s.owner(s.of_scaler("scale")[0])
    weight = rng.choice([0.01, 0.05, 0.1])
    ready = s.before(
        _data_lines(s, statement), f"{x} = {x}.detach().requires_grad_(True)", blamed=False
    )
    lines = (
        f"(slope,) = torch.autograd.grad({scaler}.scale({name}), {x}, create_graph=True)\n"
        "{0}"
        f"{name} = {name} + {weight} * {of}"
    )
    right = f"slope = slope / {scaler}.get_scale()\n"
    at = _data_lines(s, assign)
    return Draft(
        [ready, s.after(at, lines.format(""))],
        [ready, s.after(at, lines.format(right))],
        params={"weight": weight},
    )


@fault("scaled_gradient_penalty", fp32="trains")
def penalty_on_squared_slopes(s: Roles, rng: random.Random) -> Draft | None:
    return _penalty(s, rng, "slope.float().flatten(1).pow(2).sum(1).mean()")


@fault("scaled_gradient_penalty", fp32="trains")
def penalty_on_slope_norms(s: Roles, rng: random.Random) -> Draft | None:
    return _penalty(s, rng, "(slope.float().flatten(1).pow(2).sum(1) + 1e-8).sqrt().mean()")


@fault("scaled_gradient_penalty", fp32="trains")
def penalty_on_unit_slopes(s: Roles, rng: random.Random) -> Draft | None:
    return _penalty(
        s, rng, "((slope.float().flatten(1).pow(2).sum(1) + 1e-8).sqrt() - 1).pow(2).mean()"
    )


@fault("scaled_gradient_penalty", fp32="trains")
def division_of_slopes_left_out(s: Roles, rng: random.Random) -> Draft | None:
    """Of a script that has a penalty: the division by the scale is taken away."""
    places = [
        a
        for a in s.all(ast.Assign)
        if isinstance(a, ast.Assign)
        and isinstance(a.value, ast.ListComp)
        and "get_scale" in s.segment(a)
    ]
    if not places:
        return None
    taken = [s.blame(s.statement(c)) for c in s.calls("autograd.grad")]
    return Draft([s.delete(places[0]), *taken])
