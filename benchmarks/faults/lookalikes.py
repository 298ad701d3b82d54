"""Harmless transformations that look like faults."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, lookalike
from benchmarks.faults.plants.derivatives import _function, root_of_a_row_energy
from benchmarks.faults.plants.everywhere import _data_lines, _inputs
from benchmarks.faults.plants.protocol import clip_added_on_scaled, zeroed_every_other_time
from benchmarks.faults.plants.range import _fills, _hidden, _inserted, eps_beside_a_norm
from benchmarks.faults.plants.scale import _made, scaler_not_saved
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


def _left_out(s: Roles, lines: str) -> Draft | None:
    """``lines`` before the backward pass, § for the loss; they may go on to the next batch."""
    losses = s.losses()
    if len(losses) != 1 or len(s.backwards) != 1:
        return None
    name, assign = losses[0]
    call = s.backwards[0][0]
    if not s.loops(call) or s.loops(call) != s.loops(assign):
        return None
    return Draft([s.before(s.statement(call), lines.replace("§", name))])


@lookalike
def infinite_loss_that_is_skipped(s: Roles, rng: random.Random) -> Draft | None:
    share = rng.choice([0.03, 0.06])
    lines = (
        f"if torch.rand(()) < {share}:\n    § = § / 0.0  # a sample without a target\n"
        "if not torch.isfinite(§):\n    continue"
    )
    draft = _left_out(s, lines)
    return draft and Draft(draft.faulty, params={"share": share})


@lookalike
def many_batches_without_a_label(s: Roles, rng: random.Random) -> Draft | None:
    """Labels are sparse: the mean over none is NaN, and the script goes on to the next batch."""
    share = rng.choice([0.3, 0.4])
    lines = (
        f"labelled = (torch.rand(1) > {share}).nonzero().flatten()\n"
        "§ = § * torch.ones(1)[labelled].mean()\nif torch.isnan(§):\n    continue"
    )
    draft = _left_out(s, lines)
    return draft and Draft(draft.faulty, params={"share": share})


@lookalike
def broken_batches_that_are_left_out(s: Roles, rng: random.Random) -> Draft | None:
    """They come with NaN, and the script sees it in their loss."""
    places, share = _inputs(s), rng.choice([0.04, 0.08])
    guarded = _left_out(s, "if not torch.isfinite(§):\n    print('bad batch')\n    continue")
    if not places or guarded is None:
        return None
    name, statement, _ = rng.choice(places)
    lines = f"if torch.rand(()) < {share}:\n    § = § / torch.zeros_like(§)".replace("§", name)
    at = s.before(_data_lines(s, statement), lines)
    return Draft([at, *guarded.faulty], params={"share": share})


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


# ---- rare batches that are lost, and steps that are left out on purpose


@lookalike
def rare_batches_that_the_scaler_skips(s: Roles, rng: random.Random) -> Draft | None:
    """A few batches have a weight whose scaled gradients overflow; fp32 would clip them."""
    losses = s.losses()
    if len(losses) != 1 or not s.of_scaler("unscale_") or not s.clips:
        return None
    name, assign = losses[0]
    share, weight = rng.choice([0.03, 0.05]), rng.choice(["1e9", "1e12"])
    line = f"{name} = {name} * (torch.rand(()) < {share}).float().mul({weight}).clamp(min=1.0)"
    return Draft([s.after(assign, line)], params={"share": share, "weight": weight})


@lookalike
def steps_that_a_norm_guard_leaves_out(s: Roles, rng: random.Random) -> Draft | None:
    """The script drops the few gradients that are far larger than the others."""
    steps, clips = s.steps(), s.clips
    if len(steps) != 1 or len(clips) != 1 or not s.of_scaler("unscale_"):
        return None
    clip = s.statement(clips[0])
    if not isinstance(clip, ast.Expr | ast.Assign) or s.function(steps[0]) is not s.function(clip):
        return None
    optimizer = s.segment(steps[0].args[0])
    norm = f"norm = torch.cat([p.grad.flatten() for g in {optimizer}.param_groups for p in g['params'] if p.grad is not None]).norm()"
    lines = (
        f"{norm}\n"
        "typical = 0.9 * locals().get('typical', norm) + 0.1 * norm\n"
        f"if norm > 5 * typical:\n    {optimizer}.zero_grad(set_to_none=False)"
    )
    return Draft([s.before(clip, lines)])


@lookalike
def loss_that_fades_in(s: Roles, rng: random.Random) -> Draft | None:
    """Every gradient of the first step is exactly zero, and those of the next ones are small."""
    if len(s.backwards) != 1:
        return None
    call, loss = s.backwards[0]
    over = rng.choice([4, 6])
    line = f"fade = min(1.0, locals().get('fade', {-1 / over}) + {1 / over})"
    faded = s.replace(loss, f"fade * ({s.segment(loss)})")
    return Draft([s.before(s.statement(call), line), faded], params={"over": over})


@lookalike
def warmup_from_a_rate_of_zero(s: Roles, rng: random.Random) -> Draft | None:
    """The first steps do not move any weight."""
    steps, updates = s.steps(), s.of_scaler("update")
    if len(s.optimizer_makers) != 1 or len(steps) != 1 or len(updates) != 1:
        return None
    maker = s.statement(s.optimizer_makers[0])
    if not isinstance(maker, ast.Assign) or s.calls("LambdaLR"):
        return None
    made, used = s.segment(maker.targets[0]), s.segment(steps[0].args[0])
    over = rng.choice([3, 5])
    first = f"{made}.warmup = torch.optim.lr_scheduler.LambdaLR({made}, lambda n: min(1.0, max(0, n - 1) / {over}))"
    return Draft(
        [s.after(maker, first), s.after(s.statement(updates[0]), f"{used}.warmup.step()")],
        params={"over": over},
    )


@lookalike
def first_parameter_thaws_late(s: Roles, rng: random.Random) -> Draft | None:
    """Its gradient is exactly zero in the first steps."""
    steps = rng.choice([4, 8])
    lines = (
        "seen = []\n"
        "next(p for p in §.parameters() if p.requires_grad).register_hook(\n"
        f"    lambda g: (seen.append(0), g * float(len(seen) > {steps}))[1]\n)"
    )
    return _after_model(s, rng, lines)


@lookalike
def gradients_accumulated_rightly(s: Roles, rng: random.Random) -> Draft | None:
    draft = zeroed_every_other_time(s, rng)
    return Draft(draft.repaired) if draft else None


@lookalike
def resumed_with_everything(s: Roles, rng: random.Random) -> Draft | None:
    """Preempted every few steps; the scaler's state is saved and loaded."""
    draft = scaler_not_saved(s, rng)
    return Draft(draft.repaired, params=draft.params) if draft else None


