"""Faults that no precision survives: data, initial weights, empty means, learning rates."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, fault
from benchmarks.faults.source import keyword


def _inputs(s: Roles) -> list[tuple[str, ast.stmt, ast.Call]]:
    """Float inputs of the model in the training loop: name, the statement that calls the model."""
    models = {s.segment(m.targets[0]) for m in s.model_makers()}
    found = []
    for call, _ in s.loss_ends:
        for made in s.all(ast.Call):
            assert isinstance(made, ast.Call)
            if s.segment(made.func) not in models or not made.args:
                continue
            if s.function(made) is not s.function(call) or not s.loops(call):
                continue
            if s.loops(call)[0] not in s.above(made):
                continue
            if isinstance(made.args[0], ast.Name):
                found.append((made.args[0].id, s.statement(made), made))
    return found


def _data_lines(s: Roles, statement: ast.stmt) -> ast.stmt:
    """The with statement around a call, so that data are touched outside autocast."""
    for at in s.above(statement):
        if isinstance(at, ast.With):
            return at
        if isinstance(at, ast.For | ast.While | ast.FunctionDef):
            break
    return statement


# ---- bad_input_data


def _bad_data(s: Roles, rng: random.Random, lines: str, **params: object) -> Draft | None:
    places = _inputs(s)
    if not places:
        return None
    name, statement, _ = rng.choice(places)
    at = _data_lines(s, statement)
    return Draft([s.before(at, lines.replace("§", name))], params=params)


@fault("bad_input_data", fp32="fails")
def samples_that_are_nan(s: Roles, rng: random.Random) -> Draft | None:
    share = rng.choice([0.02, 0.05, 0.2])
    lines = (
        f"§_bad = torch.rand(§.shape[0]) < {share}  # sensor dropped out\n"
        '§ = §.clone()\n§[§_bad] = float("nan")'
    )
    return _bad_data(s, rng, lines, share=share)


@fault("bad_input_data", fp32="fails")
def samples_standardised_by_zero(s: Roles, rng: random.Random) -> Draft | None:
    share = rng.choice([0.02, 0.05, 0.2])
    lines = (
        f"§ = §.clone()\n§[torch.rand(§.shape[0]) < {share}] = 0.25  # blank recordings\n"
        "§_f = §.flatten(1)\n"
        "§_mean = §_f.mean(1).view(-1, *[1] * (§.dim() - 1))\n"
        "§_std = (§_f - §_f[:, :1]).abs().amax(1).view(-1, *[1] * (§.dim() - 1))\n"
        "§ = (§ - §_mean) / §_std"
    )
    return _bad_data(s, rng, lines, share=share)


@fault("bad_input_data", fp32="fails")
def samples_that_are_infinite(s: Roles, rng: random.Random) -> Draft | None:
    share = rng.choice([0.02, 0.05])
    lines = f"§ = torch.where(torch.rand(§.shape) < {share} / 10, torch.inf, §)"
    return _bad_data(s, rng, lines, share=share)


# ---- not_amp_divergence


@fault("not_amp_divergence", fp32="fails")
def learning_rate_far_too_high(s: Roles, rng: random.Random) -> Draft | None:
    places = [c for c in s.optimizer_makers if keyword(c, "lr") is not None]
    if not places:
        return None
    by = rng.choice([300, 1000, 10000])
    edits = []
    for call in places:
        rate = keyword(call, "lr")
        assert rate is not None
        edits.append(s.replace(rate, f"{s.segment(rate)} * {by}"))
    return Draft(edits, params={"factor": by})


@fault("not_amp_divergence", fp32="fails")
def momentum_above_one(s: Roles, rng: random.Random) -> Draft | None:
    places = [c for c in s.optimizer_makers if s.segment(c.func).endswith("SGD")]
    if not places:
        return None
    call = rng.choice(places)
    momentum = keyword(call, "momentum")
    if momentum is None:
        return None
    by = rng.choice([1.2, 1.5, 2.0])
    return Draft([s.replace(momentum, str(by))], params={"momentum": by})


# ---- bad_initial_state


@fault("bad_initial_state", fp32="fails")
def weights_divided_by_zero(s: Roles, rng: random.Random) -> Draft | None:
    layers = s.layers("Linear", "Conv2d", "Conv1d")
    if not layers:
        return None
    owner, attribute, made, _ = rng.choice(layers)
    way = rng.choice(
        [
            "torch.nn.init.zeros_(self.{0}.weight)\nself.{0}.weight.data /= self.{0}.weight.data.norm()",
            "self.{0}.weight.data = torch.log(self.{0}.weight.data)",
            "self.{0}.weight.data.normal_().div_(self.{0}.weight.data.std() - self.{0}.weight.data.std())",
        ]
    )
    return Draft([s.after(made, way.format(attribute))], module=(owner, attribute))


@fault("bad_initial_state", fp32="fails")
def loaded_weights_hold_nan(s: Roles, rng: random.Random) -> Draft | None:
    makers = s.model_makers()
    if not makers:
        return None
    maker = rng.choice(makers)
    model = s.segment(maker.targets[0])
    nth, value = rng.choice([0, 1, 2, -1]), rng.choice(["nan", "inf"])
    lines = (
        f"state = {model}.state_dict()\n"
        f"broken = [k for k, v in state.items() if v.is_floating_point()][{nth}]\n"
        f'state[broken].view(-1)[0] = float("{value}")\n'
        f"{model}.load_state_dict(state)"
    )
    return Draft([s.after(maker, lines)], params={"tensor": nth, "value": value})


@fault("bad_initial_state", fp32="fails")
def one_parameter_never_filled(s: Roles, rng: random.Random) -> Draft | None:
    """What torch.empty may return, made certain."""
    places = [
        c for c in s.calls("torch.zeros", "torch.ones", "torch.randn")
        if isinstance(s.parent(c), ast.Call | ast.BinOp) and "Parameter" in s.segment(s.statement(c))
    ]  # fmt: skip
    if not places:
        return None
    call = rng.choice(places)
    owner = s.module_class(call)
    size = ", ".join(s.segment(a) for a in call.args)
    return Draft(
        [s.replace(call, f'torch.empty({size}).fill_(float("nan"))')],
        module=(owner, "") if owner else None,
    )


# ---- empty_loss_reduction


@fault("empty_loss_reduction", fp32="fails")
def mean_of_a_rare_part(s: Roles, rng: random.Random) -> Draft | None:
    """An extra term over the samples of a rare kind, of which some batches have none."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    names = {n.id for n in ast.walk(assign.value) if isinstance(n, ast.Name)}
    tensors = [
        a.targets[0].id
        for a in s.all(ast.Assign)
        if s.function(a) is s.function(assign)  # type: ignore[union-attr]
        and isinstance(a.targets[0], ast.Name)  # type: ignore[union-attr]
        and a.targets[0].id in names  # type: ignore[union-attr]
        and a.targets[0].id != name  # type: ignore[union-attr]
        and a.lineno < assign.lineno  # type: ignore[union-attr]
    ]
    if not tensors:
        return None
    out, share = rng.choice(tensors), rng.choice([0.02, 0.05])
    lines = (
        f"rare = torch.rand({out}.shape[0]) < {share}\n"
        f"energy = {out}.float().flatten(1).pow(2).mean(1) if {out}.dim() > 1 else {out}.float().pow(2)\n"
        f"{name} = {name} + 0.01 * (energy * rare).sum() / rare.sum(){{0}}"
    )
    return Draft(
        [s.after(assign, lines.format(""))],
        [s.after(assign, lines.format(".clamp(min=1)"))],
        params={"share": share, "of": out},
    )


@fault("empty_loss_reduction", fp32="fails")
def count_not_guarded(s: Roles, rng: random.Random) -> Draft | None:
    """``.clamp(min=1)`` of a divisor is taken away."""
    calls = [
        c
        for c in s.calls(".clamp")
        if s.segment(c).endswith(("(min=1)", "(min=1.0)"))
        and isinstance(s.parent(c), ast.BinOp)
        and isinstance(s.parent(c).op, ast.Div)  # type: ignore[union-attr]
    ]
    if not calls:
        return None
    call = rng.choice(calls)
    return Draft([s.replace(call, s.owner(call))], accept=("bad_input_data",))


@fault("empty_loss_reduction", fp32="fails")
def weights_that_sum_to_zero(s: Roles, rng: random.Random) -> Draft | None:
    """A weighted loss whose weights are all zero in some batches."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    share = rng.choice([0.1, 0.2, 0.3])
    lines = (
        f"weight = (torch.rand(()) > {share}).float() * torch.ones(8)\n"
        f"{name} = ({name} * weight).sum() / weight.sum(){{0}}"
    )
    return Draft(
        [s.after(assign, lines.format(""))],
        [s.after(assign, lines.format(".clamp(min=1.0)"))],
        params={"share": share},
    )
