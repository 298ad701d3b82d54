"""Faults of the forward pass: numbers that half precision cannot hold."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, fault
from benchmarks.faults.source import Edit, dotted, keyword, number

LAYERS = ("Linear", "Conv2d", "Conv1d")


# ---- activation_overflow


def _before_a_norm(s: Roles) -> list[tuple[str, str, ast.Assign, list[ast.Call]]]:
    """Layers whose result goes into a normalisation: fp32 does not mind its size."""
    norms = {
        (o, a) for o, a, *_ in s.layers("LayerNorm", "BatchNorm1d", "BatchNorm2d", "GroupNorm")
    }
    found = []
    for owner, attribute, made, uses in s.layers(*LAYERS):
        outer = [s.parent(u) for u in uses]
        into = [
            isinstance(o, ast.Call) and (owner, dotted(o.func).removeprefix("self.")) in norms
            for o in outer
        ]
        if all(into):
            found.append((owner, attribute, made, uses))
    return found


@fault("activation_overflow", fp32="trains")
def layer_with_huge_weights(s: Roles, rng: random.Random) -> Draft | None:
    """In a few of its outputs, which a normalisation would bring back."""
    layers = _before_a_norm(s)
    if not layers:
        return None
    owner, attribute, made, uses = rng.choice(layers)
    gain, rows = rng.choice([1e5, 1e6]), rng.choice([1, 2])
    line = s.after(made, f"self.{attribute}.weight.data[:{rows}] *= {gain:.0f}.0")
    params = {"gain": gain, "rows": rows}
    return Draft([line, *map(s.blame, uses)], module=(owner, attribute), params=params)


@fault("activation_overflow", fp32="trains")
def layer_with_huge_bias(s: Roles, rng: random.Random) -> Draft | None:
    layers = [x for x in _before_a_norm(s) if not keyword(x[2].value, "bias")]  # type: ignore
    if not layers:
        return None
    owner, attribute, made, uses = rng.choice(layers)
    bias = rng.choice([7e4, 1e5, 1e6])
    line = s.after(made, f"torch.nn.init.constant_(self.{attribute}.bias, {bias:.0f}.0)")
    return Draft([line, *map(s.blame, uses)], module=(owner, attribute), params={"bias": bias})


@fault("activation_overflow", fp32="trains")
def inputs_in_raw_units(s: Roles, rng: random.Random) -> Draft | None:
    """The first layer gets numbers that its own cast to half cannot hold."""
    places = []
    for owner, attribute, _, uses in s.layers(*LAYERS):
        for use in uses:
            function = s.function(use)
            names = {a.arg for a in function.args.args} if function else set()
            if use.args and isinstance(use.args[0], ast.Name) and use.args[0].id in names:
                places.append((owner, attribute, use))
    if not places:
        return None
    owner, attribute, use = rng.choice(places)
    gain = rng.choice([3e4, 1e5, 1e6])
    new = f"{s.segment(use.args[0])}.float() * {gain:.0f}.0"
    return Draft(
        [s.replace(use.args[0], new)], module=(owner, attribute),
        accept=("elementwise_overflow",), params={"gain": gain},
    )  # fmt: skip


@fault("activation_overflow", fp32="trains")
def gain_before_and_after_a_layer(s: Roles, rng: random.Random) -> Draft | None:
    layers = s.layers(*LAYERS)
    if not layers:
        return None
    owner, attribute, made, uses = rng.choice(layers)
    if len(uses) != 1:
        return None
    use = uses[0]
    gain = rng.choice([1e5, 3e5, 1e6])
    inner = s.segment(use)
    line = s.after(
        made,
        f"with torch.no_grad():\n    self.{attribute}.weight.mul_({gain:.0f}.0)",
    )
    return Draft(
        [line, s.replace(use, f"({inner} / {gain:.0f}.0)")],
        module=(owner, attribute),
        params={"gain": gain},
    )


# ---- attention_logit_overflow


def _logits(s: Roles) -> list[tuple[ast.BinOp, ast.expr, ast.expr, ast.expr]]:
    """``(a @ b) * c`` and the same with matmul: the whole, a, b, c."""
    found = []
    for node in s.all(ast.BinOp):
        assert isinstance(node, ast.BinOp)
        if not isinstance(node.op, ast.Mult | ast.Div):
            continue
        inner = node.left
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.MatMult):
            found.append((node, inner.left, inner.right, node.right))
        elif isinstance(inner, ast.Call) and s.segment(inner.func) in (
            "torch.matmul", "torch.bmm",
        ):  # fmt: skip
            found.append((node, inner.args[0], inner.args[1], node.right))
    return [x for x in found if s.module_class(x[0])]


@fault("attention_logit_overflow", fp32="trains")
def gain_on_queries(s: Roles, rng: random.Random) -> Draft | None:
    places = _logits(s)
    if not places:
        return None
    whole, a, b, c = rng.choice(places)
    gain = rng.choice([4e3, 8e3, 1e4])
    sign = "*" if isinstance(whole.op, ast.Mult) else "/"
    first, second = s.segment(a), s.segment(b)
    new = f"torch.matmul({first} * {gain}, {second}) {sign} {s.segment(c)} / {gain}"
    good = f"torch.matmul({first}, {second}) {sign} {s.segment(c)}"
    return Draft(
        [s.replace(whole, new)], [s.replace(whole, good)],
        module=(str(s.module_class(whole)), ""), params={"gain": gain},
    )  # fmt: skip


@fault("attention_logit_overflow", fp32="trains")
def gains_on_queries_and_keys(s: Roles, rng: random.Random) -> Draft | None:
    places = _logits(s)
    if not places:
        return None
    whole, a, b, c = rng.choice(places)
    gain = rng.choice([128.0, 192.0, 256.0])
    sign = "*" if isinstance(whole.op, ast.Mult) else "/"
    new = (
        f"torch.matmul({gain} * {s.segment(a)}, {gain} * {s.segment(b)})"
        f" {sign} {s.segment(c)} / {gain * gain}"
    )
    return Draft(
        [s.replace(whole, new)], module=(str(s.module_class(whole)), ""), params={"gain": gain}
    )


@fault("attention_logit_overflow", fp32="trains")
def projections_with_gain(s: Roles, rng: random.Random) -> Draft | None:
    """Large weights before the product, a small temperature after it."""
    places = _logits(s)
    if not places:
        return None
    whole, *_ = rng.choice(places)
    owner = str(s.module_class(whole))
    names = (
        "qkv",
        "q",
        "k",
        "query",
        "key",
        "q_proj",
        "k_proj",
        "to_q",
        "to_k",
        "wq",
        "wk",
        "to_qkv",
    )
    made = [x for x in s.layers("Linear") if x[0] == owner and x[1] in names]
    if not made:
        return None
    gain = rng.choice([200.0, 400.0, 1000.0])
    edits: list[Edit] = []
    times = 1.0
    for _, attribute, statement, _ in made:
        cut = "[: self.{0}.weight.shape[0] * 2 // 3]" if "qkv" in attribute else ""
        times *= gain * gain if "qkv" in attribute else gain
        line = f"self.{attribute}.weight.data{cut.format(attribute)}.mul_({gain})"
        edits.append(s.after(statement, line, blamed=False))
    edits.append(s.replace(whole, f"({s.segment(whole)}) / {times}"))
    return Draft(edits, module=(owner, ""), params={"gain": gain}, accept=("activation_overflow",))


# ---- mask_constant_overflow and fully_masked_row


def _fills(s: Roles) -> list[tuple[ast.Call, str, str, ast.expr]]:
    """``scores.masked_fill(mask, constant)`` in a module: call, scores, mask, constant."""
    found = []
    for call in s.calls(".masked_fill"):
        assert isinstance(call.func, ast.Attribute)
        if len(call.args) == 2 and s.module_class(call):
            value = call.args[1]
            if (
                number(value) is not None
                or "inf" in s.segment(value)
                or "finfo" in s.segment(value)
            ):
                parts = s.segment(call.func.value), s.segment(call.args[0])
                found.append((call, *parts, value))
    return found


def _filled(call: ast.Call, s: Roles, new: str, **options: object) -> Draft:
    """The softmax over the filled scores is as right a line as the fill."""
    softmax = [
        s.blame(c)
        for c in s.calls("softmax")
        if s.function(c) is s.function(call) and call not in ast.walk(c)
    ]
    edits = [s.replace(call, new), *softmax]
    return Draft(edits, module=(str(s.module_class(call)), ""), params=options)


@fault("mask_constant_overflow", fp32="trains")
def fill_with_a_constant_too_large(s: Roles, rng: random.Random) -> Draft | None:
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    value = rng.choice(["-1e9", "-1e30", "torch.finfo(torch.float32).min", "-100000.0"])
    return _filled(call, s, f"{scores}.masked_fill({mask}, {value})", value=value)


@fault("mask_constant_overflow", fp32="trains")
def mask_added_in_the_scores_dtype(s: Roles, rng: random.Random) -> Draft | None:
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    value = rng.choice(["-1e9", "-1e8", "-1e6", "torch.finfo(torch.float32).min"])
    return _filled(call, s, f"({scores} + ({mask}).to({scores}.dtype) * {value})", value=value)


@fault("mask_constant_overflow", fp32="trains")
def where_with_a_constant_tensor(s: Roles, rng: random.Random) -> Draft | None:
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    value = rng.choice(["-1e9", "-1e10", "torch.finfo(torch.float32).min"])
    return _filled(call, s, f"torch.where({mask}, torch.tensor({value}), {scores})", value=value)


@fault("mask_constant_overflow", fp32="trains")
def bias_table_cast_to_half(s: Roles, rng: random.Random) -> Draft | None:
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    value = rng.choice(["-1e9", "-1e6", "-3e38"])
    new = f"({scores} + (({mask}).float() * {value}).to({scores}.dtype))"
    return _filled(call, s, new, value=value)


@fault("fully_masked_row", fp32="fails")
def fill_with_minus_infinity(s: Roles, rng: random.Random) -> Draft | None:
    places = [x for x in _fills(s) if "inf" not in s.segment(x[3])]
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    value = rng.choice(['float("-inf")', "-torch.inf"])
    return _filled(call, s, f"{scores}.masked_fill({mask}, {value})", value=value)


@fault("fully_masked_row", fp32="fails")
def where_with_minus_infinity(s: Roles, rng: random.Random) -> Draft | None:
    places = [x for x in _fills(s) if "inf" not in s.segment(x[3])]
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    return _filled(call, s, f"torch.where({mask}, torch.full_like({scores}, -torch.inf), {scores})")


@fault("fully_masked_row", fp32="fails")
def logarithm_of_the_mask(s: Roles, rng: random.Random) -> Draft | None:
    places = [x for x in _fills(s) if "inf" not in s.segment(x[3])]
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    return _filled(call, s, f"({scores} + torch.log(1.0 - ({mask}).to({scores}.dtype)))")


# ---- elementwise_overflow, reduction_overflow, norm_eps_underflow: after a hidden activation


def _hidden(s: Roles, rng: random.Random) -> tuple[str, ast.Assign, str] | None:
    places = s.hidden()
    return rng.choice(places) if places else None


def _inserted(
    s: Roles,
    place: tuple[str, ast.Assign, str],
    bad: str,
    good: str,
    before: str = "",
    **params: object,
) -> Draft:
    """``bad`` after the activation h, ``good`` in the repair; ``before`` in both."""
    name, statement, owner = place

    def written(lines: str) -> Edit:
        # of the context and the fault, only the fault's own lines are to blame
        return s.after(statement, lines.replace("§", name))

    edits = [written(bad)]
    repaired = [written(good)]
    if before:
        context = s.after(statement, before.replace("§", name), blamed=False)
        edits, repaired = [context, *edits], [context, *repaired]
    return Draft(edits, repaired, module=(owner, ""), params=params)


@fault("elementwise_overflow", fp32="trains")
def square_in_an_rms_norm(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([500.0, 1000.0, 2000.0])
    lines = (
        f"§_e = (§{{0}} * {gain}).pow(2).mean(dim=-1, keepdim=True)\n"
        f"§ = (§ * {gain} * torch.rsqrt(§_e + 1.0)).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(""), lines.format(".float()"), gain=gain)


@fault("elementwise_overflow", fp32="trains")
def softplus_by_hand(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    beta = rng.choice([8.0, 16.0, 32.0])
    bad = f"§ = torch.log(1 + torch.exp({beta} * §)) / {beta}"
    good = f"§ = torch.nn.functional.softplus(§.float(), beta={beta}).to(§.dtype)"
    return _inserted(s, place, bad, good, beta=beta)


@fault("elementwise_overflow", fp32="trains")
def cube_of_large_units(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([40.0, 60.0, 100.0])
    line = f"§ = (§ + 0.1 * (§{{0}} * {gain}) ** 3 / {gain} ** 3).to(§.dtype)"
    return _inserted(s, place, line.format(""), line.format(".float()"), gain=gain)


@fault("elementwise_overflow", fp32="trains")
def units_changed_and_back(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([1e5, 3e5, 1e6])
    bad = f"§ = § * {gain:.0f}.0 / {gain:.0f}.0"
    good = f"§ = (§.float() * {gain:.0f}.0 / {gain:.0f}.0).to(§.dtype)"
    return _inserted(s, place, bad, good, gain=gain)


@fault("elementwise_overflow", fp32="trains")
def divided_by_a_small_number(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    small = rng.choice(["1e-5", "3e-6", "1e-6"])
    bad = f"§ = § / {small} * {small}"
    good = f"§ = (§.float() / {small} * {small}).to(§.dtype)"
    return _inserted(s, place, bad, good, small=small)


@fault("reduction_overflow", fp32="trains")
def mean_as_a_sum(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([100.0, 200.0, 400.0])
    lines = (
        f"§_s = (§{{0}} * {gain}).abs().sum() / ({gain} * §.numel())\n"
        "§ = (§ / (§_s + 0.1)).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(""), lines.format(".float()"), gain=gain)


@fault("reduction_overflow", fp32="trains")
def variance_of_large_numbers(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([600.0, 1000.0, 2000.0])
    lines = (
        f"§_v = (§{{0}} * {gain}).var(dim=-1, keepdim=True)\n"
        f"§ = (§ * {gain} / torch.sqrt(§_v + 100.0)).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(""), lines.format(".float()"), gain=gain)


@fault("reduction_overflow", fp32="trains")
def norm_of_the_whole_batch(s: Roles, rng: random.Random) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([2000.0, 4000.0])
    lines = (
        f"§_n = torch.linalg.vector_norm(§{{0}} * {gain}) / {gain}\n"
        "§ = (§ / (§_n / §.numel() ** 0.5 + 0.1)).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(""), lines.format(".float()"), gain=gain)


ROWS_DROPPED = (
    "§_has = torch.arange(§.shape[0]) % {0} != 0  # every so many items have no such feature\n"
    "§ = § * §_has.view(-1, *[1] * (§.dim() - 1)).to(§.dtype)"
)


def _eps(s: Roles, rng: random.Random, lines: str) -> Draft | None:
    place = _hidden(s, rng)
    if place is None or s.is_bf16:  # in its range no such epsilon is zero
        return None
    eps, every = rng.choice(["1e-8", "1e-9", "1e-12"]), rng.choice([3, 5, 8])
    return _inserted(
        s, place, lines.format(eps), lines.format("1e-2"), ROWS_DROPPED.format(every),
        eps=eps, every=every,
    )  # fmt: skip


@fault("norm_eps_underflow", fp32="trains")
def eps_beside_a_norm(s: Roles, rng: random.Random) -> Draft | None:
    return _eps(s, rng, "§ = § / (§.norm(dim=-1, keepdim=True) + {0}) * §.shape[-1] ** 0.5")


@fault("norm_eps_underflow", fp32="trains")
def eps_in_a_clamp(s: Roles, rng: random.Random) -> Draft | None:
    return _eps(s, rng, "§ = § / §.norm(dim=-1, keepdim=True).clamp(min={0}) * §.shape[-1] ** 0.5")


@fault("norm_eps_underflow", fp32="trains")
def eps_in_a_reciprocal_root(s: Roles, rng: random.Random) -> Draft | None:
    return _eps(s, rng, "§ = § * torch.rsqrt(§.pow(2).mean(dim=-1, keepdim=True) + {0})")


@fault("norm_eps_underflow", fp32="trains")
def eps_beside_a_sum_of_weights(s: Roles, rng: random.Random) -> Draft | None:
    return _eps(s, rng, "§ = § / (§.abs().sum(dim=-1, keepdim=True) + {0}) * §.shape[-1]")


@fault("norm_eps_underflow", fp32="trains")
def eps_beside_a_deviation(s: Roles, rng: random.Random) -> Draft | None:
    lines = (
        "§_c = § - §.mean(dim=-1, keepdim=True)\n"
        "§ = §_c / (§_c.abs().mean(dim=-1, keepdim=True) + {0})"
    )
    return _eps(s, rng, lines)


# ---- log_zero_saturation

SOFTMAX_NLL = """
def token_nll(logits, target):
    probs = torch.softmax({gain} * logits, dim=-1)
    picked = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -torch.log(picked).mean()