# ---- weights, updates and averages that half precision holds


def _each_step(s: Roles, lines: str) -> Draft | None:
    """``lines`` behind the step, § for the optimizer."""
    steps = s.steps()
    if len(steps) != 1:
        return None
    return Draft([s.after(s.statement(steps[0]), lines.replace("§", s.segment(steps[0].args[0])))])


@lookalike
def weights_rounded_stochastically(s: Roles, rng: random.Random) -> Draft | None:
    """bf16 weights whose rounding is right on average."""
    lines = (
        "with torch.no_grad():\n    for group in §.param_groups:\n        for p in group['params']:\n"
        "            bits = p.contiguous().view(torch.int32)\n"
        "            bits = (bits + torch.randint_like(bits, 1 << 16)) & -(1 << 16)\n"
        "            p.copy_(bits.view(torch.float32))"
    )
    return _each_step(s, lines)


@lookalike
def weights_in_bf16_with_kahan_sums(s: Roles, rng: random.Random) -> Draft | None:
    """What rounding takes away is added to the next step."""
    lines = (
        "with torch.no_grad():\n    for group in §.param_groups:\n        for p in group['params']:\n"
        "            full = p + §.state[p].get('rest', 0.0)\n"
        "            p.copy_(full.to(torch.bfloat16))\n"
        "            §.state[p]['rest'] = full - p"
    )
    return _each_step(s, lines)


@lookalike
def weights_held_under_a_norm(s: Roles, rng: random.Random) -> Draft | None:
    limit = rng.choice([2.0, 4.0])
    lines = (
        "with torch.no_grad():\n    for group in §.param_groups:\n        for p in group['params']:\n"
        f"            if p.dim() > 1:\n                p.copy_(torch.renorm(p, 2, 0, {limit}))"
    )
    return _each_step(s, lines)


@lookalike
def gradients_sent_in_bf16(s: Roles, rng: random.Random) -> Draft | None:
    """As a compressed all-reduce does: rounded, and summed in fp32."""
    steps = s.steps()
    if len(steps) != 1:
        return None
    optimizer = s.segment(steps[0].args[0])
    lines = (
        f"for group in {optimizer}.param_groups:\n    for p in group['params']:\n"
        "        if p.grad is not None:\n            p.grad.copy_(p.grad.to(torch.bfloat16))"
    )
    before = [s.statement(c) for c in s.of_scaler("unscale_")] or [s.statement(steps[0])]
    return Draft([s.before(before[0], lines)])


