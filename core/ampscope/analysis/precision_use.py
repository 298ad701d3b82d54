"""In which precision a script really computed, over how many steps, and where no half came of it.

flops  fp16 98 %, fp32 2 %      steps  40, of which 40 beside the fp32 control
reasons, where nothing ran in half: ("cuda_missing", "autocast", "train.py:12")
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.analysis.dtypes import is_half
from ampscope.analysis.run_view import RunView

MIN_COMPARED = 5  # steps; in fewer, a training that stands still looks like one that learns

_FIXED = "fixed_precision"  # of an op that no control can run in another precision
_MOST_NAMED = 3
_REQUESTS = ("cuda_missing", "trainer_fp16", "cuda_asked", "nullcontext")


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

    @property
    def total(self) -> int:
        """FLOPs in every dtype."""
        return sum(flops for _, flops in self.flops)

    @property
    def half_share(self) -> float | None:
        """Share of the FLOPs in 16 bits or fewer; None when there were none, or none recorded."""
        half = sum(flops for dtype, flops in self.flops if is_half(dtype))
        return half / self.total if self.total else None

    @property
    def no_half(self) -> bool:
        """Nothing computed in half precision; False where that is not known."""
        return self.is_recorded and not self.half_ops and not self.half_share

    @property
    def apart(self) -> str:
        """What a comparison with the control leaves out, as the end of its sentence; "" where it
        leaves out nothing."""
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


def precision_use(as_is: RunView, fp32: RunView | None) -> PrecisionUse:
    """Of the script as it is; the control says how many steps can be compared."""
    outcome = as_is.outcome
    steps = len(as_is.attempts)
    is_named = bool(outcome.uses_autocast or outcome.uses_half_model)
    seen = bool(outcome.flop_dtypes or outcome.half_ops)
    is_recorded = outcome.framework == "torch" and outcome.traced_ops > 0 and (seen or not is_named)
    return PrecisionUse(
        flops=tuple(zip(outcome.flop_dtypes, outcome.flop_counts, strict=False)),
        half_ops=outcome.half_ops,
        steps=steps,
        compared=0 if fp32 is None else min(steps, len(fp32.attempts)),
        is_recorded=is_recorded,
        reasons=tuple(_reasons(as_is)),
        not_judged=tuple(
            dict.fromkeys(
                f"{use.op} at {use.line}" if use.line else use.op
                for use in as_is.uses
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