"""
SOFTMAX_NLL_RIGHT = """
def token_nll(logits, target):
    logp = torch.log_softmax({gain} * logits.float(), dim=-1)
    picked = logp.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -picked.mean()
"""
BINARY = """
def weighted_bce(logits, target):
    p = torch.sigmoid({gain} * logits)
    return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()
"""
BINARY_RIGHT = """
def weighted_bce(logits, target):
    z = {gain} * logits.float()
    ls = torch.nn.functional.logsigmoid
    return -(target * ls(z) + (1 - target) * ls(-z)).mean()
"""


def _loss_rewritten(
    s: Roles, rng: random.Random, names: tuple[str, ...], bad: str, good: str, new: str
) -> Draft | None:
    calls = [c for c in s.calls(*names) if len(c.args) in (0, 2) and not c.keywords]
    if not calls:
        return None
    gain = rng.choice([8.0, 16.0, 32.0])
    edits = [
        s.replace(c.func, new, blamed=False) if c.args else s.replace(c, new, blamed=False)
        for c in calls
    ]
    top = s.top(bad.format(gain=gain))
    marked = Edit(top.start, top.end, top.new, True)
    return Draft([marked, *edits], [s.top(good.format(gain=gain)), *edits], params={"gain": gain})


@fault("log_zero_saturation", fp32="trains")
def logarithm_of_a_softmax(s: Roles, rng: random.Random) -> Draft | None:
    names = ("F.cross_entropy", "functional.cross_entropy", "CrossEntropyLoss")
    return _loss_rewritten(s, rng, names, SOFTMAX_NLL, SOFTMAX_NLL_RIGHT, "token_nll")


@fault("log_zero_saturation", fp32="trains")
def logarithm_of_a_sigmoid(s: Roles, rng: random.Random) -> Draft | None:
    names = ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss")
    return _loss_rewritten(s, rng, names, BINARY, BINARY_RIGHT, "weighted_bce")


@fault("log_zero_saturation", fp32="trains")
def log_of_a_gate(s: Roles, rng: random.Random) -> Draft | None:
    """A log-gate in a hidden layer, through the probability."""
    place = _hidden(s, rng)
    if place is None:
        return None
    gain = rng.choice([1.0, 1.5, 2.0, 3.0])
    bad = f"§ = § + 0.02 * torch.log(1 - torch.sigmoid({gain} * §))"
    good = f"§ = § + 0.02 * torch.nn.functional.logsigmoid(-{gain} * §)"
    return _inserted(s, place, bad, good, gain=gain)
