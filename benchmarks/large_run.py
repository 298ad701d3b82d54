"""Large synthetic runs: a probe, a watched training, and the diagnosis of a script.

The probe is hard to compress: each histogram bin is a Poisson draw, modules differ and drift, every
tenth step has a shadow, every hundredth is skipped with all gradients not finite.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from ampscope.diagnosis.load import judge_again
from ampscope.numerics.histogram import POS_ZERO, RAW_LEN
from ampscope.observations import LineUse, ParameterGradient, Scan, SourceText
from ampscope.records import (
    Event,
    Frame,
    Machine,
    ModuleRecord,
    NonFiniteRecord,
    OpRecord,
    Role,
    RunSpec,
    Sample,
    ShadowRecord,
    State,
    StepRecord,
)
from ampscope.store.writer import RunWriter

ELEMENTS = 65_536  # of one module's tensor
SHADOW_EVERY, SKIP_EVERY = 10, 100
STEP_S, SAMPLE_S = 0.2, 0.1
WATCHED_EVERY = 10
BAD_OPS, KEPT_STEPS = 20, 4  # of a script
SPREAD = 3.0  # in powers of two; recorded roles of the tiny GPT: 1.3 to 2.1 (medians over modules)
ZERO_BIN = 1 + 149  # column of the exponent 0


def write_run(store: Path, modules: int, steps: int) -> str:
    """The synthetic run; about a minute for 500 x 1,000."""
    rng = np.random.default_rng(0)
    writer = RunWriter.create(store, RunSpec("gpt", size="large", steps=steps))
    writer.start(Machine("cpu", "benchmark", "rehearsal"))
    start = time.time()
    writer.add_modules(module_records(modules))
    writer.add_ops(0, [op for index in range(1, modules + 1) for op in op_records(index)])
    centres = rng.normal(-14, 4, (len(Role), modules))
    for step in range(steps):
        skipped = step % SKIP_EVERY == 0
        writer.add_step(
            StepRecord(
                step,
                loss=3.0 / (1 + step / 50),
                scale=2.0**16,
                growth_counter=step % SKIP_EVERY,
                skipped=skipped,
                grad_norm=float("inf") if skipped else 1.0,
                lr=1e-3,
                step_time_s=STEP_S,
                op_set=0,
            )
        )
        centres += rng.normal(0, 0.05, centres.shape)
        for place, role in enumerate(Role):
            writer.add_frame(frame_of(rng, role, step, centres[place]))
        if step % SHADOW_EVERY == 0:
            writer.add_shadow(shadow_records(rng, step, modules))
        if skipped:
            bad = range(modules, 0, -1)
            writer.add_nonfinite(
                NonFiniteRecord(step, f"h.{i}.weight", order, ELEMENTS, 1, 2, 3)
                for order, i in enumerate(bad)
            )
        if step % 20 == 19:
            writer.flush()
    seconds = np.arange(0, steps * STEP_S, SAMPLE_S)
    writer.add_samples(Sample("cpu", start + at, 90.0, 88.0, 8 << 30, 2 << 30) for at in seconds)
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def write_watched(store: Path, modules: int, steps: int) -> str:
    """A watched training with histograms of every tenth step, an alarm at every hundredth."""
    rng = np.random.default_rng(0)
    writer = RunWriter.create(store, RunSpec("train.py", kind="watch", size="", steps=0))
    writer.start(Machine("cpu", "benchmark", "native"))
    writer.add_modules(module_records(modules))
    centres = rng.normal(-14, 4, modules)
    for step in range(steps):
        loss = 3.0 / (1 + step / 50) + rng.normal(0, 0.01)
        skipped = step % SKIP_EVERY == 0
        writer.add_step(
            StepRecord(
                step, loss=loss, scale=2.0**16, skipped=skipped,
                grad_norm=float("inf") if skipped else 1.0, step_time_s=STEP_S,
            )
        )  # fmt: skip
        if step % WATCHED_EVERY == 0:
            writer.add_frame(frame_of(rng, Role.WEIGHT_GRAD, step, centres))
        if skipped:
            writer.add_event(Event(step, "alarm", "spike", f"The loss rose to {loss:.3g}."))
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def write_diagnosis(store: Path, modules: int, steps: int) -> str:
    """A script of many lines whose steps are all skipped because one of its modules overflows; its
    controls and the fix are healthy. Returns the baseline run."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.helpers import script_stores as made

    spec = replace(made.SPEC, steps=steps)
    names = [f"h.{i}.wo" for i in range(modules)]
    text = [f"h{i} = self.h[{i}].wo(x)" for i in range(modules)]
    lines = [f"{made.SPEC.label}:{number}" for number in range(1, modules + 1)]
    bad = [
        replace(made.bad_op(name, line, code), id=n, step=n, last_step=steps - 1, count=steps - n)
        for n, (name, line, code) in enumerate(zip(names, lines, text, strict=True))
        if n < BAD_OPS
    ]
    learning = [made.one_step(n, 3.0 / (1 + n / 50)) for n in range(steps)]
    observations = [
        *(Scan("start", "parameter", f"{n}.weight", "fp32", ELEMENTS, 0, 0, 0.5) for n in names),
        *(LineUse(line, "mm", ("fp16",), "fp16", calls=2) for line in lines),
        *(LineUse(line, "_to_copy", ("fp32",), "fp16", False, 2, 1000, 10) for line in lines),
        *(
            ParameterGradient(step, "optimizer0", f"{name}.weight", n, ELEMENTS, 0, ELEMENTS, None)
            for step in range(min(steps, KEPT_STEPS))
            for n, name in enumerate(names)
        ),
        SourceText(made.SPEC.label, tuple(text)),
    ]
    broken = made.seen([made.broken(n) for n in range(steps)], *bad, *observations)
    head = made.run(store, "as_is", broken, spec)
    for control in ("fp32", "bf16", f"fp32_modules:{names[0]}"):
        made.run(store, control, made.seen(learning), spec)
    judge_again(store, head)  # stores what is concluded
    return head


