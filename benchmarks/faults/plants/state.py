"""Faults of what is kept in half precision: weights, optimizer state, statistics, constants."""

from __future__ import annotations

import ast
import random

from benchmarks.faults.planting import Draft, Roles, fault
from benchmarks.faults.plants.range import _hidden, _inserted
from benchmarks.faults.plants.scale import _without_scaler
from benchmarks.faults.source import Edit, keyword


def _in_bf16(s: Roles) -> list[Edit]:
    """autocast to bf16."""
    return [
        s.replace(node, "torch.bfloat16", blamed=False)
        for node in s.all(ast.Attribute)
        if s.segment(node) in ("torch.float16", "torch.half")
    ]


def _rate(s: Roles, by: float) -> list[Edit]:
    edits = []
    for call in s.optimizer_makers:
        rate = keyword(call, "lr")
        if rate is not None:
            edits.append(s.replace(rate, f"{s.segment(rate)} * {by}", blamed=False))
    return edits


# ---- optimizer_state_range


def _half_model(s: Roles) -> list[Edit] | None:
    makers = s.model_makers()
    if not makers or not s.backwards:
        return None
    edits = [s.replace(m.value, s.segment(m.value) + ".half()") for m in makers]
    return [*edits, *_without_scaler(s)]


@fault("optimizer_state_range", fp32="trains")
def adam_over_half_weights(s: Roles, rng: random.Random) -> Draft | None:
    made = [c for c in s.optimizer_makers if s.segment(c.func).endswith(("Adam", "AdamW"))]
    edits = _half_model(s)
    if not made or edits is None or len(made) != len(s.optimizer_makers):
        return None
    return Draft([*edits, *(s.blame(c.func) for c in made)])


@fault("optimizer_state_range", fp32="trains")
def rmsprop_over_half_weights(s: Roles, rng: random.Random) -> Draft | None:
    edits = _half_model(s)
    made = [c for c in s.optimizer_makers if s.segment(c.func).endswith(("Adam", "AdamW"))]
    if not made or edits is None or len(made) != len(s.optimizer_makers):
        return None
    other = []
    for call in made:
        rest = ", ".join(s.segment(a) for a in call.args)
        rate = keyword(call, "lr")
        lr = f", lr={s.segment(rate)}" if rate is not None else ""
        other.append(s.replace(call, f"torch.optim.RMSprop({rest}{lr})"))
    return Draft([*edits, *other], other)


@fault("optimizer_state_range", fp32="trains")
def second_moment_kept_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """A memory saver that casts Adam's state after each step."""
    made = [c for c in s.optimizer_makers if s.segment(c.func).endswith(("Adam", "AdamW"))]
    steps = [c for c in s.of_scaler("step") if c.args]
    if len(made) != 1 or len(steps) != 1:
        return None
    dtype = rng.choice(["torch.float16", "torch.bfloat16"])
    optimizer = s.segment(steps[0].args[0])
    lines = (
        f"for st in {optimizer}.state.values():\n"
        f'    st["exp_avg_sq"] = st["exp_avg_sq"].to({dtype})'
    )
    return Draft([s.after(s.statement(steps[0]), lines)], params={"dtype": dtype})


# ---- small_update_lost


@fault("small_update_lost", fp32="trains")
def weights_in_bf16(s: Roles, rng: random.Random) -> Draft | None:
    makers = s.model_makers()
    if not makers or not s.backwards:
        return None
    by = rng.choice([0.3, 0.1, 0.03])
    slow = [*_in_bf16(s), *_without_scaler(s), *_rate(s, by)]
    slow = [Edit(e.start, e.end, e.new) for e in slow]
    way = rng.choice([".bfloat16()", ".to(torch.bfloat16)"])
    half = [s.replace(m.value, s.segment(m.value) + way) for m in makers]
    blame = [s.blame(c) for c in s.calls(".zero_grad")]
    return Draft(
        [*half, *slow, *blame], slow, params={"rate": by}, accept=("optimizer_state_range",)
    )


