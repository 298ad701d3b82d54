"""In which precision a script really computed, over how many steps, and where no half came of it.

    flops  fp16 98 %, fp32 2 %      steps  40, of which 40 beside the fp32 control
    reasons, where nothing ran in half: ("cuda_missing", "autocast", "train.py:12")

Whether a script trained otherwise for want of a CUDA device: :func:`wants_cuda`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ampscope.analysis.op_precision import FlopShare
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.script_ends import lacks_cuda, may_want_cuda

MIN_COMPARED = 5  # steps; in fewer, a training that stands still looks like one that learns

_FIXED = "fixed_precision"  # of an op that no control can run in another precision
_MOST_NAMED = 3
_REQUESTS = ("cuda_missing", "trainer_fp16", "cuda_asked", "nullcontext")
# A trainer was asked for fp16 and takes bf16 instead, because it is on a CPU.
_FP16_REFUSED = re.compile(r"(?:fp16|float16|16-mixed)\b.{0,60}not supported on (?:the )?CPU", re.I)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why no half precision was used, as far as the script shows it. ``kind``: cuda_missing,
    trainer_fp16, autocast_off, autocast_idle, scaler_off, cuda_asked, nullcontext."""

    kind: str
    what: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionUse:
    """Of one script. ``flops`` by dtype, most first: matmuls, convolutions and attention, forward
    and backward, of all steps."""

    flops: tuple[tuple[str, int], ...]
    half_ops: int  # other ops on half-precision numbers
    steps: int  # optimizer steps that were attempted
    compared: int  # of these, the ones that the fp32 control made as well
    is_recorded: bool  # False of other frameworks, and of runs of older versions
    reasons: tuple[Reason, ...] = ()
    not_judged: tuple[str, ...] = ()  # ops that the control computes in the same fp8 or int8
    has_loss: bool = True  # a loss of the training was seen
    sites: tuple[str, ...] = ()  # lines at which numbers became half, the first of them first

    @property
    def total(self) -> int:
        """FLOPs in every dtype."""
        return sum(flops for _, flops in self.flops)

    @property
    def half_share(self) -> float | None:
        """Share of the FLOPs in 16 bits or fewer; None when there were none, or none recorded."""
        return FlopShare(self.flops).half_share

    @property
    def computed_none(self) -> bool:
        """Nothing computed in half precision; False where that is not known."""
        return self.is_recorded and not self.half_ops and not self.half_share

    @property
    def no_half(self) -> bool:
        """Nothing computed in half precision, and no number became half; False where that is not
        known."""
        return self.computed_none and not self.sites

    @property
    def apart(self) -> str:
        """What a comparison with the control leaves out, as the end of its sentence; "" where it
        leaves out nothing."""
        if not self.has_loss:
            return ", as far as gradients and weights show: its loss was not seen"
        if not self.not_judged:
            return ""
        named = ", ".join(self.not_judged[:_MOST_NAMED])
        more = f" and {rest} more" if (rest := len(self.not_judged) - _MOST_NAMED) > 0 else ""
        return (
            ", apart from the ops that the control computes in the same fp8, int8 or tensor type "
            f"({named}{more}): not judged"
        )

    @property
    def too_few(self) -> bool:
        """Fewer than :data:`MIN_COMPARED` steps stand beside the control."""
        return self.compared < MIN_COMPARED


def precision_use(baseline: RunView, fp32: RunView | None) -> PrecisionUse:
    """Of the baseline run; the control says how many steps can be compared."""
    outcome = baseline.outcome
    steps = len(baseline.steps)
    is_named = bool(outcome.uses_autocast or outcome.uses_half_model)
    seen = bool(outcome.flop_dtypes or outcome.half_ops)
    is_recorded = outcome.framework == "torch" and outcome.traced_ops > 0 and (seen or not is_named)
    return PrecisionUse(
        flops=tuple(zip(outcome.flop_dtypes, outcome.flop_counts, strict=False)),
        half_ops=outcome.half_ops,
        steps=steps,
        compared=0 if fp32 is None else min(steps, len(fp32.steps)),
        is_recorded=is_recorded,
        sites=tuple(dict.fromkeys(site.line for site in baseline.sites)),
        has_loss=bool(baseline.losses) or any(a.loss is not None for a in baseline.steps),
        reasons=tuple(_reasons(baseline)),
        not_judged=tuple(
            dict.fromkeys(
                f"{use.op} at {use.line}" if use.line else use.op
                for use in baseline.uses
                if use.name == _FIXED
            )
        ),
    )


def _reasons(run: RunView) -> list[Reason]:
    """The surest first, one of a kind."""
    found = [Reason(u.name, u.op, u.line) for u in run.uses if u.name in _REQUESTS]
    missing = {r.line for r in found if r.kind == "cuda_missing"}
    for call in run.calls:
        if call.name == "autocast":
            kind = "autocast_idle" if call.enabled else "autocast_off"
        elif call.name == "scaler_new" and not call.enabled:
            kind = "scaler_off"
        else:
            continue
        if call.line not in missing:  # torch switched that one off itself
            found.append(Reason(kind, "", call.line))
    order = ("cuda_missing", "trainer_fp16", "autocast_off", "autocast_idle", "scaler_off",
             "cuda_asked", "nullcontext")  # fmt: skip
    first = {r.kind: r for r in reversed(found)}
    return [first[kind] for kind in order if kind in first]


def wants_cuda(run: RunView, said: str) -> bool:
    """Whether the script could not run, ran without the autocast or GradScaler on CUDA that it
    asked for, or computed nothing in half precision, for a CUDA device that is not there. What
    runs in bf16 without the scaler that is meant for fp16 is another training. ``said``: what the
    script printed, and its traceback."""
    if lacks_cuda(run.outcome, said) or run.use("cuda_missing"):
        return True
    if may_want_cuda(run.outcome, said) or _FP16_REFUSED.search(said):
        return True
    if not any(run.use(name) for name in ("cuda_asked", "trainer_fp16")):
        return False
    # Both follow the device: a scaler is left out, and autocast takes bf16, fp16 on CUDA.
    if run.use("cpu_default") or any(c.name == "scaler_new" and not c.enabled for c in run.calls):
        return True
    return not run.steps or (run.control == BASELINE and precision_use(run, None).computed_none)