def module_records(modules: int) -> list[ModuleRecord]:
    names = ("norm", "attn.qkv", "attn.proj", "mlp.up", "mlp.down")
    leaves = [
        ModuleRecord(i + 1, f"h.{i // 5}.{names[i % 5]}", "Linear", "fp32", 10_000)
        for i in range(modules)
    ]
    return [ModuleRecord(0, "", "GPT", is_leaf=False), *leaves]


def op_records(index: int) -> list[OpRecord]:
    """Ten lines of a trace, as a recorded Linear has them."""
    views = [
        OpRecord(index, phase, f"aten.{op}", "fp16", "fp16", 2)
        for phase in ("forward", "backward")
        for op in ("t", "view", "detach")
    ]
    return [
        OpRecord(index, "forward", "aten._to_copy", "fp32", "fp16", 3, is_cast=True),
        OpRecord(index, "forward", "aten.addmm", "fp16,fp16,fp16", "fp16", 1, flops=10**9),
        OpRecord(index, "backward", "aten.mm", "fp16,fp16", "fp16", 2, flops=2 * 10**9),
        OpRecord(index, "backward", "aten._to_copy", "fp16", "fp32", 2, is_cast=True),
        *views,
    ]


def frame_of(rng: np.random.Generator, role: Role, step: int, centres: np.ndarray) -> Frame:
    """Bell curves round ``centres``; fp16 holds nothing below 2^-24."""
    exponents = np.arange(-40, 16)
    bells = np.exp(-0.5 * ((exponents - centres[:, None]) / SPREAD) ** 2)
    counts = rng.poisson(ELEMENTS * bells / bells.sum(axis=1, keepdims=True))
    rows = np.zeros((len(centres), RAW_LEN), np.int64)
    rows[:, ZERO_BIN - 40 : ZERO_BIN + 16] = counts
    rows[:, POS_ZERO] = rows[:, : ZERO_BIN - 24].sum(axis=1)
    rows[:, : ZERO_BIN - 24] = 0
    modules = tuple(range(1, len(centres) + 1))
    scale = 2.0**16 if role.is_gradient else 1.0
    return Frame(step, role, modules, ("fp16",) * len(modules), rows, scale)


def shadow_records(rng: np.random.Generator, step: int, modules: int) -> list[ShadowRecord]:
    roles = (Role.ACTIVATION, Role.GRAD_OUTPUT, Role.WEIGHT_GRAD)
    lost = rng.integers(0, 2000, (len(roles), modules))
    return [
        ShadowRecord(step, m + 1, role, ELEMENTS, int(lost[r, m]), 500, 40, 1e-3, 0.999, 2.0)
        for r, role in enumerate(roles)
        for m in range(modules)
    ]