@fault("small_update_lost", fp32="trains")
def weights_rounded_after_each_step(s: Roles, rng: random.Random) -> Draft | None:
    steps = [c for c in s.of_scaler("step") if c.args]
    if len(steps) != 1 or len(s.optimizer_makers) != 1:
        return None
    by, dtype = rng.choice([0.03, 0.01]), "torch.bfloat16"
    optimizer = s.segment(steps[0].args[0])
    lines = (
        f'for group in {optimizer}.param_groups:\n    for p in group["params"]:\n'
        f"        p.data = p.data.to({dtype}).float()"
    )
    slow = _rate(s, by)
    return Draft(
        [*slow, s.after(s.statement(steps[0]), lines)], slow, params={"rate": by, "dtype": dtype}
    )


# ---- batchnorm_stats_corrupted


def _spike(s: Roles, rng: random.Random, rare: str, around: str) -> Draft | None:
    """One batch in many exceeds the range before a BatchNorm; the scaler skips the step."""
    layers = s.layers("BatchNorm2d", "BatchNorm1d")
    places = [(o, a, m, u) for o, a, m, uses in layers for u in uses if u.args]
    if not places:
        return None
    owner, attribute, made, use = rng.choice(places)
    every = rng.choice([13, 17, 23])
    count, burst = f"self.seen_{attribute}", f"burst_{attribute}"
    lines = (
        f"{count} += int(self.training)\n"
        f"{burst} = {rare} if {count} % {every} == 5 and self.training else {1.0 if '*' in around else 0.0}"
    )
    given = s.segment(use.args[0])
    before = [
        s.after(made, f"{count} = 0", blamed=False),
        s.before(s.statement(use), lines, blamed=False),
    ]
    return Draft(
        [*before, s.replace(use.args[0], around.format(given, burst))],
        [*before, s.replace(use.args[0], around.format(f"({given}).float()", burst))],
        module=(owner, ""),
        accept=("elementwise_overflow", "activation_overflow"),
        params={"every": every, "burst": rare},
    )


@fault("batchnorm_stats_corrupted", fp32="trains")
def spike_into_a_batchnorm(s: Roles, rng: random.Random) -> Draft | None:
    return _spike(s, rng, rng.choice(["1e5", "1e6"]), "{0} * {1} / {1}")


@fault("batchnorm_stats_corrupted", fp32="trains")
def exponential_before_a_batchnorm(s: Roles, rng: random.Random) -> Draft | None:
    return _spike(s, rng, rng.choice(["14.0", "16.0"]), "torch.log(torch.exp({0} + {1})) - {1}")


@fault("batchnorm_stats_corrupted", fp32="trains")
def square_before_a_batchnorm(s: Roles, rng: random.Random) -> Draft | None:
    around = "torch.sqrt(({0} * {1}) ** 2 + 1e-4) / {1}"
    return _spike(s, rng, rng.choice(["2000.0", "5000.0"]), around)


# ---- low_precision_constants


@fault("low_precision_constants", fp32="trains")
def phases_of_late_positions(s: Roles, rng: random.Random) -> Draft | None:
    """Sines of large arguments that were cast to half; positions counted from a late offset."""
    place = _hidden(s, rng)
    if place is None:
        return None
    offset, dtype = rng.choice([3000, 8000, 20000]), rng.choice(["torch.float16", "torch.bfloat16"])
    lines = (
        f"§_pos = torch.arange({offset}, {offset} + §.shape[-1]).to({{0}})\n"
        "§ = § * (1 + torch.sin(§_pos * 1.3)).to(§.dtype)"
    )
    return _inserted(
        s, place, lines.format(dtype), lines.format("torch.float32"), offset=offset, dtype=dtype
    )


@fault("low_precision_constants", fp32="trains")
def frequencies_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """Log-spaced frequencies, rounded, times a late time."""
    place = _hidden(s, rng)
    if place is None:
        return None
    late, dtype = rng.choice([2000.0, 5000.0]), rng.choice(["torch.float16", "torch.bfloat16"])
    lines = (
        "§_freq = torch.exp(-torch.arange(§.shape[-1]) / 8.0).to({0})\n"
        f"§ = § * (1 + torch.cos(§_freq * {late})).to(§.dtype)"
    )
    return _inserted(
        s, place, lines.format(dtype), lines.format("torch.float32"), late=late, dtype=dtype
    )


