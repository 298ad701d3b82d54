"""Harmless transformations that look like faults."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, lookalike
from benchmarks.faults.plants.derivatives import _function
from benchmarks.faults.plants.everywhere import _data_lines, _inputs
from benchmarks.faults.plants.range import _fills, _hidden, _inserted
from benchmarks.faults.plants.scale import _made
from benchmarks.faults.source import keyword


@lookalike
def as_written(s: Roles, rng: random.Random) -> Draft | None:
    """The program itself, in whatever form was drawn."""
    return Draft([])


# ---- scales


@lookalike
def scale_searched_from_high(s: Roles, rng: random.Random) -> Draft | None:
    """A few skips at the start."""
    power = rng.choice([20, 22, 24])
    return _scalers(s, init_scale=f"2.0**{power}")


@lookalike
def static_scale(s: Roles, rng: random.Random) -> Draft | None:
    return _scalers(s, init_scale=rng.choice([256.0, 1024.0, 4096.0]), growth_interval=10**9)


@lookalike
def scale_that_grows_often(s: Roles, rng: random.Random) -> Draft | None:
    """From a low start; a rare skip where it meets the limit."""
    return _scalers(s, init_scale=rng.choice([64.0, 256.0]), growth_interval=rng.choice([8, 12]))


@lookalike
def scale_set_by_hand(s: Roles, rng: random.Random) -> Draft | None:
    updates = s.of_scaler("update")
    if not updates:
        return None
    scale = rng.choice([512.0, 1024.0, 2048.0])
    return Draft(
        [s.replace(c, f"{s.owner(c)}.update({scale})") for c in updates], params={"scale": scale}
    )


def _scalers(s: Roles, **options: object) -> Draft | None:
    if not s.scaler_makers:
        return None
    return Draft([_made(s, c, **options) for c in s.scaler_makers], params=options)


# ---- clipping and gradients


@lookalike
def clip_with_a_scaled_threshold(s: Roles, rng: random.Random) -> Draft | None:
    unscales = s.of_scaler("unscale_")
    clips = [c for c in s.clips if len(c.args) == 2]
    if len(unscales) != 1 or len(clips) != 1 or s.function(clips[0]) is not s.function(unscales[0]):
        return None
    limit = clips[0].args[1]
    scaled = s.replace(limit, f"{s.segment(limit)} * {s.owner(unscales[0])}.get_scale()")
    return Draft([s.delete(s.statement(unscales[0])), scaled])


@lookalike
def clip_that_never_clips(s: Roles, rng: random.Random) -> Draft | None:
    clips = [c for c in s.clips if len(c.args) == 2]
    if len(clips) != 1:
        return None
    return Draft([s.replace(clips[0].args[1], rng.choice(["1e9", 'float("inf")', "1e4"]))])


@lookalike
def gradients_unscaled_by_hand(s: Roles, rng: random.Random) -> Draft | None:
    """With the check and the step that the scaler would have done, at a static scale."""
    steps, updates = s.steps(), s.of_scaler("update")
    if len(steps) != 1 or len(updates) != 1 or s.of_scaler("unscale_"):
        return None
    owner, optimizer = s.owner(steps[0]), s.segment(steps[0].args[0])
    lines = (
        f"grads = [p.grad for g in {optimizer}.param_groups for p in g['params'] if p.grad is not None]\n"
        f"torch._foreach_div_(grads, {owner}.get_scale())\n"
        f"if all(torch.isfinite(g).all() for g in grads):\n    {optimizer}.step()"
    )
    step = s.statement(steps[0])
    return Draft([s.before(step, lines), s.delete(step), s.delete(s.statement(updates[0]))])


@lookalike
def gradient_noise(s: Roles, rng: random.Random) -> Draft | None:
    unscales = s.of_scaler("unscale_")
    if len(unscales) != 1:
        return None
    optimizer = s.segment(unscales[0].args[0])
    lines = (
        f"for group in {optimizer}.param_groups:\n    for p in group['params']:\n"
        "        if p.grad is not None:\n            p.grad.add_(1e-4 * torch.randn_like(p.grad))"
    )
    return Draft([s.after(s.statement(unscales[0]), lines)])


# ---- parts of the model that get no or zero gradients


def _after_model(s: Roles, rng: random.Random, lines: str) -> Draft | None:
    makers = s.model_makers()
    if not makers:
        return None
    maker = rng.choice(makers)
    return Draft([s.after(maker, lines.replace("§", s.segment(maker.targets[0])))])


@lookalike
def first_parameters_frozen(s: Roles, rng: random.Random) -> Draft | None:
    n = rng.choice([1, 2])
    return _after_model(
        s, rng, f"for p in list(§.parameters())[:{n}]:\n    p.requires_grad_(False)"
    )


@lookalike
def last_layer_starts_at_zero(s: Roles, rng: random.Random) -> Draft | None:
    """Everything below has gradients that are exactly zero in the first step."""
    return _after_model(s, rng, "torch.nn.init.zeros_(list(§.parameters())[-1])")


@lookalike
def dead_units(s: Roles, rng: random.Random) -> Draft | None:
    layers = [x for x in s.layers("Linear") if keyword(x[2].value, "bias") is None]  # type: ignore
    if not layers:
        return None
    _, attribute, made, _ = rng.choice(layers)
    share = rng.choice([3, 4])
    lines = (
        "with torch.no_grad():\n"
        f"    self.{attribute}.bias[:: {share}] = -4.0\n    self.{attribute}.weight[:: {share}] = 0.0"
    )
    return Draft([s.after(made, lines)])


@lookalike
def parameter_that_is_not_used(s: Roles, rng: random.Random) -> Draft | None:
    return _after_model(
        s, rng, '§.register_parameter("unused", torch.nn.Parameter(torch.zeros(5)))'
    )


@lookalike
def rectified_half_of_everything(s: Roles, rng: random.Random) -> Draft | None:
    return _hidden_line(s, rng, "§ = § + torch.relu(§ - 0.5)")


# ---- infinities and NaN that are meant


def _hidden_line(s: Roles, rng: random.Random, lines: str) -> Draft | None:
    place = _hidden(s, rng)
    if place is None:
        return None
    draft = _inserted(s, place, lines, "pass")
    draft.repaired = []
    return draft


@lookalike
def mask_in_the_scores_dtype(s: Roles, rng: random.Random) -> Draft | None:
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    return Draft(
        [s.replace(call, f"{scores}.masked_fill({mask}, torch.finfo({scores}.dtype).min)")]
    )


@lookalike
def infinity_that_a_clamp_takes_away(s: Roles, rng: random.Random) -> Draft | None:
    """Only for a printed number, without gradients."""
    return _hidden_line(s, rng, "§_peak = torch.exp(20 * §.detach()).clamp(max=1e4).mean()")


@lookalike
def statistics_that_overflow(s: Roles, rng: random.Random) -> Draft | None:
    """A metric is infinite in half, and nothing is made of it."""
    gain = rng.choice([1e5, 1e6])
    return _hidden_line(s, rng, f"self.last_energy = (§.detach() * {gain}).pow(2).sum()")


@lookalike
def perplexity_that_is_infinite(s: Roles, rng: random.Random) -> Draft | None:
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    return Draft([s.after(assign, f"perplexity = torch.exp(1000 * {name}.detach().abs())")])


@lookalike
def infinite_loss_that_is_skipped(s: Roles, rng: random.Random) -> Draft | None:
    losses = s.losses()
    if len(losses) != 1 or len(s.backwards) != 1:
        return None
    name, assign = losses[0]
    call = s.backwards[0][0]
    if not s.loops(call) or s.loops(call) != s.loops(assign):
        return None
    share = rng.choice([0.03, 0.06])
    lines = (
        f"if torch.rand(()) < {share}:\n    {name} = {name} / 0.0  # a sample without a target\n"
        f"if not torch.isfinite({name}):\n    continue"
    )
    return Draft([s.before(s.statement(call), lines)], params={"share": share})


@lookalike
def broken_samples_that_are_dropped(s: Roles, rng: random.Random) -> Draft | None:
    places = _inputs(s)
    if not places:
        return None
    name, statement, _ = rng.choice(places)
    lines = (
        "§ = §.clone()\n§[torch.rand(§.shape[0]) < 0.03] = float('nan')\n"
        "§ = torch.nan_to_num(§, nan=0.0)"
    ).replace("§", name)
    return Draft([s.before(_data_lines(s, statement), lines)])


@lookalike
def where_with_a_safe_branch(s: Roles, rng: random.Random) -> Draft | None:
    lines = (
        "§_ok = § > 0.1\n"
        "§ = § + 0.1 * torch.where(§_ok, torch.sqrt(torch.where(§_ok, §, torch.ones_like(§))), torch.zeros_like(§))"
    )
    return _hidden_line(s, rng, lines)


@lookalike
def norm_with_a_large_epsilon(s: Roles, rng: random.Random) -> Draft | None:
    eps = rng.choice(["1e-3", "1e-2"])
    return _hidden_line(
        s, rng, f"§ = § * torch.rsqrt(§.float().pow(2).mean(-1, keepdim=True) + {eps}).to(§.dtype)"
    )


@lookalike
def fp32_island(s: Roles, rng: random.Random) -> Draft | None:
    lines = (
        'with torch.autocast("cpu", enabled=False):\n'
        "    §_big = (§.float() * 1e5).pow(2).mean(dim=-1, keepdim=True)\n"
        "§ = (§ * (1 + 0.0 * §_big.detach().clamp(max=1.0))).to(§.dtype)"
    )
    return _hidden_line(s, rng, lines)


# ---- losses, optimizers, bookkeeping


@lookalike
def loss_in_fp64(s: Roles, rng: random.Random) -> Draft | None:
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    return Draft([s.after(assign, f"{name} = {name}.double()")])


@lookalike
def mean_with_a_guard(s: Roles, rng: random.Random) -> Draft | None:
    """A weighted loss of which many batches have no weight."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    lines = (
        "weight = (torch.rand(()) > 0.15).float() * torch.ones(4)\n"
        f"{name} = ({name} * weight).sum() / weight.sum().clamp(min=1)"
    )
    return Draft([s.after(assign, lines)])


