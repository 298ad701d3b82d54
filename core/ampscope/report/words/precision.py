"""The first sentence of every verdict: what ran in which precision, and how much was judged."""

from __future__ import annotations

from ampscope.analysis.precision_use import PrecisionUse, Reason
from ampscope.report.words.numbers import percent, plural

MAX_REASONS = 3
_FLOPS = "FLOPs (matmuls and convolutions, forward and backward)"


def headline(use: PrecisionUse) -> str:
    """Which precision ran, and how many steps were judged; "" where no step was made."""
    if not use.steps:
        return ""
    judged = f"{plural(use.steps, 'optimizer step')} {'was' if use.steps == 1 else 'were'} judged"
    if not use.is_recorded:
        return f"{judged}; in which precision each op ran was not recorded."
    if use.no_half:
        return f"This run used no half precision: {why_none(use)}. {judged}, in fp32."
    return f"{_shares(use)}; {judged}."


def no_fault(use: PrecisionUse) -> str:
    """The verdict where no fault was found: what was compared, and what was not."""
    if use.no_half:
        return "No fault found in fp32; what AMP does to this training was not judged."
    if use.too_few:
        return (
            f"No fault found in {plural(use.steps, 'optimizer step')}. That is too few to "
            "compare the training with its fp32 control."
        )
    return f"No fault found: the script trains as its fp32 control does{use.apart}."


def why_none(use: PrecisionUse) -> str:
    """Why nothing ran in half precision, without a full stop."""
    if not use.reasons:
        return "it opens no autocast region and has no half-precision weights or inputs"
    return "; ".join(_reason(reason) for reason in use.reasons[:MAX_REASONS])


def rehearsal_helps(use: PrecisionUse) -> bool:
    """Whether ``--policy cuda`` would bring in the half precision that CUDA's absence kept out."""
    return use.no_half and any(r.kind == "cuda_missing" for r in use.reasons)


def _shares(use: PrecisionUse) -> str:
    half = plural(use.half_ops, "other op")
    if use.half_share is None:
        return f"No matmul and no convolution ran; {half} computed in half precision"
    (first, most), *rest = use.flops
    if not rest:
        text = f"All {_FLOPS} ran in {first}"
    else:
        text = f"{percent(most / use.total)} of the {_FLOPS} ran in {first}"
        text += "".join(f", {percent(flops / use.total)} in {dtype}" for dtype, flops in rest)
    return text if use.half_share else f"{text}; {half} computed in half precision"


def _reason(reason: Reason) -> str:
    at = f" at {reason.line}" if reason.line else ""
    match reason.kind:
        case "cuda_missing":
            return f"{reason.what} on CUDA{at} is off, because this machine has no CUDA device"
        case "trainer_fp16":
            return (
                f"the trainer was asked for {reason.what}, which Accelerate leaves out on a CPU "
                "without an error"
            )
        case "autocast_off":
            return f"autocast{at} is disabled"
        case "autocast_idle":
            return f"no op ran in half precision under autocast{at}"
        case "scaler_off":
            return f"the GradScaler{at} is disabled"
        case "cuda_asked":
            return f"torch.cuda.is_available(){at} is false on this machine"
    return f"nullcontext is entered{at}"