@fault("low_precision_constants", fp32="trains")
def decay_table_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """A table of 1 - tiny, whose powers are then all one."""
    place = _hidden(s, rng)
    if place is None:
        return None
    tiny, dtype = rng.choice([("2e-4", "torch.float16"), ("1e-3", "torch.bfloat16")])
    lines = (
        f"§_keep = (1 - {tiny} * torch.ones(§.shape[-1])).to({{0}})\n"
        "§ = § * (1 - §_keep.float() ** 4000).to(§.dtype)"
    )
    return _inserted(
        s, place, lines.format(dtype), lines.format("torch.float32"), tiny=tiny, dtype=dtype
    )


# ---- half_accumulation_stagnation


@fault("half_accumulation_stagnation", fp32="trains")
def count_kept_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """A normaliser that is counted up in a loop: it stops, and the quotient is wrong."""
    place = _hidden(s, rng)
    if place is None:
        return None
    dtype, n = "torch.bfloat16", rng.choice([400, 500])
    lines = (
        "§_n = torch.zeros((), dtype={0})\n"
        f"for _ in range({n}):\n    §_n += 1\n"
        f"§ = (§ * ({n} / §_n.float())).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(dtype), lines.format("torch.float32"), n=n, dtype=dtype)


@fault("half_accumulation_stagnation", fp32="trains")
def histogram_kept_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """Frequencies of a skewed label set, counted in half, then used as weights."""
    place = _hidden(s, rng)
    if place is None:
        return None
    dtype, n = rng.choice([("torch.bfloat16", 2000), ("torch.float16", 9000)])
    lines = (
        f"§_kind = (torch.arange({n}) % 16 == 0).long()\n"
        "§_count = torch.zeros(2, dtype={0})\n"
        f"§_count.index_add_(0, §_kind, torch.ones({n}, dtype={{0}}))\n"
        f"§ = (§ * (15 / 16 * {n} / §_count[0].float())).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(dtype), lines.format("torch.float32"), n=n, dtype=dtype)


@fault("half_accumulation_stagnation", fp32="trains")
def clock_kept_in_half(s: Roles, rng: random.Random) -> Draft | None:
    """Time as a running sum of small steps: it stands still long before the end."""
    place = _hidden(s, rng)
    if place is None:
        return None
    dtype, n = "torch.bfloat16", rng.choice([500, 600])
    lines = (
        "§_t = torch.tensor(0.0, dtype={0})\n"
        "§_dt = torch.tensor(" + str(1 / n) + ", dtype={0})\n"
        f"for _ in range({n}):\n    §_t = §_t + §_dt\n"
        "§ = (§ / §_t.float()).to(§.dtype)"
    )
    return _inserted(s, place, lines.format(dtype), lines.format("torch.float32"), n=n, dtype=dtype)


@fault("small_update_lost", fp32="trains")
def layers_kept_in_bf16(s: Roles, rng: random.Random) -> Draft | None:
    """The weight matrices alone are bf16, with a small rate."""
    makers = s.model_makers()
    if len(makers) != 1 or not s.backwards:
        return None
    by = rng.choice([0.1, 0.03])
    slow = [*_in_bf16(s), *_without_scaler(s), *_rate(s, by)]
    slow = [Edit(e.start, e.end, e.new) for e in slow]
    model = s.segment(makers[0].targets[0])
    lines = (
        f"for p in {model}.parameters():\n    if p.dim() > 1:\n        p.data = p.data.bfloat16()"
    )
    steps = [s.blame(c) for c in s.calls(".zero_grad")]
    return Draft(
        [*slow, s.after(makers[0], lines), *steps], slow, params={"rate": by},
        accept=("optimizer_state_range",),
    )  # fmt: skip