@lookalike
def running_loss_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """Only printed."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    return Draft([s.after(assign, f"shown = {name}.detach().to(torch.float16)")])


@lookalike
def moving_average_in_fp32(s: Roles, rng: random.Random) -> Draft | None:
    steps, makers = s.steps(), s.model_makers()
    if len(steps) != 1 or len(makers) != 1 or s.function(makers[0]) is not s.function(steps[0]):
        return None
    model = s.segment(makers[0].targets[0])
    first = f"average = [p.detach().clone() for p in {model}.parameters()]"
    lines = (
        f"with torch.no_grad():\n    for a, p in zip(average, {model}.parameters()):\n"
        "        a.lerp_(p, 0.001)"
    )
    return Draft([s.after(makers[0], first), s.after(s.statement(steps[0]), lines)])


@lookalike
def average_copy_in_bf16(s: Roles, rng: random.Random) -> Draft | None:
    """A snapshot for sending away, rounded; nothing is added to it."""
    steps, makers = s.steps(), s.model_makers()
    if len(steps) != 1 or len(makers) != 1 or s.function(makers[0]) is not s.function(steps[0]):
        return None
    model = s.segment(makers[0].targets[0])
    lines = f"snapshot = [p.detach().bfloat16() for p in {model}.parameters()]"
    return Draft([s.after(s.statement(steps[0]), lines)])


@lookalike
def larger_epsilon_of_adam(s: Roles, rng: random.Random) -> Draft | None:
    made = [c for c in s.optimizer_makers if s.segment(c.func).endswith(("Adam", "AdamW"))]
    if not made or any(keyword(c, "eps") for c in made):
        return None
    eps = rng.choice(["1e-6", "1e-7"])
    return Draft(
        [s.replace(c, s.segment(c)[:-1].rstrip().rstrip(",") + f", eps={eps})") for c in made]
    )


@lookalike
def forward_without_gradients(s: Roles, rng: random.Random) -> Draft | None:
    """The model is run once more on the batch, for a metric."""
    places = _inputs(s)
    if not places:
        return None
    _, statement, call = rng.choice(places)
    if not isinstance(statement, ast.Assign):
        return None
    return Draft([s.after(statement, f"with torch.no_grad():\n    again = {s.segment(call)}")])


@lookalike
def layer_recomputed(s: Roles, rng: random.Random) -> Draft | None:
    """Activation checkpointing."""
    layers = s.layers("Linear", "Conv2d", "Conv1d")
    if not layers:
        return None
    _, attribute, _, uses = rng.choice(layers)
    use = uses[0]
    given = s.segment(use.args[0])
    new = f"torch.utils.checkpoint.checkpoint(self.{attribute}, {given}, use_reentrant=False)"
    return Draft([s.top("import torch.utils.checkpoint"), s.replace(use, new)])


@lookalike
def dropped_out(s: Roles, rng: random.Random) -> Draft | None:
    p = rng.choice([0.1, 0.3])
    return _hidden_line(
        s,
        rng,
        f"§ = torch.nn.functional.dropout(§, {p}, training=self.training and §.requires_grad)",
    )


@lookalike
def large_numbers_that_fit(s: Roles, rng: random.Random) -> Draft | None:
    by = rng.choice([256.0, 512.0, 1024.0])
    return _hidden_line(s, rng, f"§ = § * {by} / {by}")


@lookalike
def batches_without_a_loss(s: Roles, rng: random.Random) -> Draft | None:
    """Every gradient of some steps is exactly zero."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    share = rng.choice([0.1, 0.2])
    return Draft([s.after(assign, f"{name} = {name} * (torch.rand(()) > {share})")])