@lookalike
def average_in_fp32_of_half_copies(s: Roles, rng: random.Random) -> Draft | None:
    """An EMA that is fp32 itself and gets the weights rounded to bf16."""
    makers = s.model_makers()
    steps = s.steps()
    if len(steps) != 1 or len(makers) != 1 or s.function(makers[0]) is not s.function(steps[0]):
        return None
    model = s.segment(makers[0].targets[0])
    first = f"average = [p.detach().clone() for p in {model}.parameters()]"
    lines = (
        f"with torch.no_grad():\n    for a, p in zip(average, {model}.parameters()):\n"
        "        a.lerp_(p.to(torch.bfloat16).float(), 0.01)"
    )
    return Draft([s.after(makers[0], first), s.after(s.statement(steps[0]), lines)])


@lookalike
def sgd_without_momentum(s: Roles, rng: random.Random) -> Draft | None:
    made = [c for c in s.optimizer_makers if c.args]
    if len(made) != 1:
        return None
    rate = rng.choice([0.03, 0.1])
    new = f"torch.optim.SGD({s.segment(made[0].args[0])}, lr={rate})"
    return Draft([s.replace(made[0], new)], params={"rate": rate})


@lookalike
def scaled_and_divided_by_hand(s: Roles, rng: random.Random) -> Draft | None:
    """A constant factor in place of the scaler, taken out again before the clip and the step."""
    steps, unscales = s.steps(), s.of_scaler("unscale_")
    if len(s.backwards) != 1 or len(steps) != 1 or s.calls("autograd.grad"):
        return None
    if len(s.of_scaler("get_scale")) or len(s.of_scaler("update")) != 1:
        return None
    factor, optimizer = rng.choice([128.0, 512.0]), s.segment(steps[0].args[0])
    (call, loss), step = s.backwards[0], s.statement(steps[0])
    divide = (
        f"for group in {optimizer}.param_groups:\n    for p in group['params']:\n"
        f"        if p.grad is not None:\n            p.grad.div_({factor})"
    )
    at = s.statement(unscales[0]) if unscales else step
    gone = [*unscales, *s.of_scaler("update"), *s.scaler_makers]
    return Draft(
        [
            s.replace(call, f"({s.segment(loss)} * {factor}).backward()"),
            s.before(at, divide),
            s.replace(steps[0], f"{optimizer}.step()"),
            *(s.delete(s.statement(c)) for c in gone),
        ],
        params={"factor": factor},
    )


@lookalike
def clip_behind_unscale(s: Roles, rng: random.Random) -> Draft | None:
    """By norm, by value or by hand, on gradients that were divided first."""
    draft = clip_added_on_scaled(s, rng)
    return Draft(draft.repaired, params=draft.params) if draft else None


# ---- parts of the model that start or stay at zero


def _beside_a_layer(s: Roles, rng: random.Random, lines: str, new: str) -> Draft | None:
    """``lines`` where a Linear is made and ``new`` for each of its calls: § its attribute, ¤ the call."""
    layers = s.layers("Linear")
    if not layers:
        return None
    _, attribute, made, uses = rng.choice(layers)
    edits = [s.replace(u, new.replace("§", attribute).replace("¤", s.segment(u))) for u in uses]
    return Draft([s.after(made, lines.replace("§", attribute)), *edits])


@lookalike
def residual_branch_that_starts_at_zero(s: Roles, rng: random.Random) -> Draft | None:
    """ReZero: a gate of zero, below which the first gradients are exactly zero."""
    lines = (
        "self.§_branch = torch.nn.Linear(self.§.out_features, self.§.out_features)\n"
        "self.§_gate = torch.nn.Parameter(torch.zeros(()))"
    )
    return _beside_a_layer(s, rng, lines, "(¤ + self.§_gate * torch.tanh(self.§_branch(¤)))")


@lookalike
def adapter_that_starts_at_zero(s: Roles, rng: random.Random) -> Draft | None:
    lines = (
        "self.§_down = torch.nn.Linear(self.§.out_features, 4, bias=False)\n"
        "self.§_up = torch.nn.Linear(4, self.§.out_features, bias=False)\n"
        "torch.nn.init.zeros_(self.§_up.weight)"
    )
    return _beside_a_layer(s, rng, lines, "(¤ + self.§_up(self.§_down(¤)))")


@lookalike
def learnt_temperature_that_is_clamped(s: Roles, rng: random.Random) -> Draft | None:
    lines = f"self.§_log_scale = torch.nn.Parameter(torch.tensor({rng.choice([0.0, 0.5])}))"
    return _beside_a_layer(s, rng, lines, "(¤ * self.§_log_scale.clamp(max=2.0).exp())")


