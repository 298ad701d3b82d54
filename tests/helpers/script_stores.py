"""Synthetic diagnoses: runs of a script under its controls, written by RunWriter.

What is written is what a recorder would have seen; the verdict is left to the rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ampscope.observations import (
    COMPILED_FRAMES,
    COMPILED_NOTE,
    BadOp,
    Call,
    Kernel,
    Observation,
    Operand,
    OptimizerStep,
    OpUse,
    Outcome,
    Scan,
    SourceText,
)
from ampscope.records import RunSpec, State, StepRecord
from ampscope.store.writer import RunWriter
from tests.helpers.stores import MACHINE

SPEC = RunSpec(workload="/home/me/train.py", kind="script", steps=200, label="train.py", group="g1")
MODULE = "encoder.2.wo"
STEPS = 12
FALLING = [1.5 - 0.1 * i for i in range(STEPS)]
NAN = math.nan


def one_step(number: int, loss: float | None, **changed: object) -> OptimizerStep:
    """A healthy step of an fp16 script with a scaler, but for what is ``changed``."""
    healthy = OptimizerStep(
        step=number,
        optimizer="optimizer0",
        scaler="scaler0",
        loss=loss,
        loss_dtype="fp32",
        scale=65536.0,
        skipped=False,
        unscaled_before=False,
        backwards=1,
        grad_total=1000,
        grad_zero=0,
        grad_nonfinite=0,
        grad_max=0.5,
        grad_norm=1.0,
        lr=0.01,
        moved_share=1.0,
        update_norm=0.01,
        weight_nonfinite=0,
        grad_dtypes="fp32",
        weight_dtypes="fp32",
        state_dtypes="fp32",
    )
    return replace(healthy, **changed)  # type: ignore[arg-type]  # fields by name


def broken(number: int) -> OptimizerStep:
    """A step whose loss is NaN, and which the scaler leaves out."""
    return one_step(
        number,
        NAN,
        scale=2.0 ** (16 - number),
        skipped=True,
        grad_nonfinite=1000,
        grad_max=None,
        grad_norm=None,
        moved_share=0.0,
    )


def bad_op(module: str = MODULE, line: str = "train.py:18", code: str = "h = self.wo(x)") -> BadOp:
    """A matmul that overflows fp16 in every step."""
    inputs = (
        Operand("fp16", (64, 256), 1028.0, 0.02, 0, 0),
        Operand("fp16", (256, 32), 31.25, 0.001, 0, 0, is_parameter=True),
    )
    return BadOp(
        id=0,
        kind="nonfinite",
        step=0,
        phase="forward",
        op="aten.mm",
        node="",
        module=module,
        module_type="Linear",
        line=line,
        code=code,
        dtype="fp16",
        inputs=inputs,
        scalars=(),
        nan=0,
        pos_inf=40,
        neg_inf=20,
        total=2048,
        fp32_max=234280.0,
        fp32_finite=True,
        autocast=True,
        consumers=("add", "mean"),
        count=STEPS,
        last_step=STEPS - 1,
        reached_loss=True,
        reached_gradient=True,
    )


def seen(
    steps: Sequence[OptimizerStep], *others: Observation, **outcome: object
) -> list[Observation]:
    """Calls and steps of a plain loop, then ``others``, then how it ended."""
    calls: list[Observation] = []
    for a in steps:
        for name, value in (("scale", a.scale), ("backward", a.loss), ("scaler_step", None)):
            calls.append(
                Call(len(calls), a.step, name, value=value, line="train.py:30", scaled=True)
            )
    ended = {"ended": "returned", "steps": len(steps), "elapsed_s": 2.0, "step_cpu_s": 0.1}
    ended |= {"uses_autocast": "fp16", "backwards": len(steps)} | outcome
    return [*calls, *steps, *others, Outcome(**ended)]  # type: ignore[arg-type]  # by name


def run(
    store: Path,
    control: str,
    observations: Sequence[Observation] | None,
    spec: RunSpec = SPEC,
    state: State | None = State.FINISHED,
    message: str = "",
) -> str:
    """One run; ``state`` None leaves it running, ``observations`` None leaves nothing recorded."""
    writer = RunWriter.create(store, replace(spec, control=control))
    writer.start(MACHINE)
    if observations is not None:
        writer.add_observations(observations)
        for record in observations:
            if isinstance(record, OptimizerStep):
                writer.add_step(
                    StepRecord(
                        record.step,
                        record.loss,
                        record.scale if record.scaler else None,
                        skipped=record.skipped,
                        grad_norm=NAN if record.grad_nonfinite else record.grad_norm,
                    )
                )
    if state is not None:
        writer.finish(state, message)
    writer.close()
    return writer.run_id


def healthy_run(store: Path, control: str, spec: RunSpec = SPEC) -> str:
    """A run that learns."""
    return run(store, control, seen([one_step(i, x) for i, x in enumerate(FALLING)]), spec)


def overflow(
    store: Path, spec: RunSpec = SPEC, op: BadOp | None = None, *, fixed: bool = True
) -> str:
    """A matmul overflows in fp16 only; with its module in fp32 the script learns."""
    op = op or bad_op()
    start = Scan("start", "parameter", f"{op.module}.weight", "fp32", 8192, 0, 0, 0.5)
    head = run(store, "as_is", seen([broken(i) for i in range(STEPS)], op, start), spec)
    healthy_run(store, "fp32", spec)
    healthy_run(store, "bf16", spec)
    if fixed:
        healthy_run(store, f"fp32_modules:{op.module}", spec)
    return head


def no_fault(store: Path, spec: RunSpec = SPEC, search: int = 3) -> str:
    """A search for the scale of ``search`` steps, then as good as fp32."""
    skipped = {"skipped": True, "grad_nonfinite": 10, "moved_share": 0.0}
    steps = [one_step(i, x, **(skipped if i < search else {})) for i, x in enumerate(FALLING)]
    head = run(store, "as_is", seen(steps), spec)
    healthy_run(store, "fp32", spec)
    return head


def long_search(store: Path, spec: RunSpec = SPEC) -> str:
    """16 of 24 steps are skipped from a scale of 2^36 down to 2^20, then it learns as fp32 does."""
    losses = [1.5, 1.2, 0.8, 0.5, 0.3, 0.2, 0.1, 0.1]
    lost = {"skipped": True, "grad_nonfinite": 10, "moved_share": 0.0}
    steps = [one_step(i, losses[0], scale=2.0 ** (36 - i), **lost) for i in range(16)]
    steps += [one_step(16 + i, x, scale=2.0**20) for i, x in enumerate(losses)]
    head = run(store, "as_is", seen(steps), spec)
    run(store, "fp32", seen([one_step(i, x) for i, x in enumerate(losses + 16 * [0.1])]), spec)
    return head


def undetermined(store: Path, spec: RunSpec = SPEC) -> str:
    """It learns nothing, fp32 does, and nothing that was recorded tells why."""
    flat = [one_step(i, 1.5 - 0.001 * i) for i in range(STEPS)]
    head = run(store, "as_is", seen(flat), spec)
    healthy_run(store, "fp32", spec)
    return head


def innocent(store: Path, spec: RunSpec = SPEC) -> str:
    """The loss explodes in fp32 at the same step as in fp16."""

    def exploding(scaler: str) -> list[OptimizerStep]:
        losses = [1.0, 1e3, 1e9, math.inf, *[NAN] * 8]
        bad = {"grad_nonfinite": 1000, "grad_norm": None, "grad_max": None}
        return [
            one_step(
                i,
                x,
                scaler=scaler,
                skipped=bool(scaler) and i >= 3,
                weight_nonfinite=0 if scaler or i < 3 else 1000,
                **({} if i < 3 else bad),
            )
            for i, x in enumerate(losses)
        ]

    head = run(store, "as_is", seen(exploding("scaler0")), spec)
    run(store, "fp32", seen(exploding(""), uses_autocast=""), spec)
    return head


KERNEL = Kernel(
    number=2,
    phase="forward",
    ops=("aten.mul", "aten.tanh", "aten.mul"),
    modules=("act",),
    lines=("train.py:2", "train.py:3"),
    computed="fp32",
    writes=("bf16",),
    unrounded=("aten.mul to bf16, train.py:2",),
)


def compiled_fault(store: Path, spec: RunSpec = SPEC) -> dict[str, str]:
    """Eager code and torch's own kernels train, inductor's compute something else; runs by control.

    The first kernel of the compiled run casts alone, the second one is :data:`KERNEL`.
    """
    frames = OpUse(COMPILED_FRAMES, "", "", "train.py:9", 0, count=1)
    cast = replace(KERNEL, number=1, ops=("prims.convert_element_type",), unrounded=())
    lines = ("import torch", "h = x * scale", "h = torch.tanh(h) * h", "loss = h.mean()")
    good = [one_step(i, x) for i, x in enumerate(FALLING)]
    wrong = [one_step(i, x * 1.3) for i, x in enumerate(FALLING)]
    text = SourceText("train.py", lines)
    runs = {"as_is": run(store, "as_is", seen(good, text, notes=(COMPILED_NOTE,)), spec)}
    runs["fp32"] = healthy_run(store, "fp32", spec)
    for control, steps in {
        "compiled": wrong,
        "compiled;backend:aot_eager": good,
        "compiled;eager_random": wrong,
        "compiled;eager_casts": wrong,
    }.items():
        seen_there = seen(steps, frames, cast, KERNEL)
        runs[control] = run(store, control, seen_there, spec)
    return runs


def raised(store: Path, spec: RunSpec = SPEC) -> str:
    """An exception before the first optimizer step."""
    outcome = {
        "ended": "exception",
        "error_type": "FileNotFoundError",
        "error_text": "No such file: 'data.npz'",
        "error_line": "train.py:7",
    }
    head = run(store, "as_is", seen([], **outcome), spec)
    run(store, "fp32", seen([], **outcome), spec)
    return head


def lost(store: Path, spec: RunSpec = SPEC) -> str:
    """The process of the run as it is was killed."""
    head = run(store, "as_is", None, spec, state=None)
    writer = RunWriter(store, head)
    writer._update(pid_started=-1.0)  # this pid now belongs to another process: ours
    writer.close()
    return head