@lookalike
def metric_over_nothing(s: Roles, rng: random.Random) -> Draft | None:
    """A printed average is NaN where there was nothing to average."""
    losses = s.losses()
    if not losses:
        return None
    name, assign = rng.choice(losses)
    lines = (
        f"hard = {name}.detach().reshape(-1)\n"
        "hard_mean = hard[hard > 1e6].mean()  # NaN where no sample is that hard"
    )
    return Draft([s.after(assign, lines)])


@lookalike
def loss_in_two_halves(s: Roles, rng: random.Random) -> Draft | None:
    if len(s.backwards) != 1:
        return None
    call, loss = s.backwards[0]
    scale = s.owner(call.func.value)  # type: ignore[attr-defined]
    text = f"({s.segment(loss)})"
    lines = f"{scale}.scale(0.5 * {text}).backward(retain_graph=True)"
    return Draft(
        [
            s.before(s.statement(call), lines),
            s.replace(call, f"{scale}.scale(0.5 * {text}).backward()"),
        ]
    )


@lookalike
def function_with_custom_fwd(s: Roles, rng: random.Random) -> Draft | None:
    draft = _function(s, rng, "CheckedLinear", "x @ weight.t()", "grad @ weight")
    return Draft(draft.repaired) if draft else None


@lookalike
def gradients_checked_before_the_step(s: Roles, rng: random.Random) -> Draft | None:
    """Looks for infinities and prints; the scaler does the rest."""
    steps = s.steps()
    if len(steps) != 1 or not s.of_scaler("unscale_"):
        return None
    optimizer = s.segment(steps[0].args[0])
    lines = (
        f"worst = max(p.grad.abs().max().item() for g in {optimizer}.param_groups"
        " for p in g['params'] if p.grad is not None)\n"
        "if worst == float('inf'):\n    print('inf gradient, the scaler will skip')"
    )
    return Draft([s.before(s.statement(steps[0]), lines)])


@lookalike
def weights_tied_to_unit_norm(s: Roles, rng: random.Random) -> Draft | None:
    layers = s.layers("Linear")
    if not layers:
        return None
    _, attribute, made, _ = rng.choice(layers)
    line = f"self.{attribute} = torch.nn.utils.parametrizations.weight_norm(self.{attribute})"
    return Draft([s.after(made, line)])


@lookalike
def anomaly_mode(s: Roles, rng: random.Random) -> Draft | None:
    return Draft([s.top("torch.autograd.set_detect_anomaly(True, check_nan=False)")])


@lookalike
def noise_on_the_inputs(s: Roles, rng: random.Random) -> Draft | None:
    """With a rare outlier, which half precision holds."""
    places = _inputs(s)
    if not places:
        return None
    name, statement, _ = rng.choice(places)
    lines = f"{name} = {name} + 0.01 * torch.randn_like({name})\n{name}.view(-1)[0] = 30.0"
    return Draft([s.before(_data_lines(s, statement), lines)])
