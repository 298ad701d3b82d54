"""Updates are smaller than half the spacing of the weights' format.

What it detects
    Half-precision weights (or moving averages of weights) that stay as they are, while the same
    update moves them in the fp32 control.

Why it matters
    w + update rounds back to w. bf16 keeps 8 bits, so an update below w/512 is lost.

Blind spots
    Weights that fp32 does not move either.

Remedy
    fp32 master weights (autocast instead of .half()), fp32 averages, stochastic rounding.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.observations import BadOp
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed

STILL = 0.5  # of what moves in fp32
AVERAGE_STILL = 0.5  # a moving average that came less than half as far
OFTEN = 5  # updates of an average that moved next to nothing


def check(evidence: Evidence) -> Verdict:
    """Found by comparing what moved with the fp32 control."""
    run, fp32 = evidence.as_is, evidence.fp32
    if fp32 is None:
        return inconclusive("Only the fp32 control tells what should have moved.")
    moved, reference = run.moved_share, fp32.moved_share
    taken = [a for a in run.attempts if not a.skipped]
    half = any("fp16" in a.weight_dtypes or "bf16" in a.weight_dtypes for a in taken)
    gradients = any(a.grad_norm for a in taken)
    if half and gradients and moved is not None and reference and moved < STILL * reference:
        dtype = taken[0].weight_dtypes
        return _found(
            "",
            f"A step moves {moved:.1%} of the {dtype} weights, and {reference:.1%} in fp32: the"
            " updates are below half the spacing of the numbers.",
            (
                Measurement("weights moved a step", moved, STILL * reference, "as_is"),
                Measurement("weights moved a step in fp32", reference, None, "fp32"),
            ),
        )
    return _averages(run, fp32)


def _averages(run: RunView, fp32: RunView) -> Verdict:
    end = {s.name: s for s in fp32.scans_of("end", "frozen") + fp32.scans_of("end", "buffer")}
    for scan in run.scans_of("end", "frozen"):
        other = end.get(scan.name)
        if other is None or scan.dtype not in ("fp16", "bf16") or not other.change:
            continue
        if (scan.change or 0.0) < AVERAGE_STILL * other.change:
            return _found(
                scan.name.rpartition(".")[0],
                f"{scan.name} ({scan.dtype}, trained by no optimizer) changed by"
                f" {scan.change or 0:.2%} over the run, and by {other.change:.2%} in fp32.",
                (
                    Measurement(
                        "change over the run",
                        scan.change or 0.0,
                        AVERAGE_STILL * other.change,
                        "as_is",
                    ),
                    Measurement("change over the run in fp32", other.change, None, "fp32"),
                ),
            )
    for op in run.bad_ops:
        if op.kind == "stall" and op.count >= OFTEN and is_average(op):
            return _found(
                op.module,
                f"Line {op.line} updates an average of weights in {op.dtype}, and"
                f" {op.error or 0:.0%} of its elements stay as they are, {op.count} times: the"
                " updates are below half the spacing.",
                (
                    Measurement(
                        "elements that stand still", op.error or 0.0, 0.9, "as_is", op.attempt
                    ),
                    Measurement("times", op.count, OFTEN, "as_is", op.attempt),
                ),
            )
    return passed("What fp32 moves, moves here too.")


def is_average(op: BadOp) -> bool:
    """Weights are involved: the target, or what is added, is a parameter or made of one."""
    return any(o.is_parameter for o in op.inputs)


def _found(module: str, reason: str, evidence: tuple[Measurement, ...]) -> Verdict:
    return Verdict(
        Status.FOUND,
        reason,
        module=module or None,
        phase="step",
        step=0,
        evidence=evidence,
        fix=Fix(
            "fp32_params",
            "Keep weights and averages in fp32.",
            PATCH,
            ("fp32_state", "fp32_params"),
        ),
    )


PATCH = "model = model.float()  # masters in fp32; autocast computes in half\n"


RULE = Rule("small_update_lost", check, ("as_is", "fp32"), 72)