@lookalike
def vocabulary_with_spare_rows(s: Roles, rng: random.Random) -> Draft | None:
    """Rows of an embedding that no batch ever uses: their gradients are always zero."""
    layers = [x for x in s.layers("Embedding") if x[2].value.args]  # type: ignore[attr-defined]
    if not layers:
        return None
    rows = rng.choice(layers)[2].value.args[0]  # type: ignore[attr-defined]
    spare = rng.choice([64, 500])
    return Draft([s.replace(rows, f"{s.segment(rows)} + {spare}")], params={"spare": spare})


@lookalike
def rows_masked_out(s: Roles, rng: random.Random) -> Draft | None:
    """A part of each batch has neither activations nor gradients."""
    every = rng.choice([4, 8])
    lines = (
        f"§_keep = (torch.arange(§.shape[0]) % {every} != 0).to(§.dtype)\n"
        "§ = § * §_keep.view(-1, *[1] * (§.dim() - 1))"
    )
    return _hidden_line(s, rng, lines)


# ---- functions that are dangerous in half, written so that they are not


@lookalike
def log_sum_exp_by_hand(s: Roles, rng: random.Random) -> Draft | None:
    lines = (
        "§_top = §.amax(dim=-1, keepdim=True).detach()\n"
        "§ = § + 0.1 * (torch.log(torch.exp(§ - §_top).sum(dim=-1, keepdim=True)) + §_top).to(§.dtype)"
    )
    return _hidden_line(s, rng, lines)


@lookalike
def softmax_of_large_logits_less_their_maximum(s: Roles, rng: random.Random) -> Draft | None:
    """Most exponentials become exactly zero, as they should."""
    gain = rng.choice([50.0, 200.0])
    lines = (
        f"§_logit = {gain} * §\n"
        "§_weight = torch.exp(§_logit - §_logit.amax(dim=-1, keepdim=True))\n"
        "§ = (§ * (1 + §_weight.detach() / §_weight.detach().sum(dim=-1, keepdim=True))).to(§.dtype)"
    )
    return _hidden_line(s, rng, lines)


@lookalike
def root_with_an_epsilon(s: Roles, rng: random.Random) -> Draft | None:
    """Many arguments are exactly zero."""
    draft = root_of_a_row_energy(s, rng)
    return Draft(draft.repaired) if draft else None


@lookalike
def division_by_a_norm_that_is_zero(s: Roles, rng: random.Random) -> Draft | None:
    """Beside an epsilon that half precision holds."""
    draft = eps_beside_a_norm(s, rng)
    return Draft(draft.repaired) if draft else None


@lookalike
def positions_that_half_holds_exactly(s: Roles, rng: random.Random) -> Draft | None:
    lines = (
        "§_pos = torch.arange(§.shape[-1]).to(torch.float16)\n"
        "§ = § * (1 + 0.1 * torch.sin(§_pos.float())).to(§.dtype)"
    )
    return _hidden_line(s, rng, lines)


@lookalike
def short_count_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """A sum of ones that stays where half counts exactly."""
    n = rng.choice([60, 120])
    lines = (
        "§_n = torch.zeros((), dtype=torch.bfloat16)\n"
        f"for _ in range({n}):\n    §_n += 1\n"
        f"§ = § * ({n} / §_n.float()).to(§.dtype)"
    )
    return _hidden_line(s, rng, lines)


@lookalike
def huge_fill_in_fp32_scores(s: Roles, rng: random.Random) -> Draft | None:
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    value = rng.choice(["-1e9", "-1e30", "torch.finfo(torch.float32).min"])
    return Draft([s.replace(call, f"{scores}.float().masked_fill({mask}, {value})")])


@lookalike
def minus_infinity_beside_a_kept_column(s: Roles, rng: random.Random) -> Draft | None:
    """No row is masked as a whole."""
    places = _fills(s)
    if not places:
        return None
    call, scores, mask, _ = rng.choice(places)
    kept = f"(torch.arange({scores}.shape[-1]) > 0)"
    return Draft([s.replace(call, f'{scores}.masked_fill(({mask}) & {kept}, float("-inf"))')])


@lookalike
def loss_weighted_by_its_size(s: Roles, rng: random.Random) -> Draft | None:
    """Focal: the weight of an easy batch comes near zero."""
    losses = s.losses()
    if len(losses) != 1:
        return None
    name, assign = losses[0]
    power = rng.choice([0.5, 1])
    line = f"{name} = (1 - torch.exp(-{name}.detach().abs())).pow({power}) * {name}"
    return Draft([s.after(assign, line)], params={"power": power})
