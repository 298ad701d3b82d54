"""Evidence made by hand: runs of a script as records, with no store, no torch and no recorder.

A fact that a test does not name is that of a healthy fp16 run under GradScaler, which learns as the
fp32 control does:

    evidence(run(steps(skipped=True)))              # every step is skipped, and fp32 trains
    evidence(run(steps()), fp32=None)               # the control was not run
    run(steps(), calls=log([ZERO, SCALE, BACKWARD, DIRECT_STEP]))   # another order of calls
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.diagnosis.findings import Diagnosis, diagnose
from ampscope.observations import BadOp, Call, Observation, Operand, OptimizerStep, Outcome, Scan
from ampscope.rules.verdict import Status, Verdict
from tests.helpers.script_stores import one_step

NAN, INF = math.nan, math.inf
STEPS = 30
FALLING = tuple(1.5 - 0.04 * i for i in range(STEPS))  # a run that learns: 1.5 to 0.34
FLAT = (1.5,) * STEPS  # a run that does not
LINE, MODULE = "train.py:18", "blocks.1.ffn.wo"

# What GradScaler leaves of a step whose gradients overflowed.
OVERFLOWED: dict[str, Any] = {
    "skipped": True,
    "grad_nonfinite": 1000,
    "grad_max": None,
    "grad_norm": None,
    "moved_share": 0.0,
}
WITHOUT_SCALER: dict[str, Any] = {"scaler": "", "scale": 1.0}

# Calls of one training step, as the log writes them.
ZERO = Call(0, 0, "zero_grad", subject="optimizer0")
SCALE = Call(0, 0, "scale", subject="scaler0", value=65536.0, scaled=True)
BACKWARD = Call(0, 0, "backward", subject="scaler0", scaled=True)
UNSCALE = Call(0, 0, "unscale_", subject="scaler0", note="optimizer0")
STEP = Call(0, 0, "scaler_step", subject="scaler0", note="optimizer0")
UPDATE = Call(0, 0, "update", subject="scaler0", value=65536.0)
PLAIN_BACKWARD = Call(0, 0, "backward")
DIRECT_STEP = Call(0, 0, "optimizer_step", subject="optimizer0")
SCALED_LOOP = (ZERO, SCALE, BACKWARD, STEP, UPDATE)
FP32_LOOP = (ZERO, PLAIN_BACKWARD, DIRECT_STEP)


def steps(losses: Sequence[float | None] = FALLING, **facts: Any) -> list[OptimizerStep]:
    """One step a loss, each healthy but for ``facts``."""
    return [one_step(number, loss, **facts) for number, loss in enumerate(losses)]


def but(
    made: Sequence[OptimizerStep], where: Iterable[int], **facts: object
) -> list[OptimizerStep]:
    """The same steps with ``facts`` in those numbered in ``where``."""
    chosen = set(where)
    return [
        replace(a, **facts) if a.step in chosen else a  # type: ignore[arg-type]  # by name
        for a in made
    ]


def search(made: Sequence[OptimizerStep], init: float, skips: int) -> list[OptimizerStep]:
    """The scale starts at ``init`` and is halved by each of ``skips`` overflows at the start."""
    scaled = [replace(a, scale=init / 2.0 ** min(a.step, skips)) for a in made]
    return but(scaled, range(skips), **OVERFLOWED)


def log(
    pattern: Sequence[Call], losses: Sequence[float | None] = FALLING, start: int = 0
) -> list[Call]:
    """``pattern`` once a loss, numbered; the call in place n stands at line n of train.py."""
    calls: list[Call] = []
    steps = 0
    for loss in losses:
        for place, call in enumerate(pattern, 1):
            value = loss if call.name == "backward" else call.value
            line = call.line or f"train.py:{place}"
            seq = start + len(calls)
            calls.append(replace(call, seq=seq, step=steps, value=value, line=line))
            steps += call.name in ("scaler_step", "optimizer_step")
    return calls


def run(
    made: Sequence[OptimizerStep],
    *others: Observation,
    calls: Sequence[Call] | None = None,
    control: str = "as_is",
    **outcome: object,
) -> RunView:
    """A run as the rules see it; its calls are those of a plain loop unless they are given."""
    if calls is None:
        plain = bool(made) and not made[0].scaler
        calls = log(FP32_LOOP if plain else SCALED_LOOP, [a.loss for a in made])
    ended = {"ended": "returned", "steps": len(made), "uses_autocast": "fp16"} | outcome
    end = Outcome(**ended)  # type: ignore[arg-type]  # fields by name
    return RunView(control, control, [*calls, *made, *others, end])


def fp32_run(
    made: Sequence[OptimizerStep] | None = None, *others: Observation, **outcome: object
) -> RunView:
    """The control in fp32; it learns unless told otherwise."""
    own = (
        steps(**WITHOUT_SCALER)
        if made is None
        else [replace(a, scaler="", scale=1.0) for a in made]
    )
    facts: dict[str, Any] = {"uses_autocast": ""} | outcome
    return run(own, *others, control="fp32", **facts)


HEALTHY_FP32 = fp32_run()


def evidence(
    baseline: RunView, fp32: RunView | None = HEALTHY_FP32, **controls: RunView
) -> Evidence:
    """What the rules get; ``fp32=None`` leaves the control out."""
    runs = {"as_is": baseline} | ({} if fp32 is None else {"fp32": fp32}) | controls
    return Evidence(runs, "native")


def tensor(max_abs: float | None = 1.0, **facts: object) -> Operand:
    """One input of an op: fp16, 64 x 256, finite."""
    healthy = Operand("fp16", (64, 256), max_abs, 0.01, 0, 0)
    return replace(healthy, **facts)  # type: ignore[arg-type]  # fields by name


def bad_op(name: str, *inputs: Operand, **facts: object) -> BadOp:
    """A forward op in fp16 whose finite inputs gave infinity in every step, and NaN losses."""
    usual = BadOp(
        id=0, kind="nonfinite", step=0, phase="forward", op=name, node="", module=MODULE,
        module_type="Block", line=LINE, code="h = f(x)", dtype="fp16",
        inputs=inputs or (tensor(),), scalars=(), nan=0, pos_inf=40, neg_inf=0, total=2048,
        fp32_max=None, fp32_finite=True, autocast=True, count=STEPS, last_step=STEPS - 1,
        reached_loss=True, reached_gradient=True,
    )  # fmt: skip
    return replace(usual, **facts)  # type: ignore[arg-type]  # fields by name


def scan(moment: str, kind: str, name: str, **facts: object) -> Scan:
    """A sound tensor of 256 fp32 numbers."""
    sound = Scan(moment, kind, name, "fp32", 256, 0, 0, 0.5)
    return replace(sound, **facts)  # type: ignore[arg-type]  # fields by name


def answers(made: Evidence) -> Mapping[str, Verdict]:
    """Every rule's verdict, by cause."""
    return {rule.id: verdict for rule, verdict in diagnose(made).answers}


def status(cause: str, made: Evidence) -> Status:
    """What the rule of ``cause`` says, a missing control included."""
    return answers(made)[cause].status


def causes(diagnosis: Diagnosis) -> list[str]:
    """Causes of the findings, root causes only, in their rank."""
    return [finding.cause for finding in diagnosis.findings]
