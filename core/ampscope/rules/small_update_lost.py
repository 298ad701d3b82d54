"""Updates are smaller than half the spacing of the weights' format.

What it detects
    Half-precision weights (or moving averages of weights) that stay as they are, while the same
    update moves them in the fp32 control; fp32 weights that the script rounds to half, likewise.
    Latent: weights that lose more than a tenth of their way, and less than half of it, while the
    loss keeps up with fp32's batch by batch, and less than 30 % of the weights that fp32 moves
    end where they began.

Why it matters
    w + update rounds back to w. bf16 keeps 8 bits, so an update below w/512 is lost.

Blind spots
    Weights that fp32 does not move either; a rounding that the fp32 control does too. Steps that
    move few weights each and all of them over many steps (stochastic rounding, Kahan's
    compensation) lose nothing.

Remedy
    fp32 master weights (autocast instead of .half()), fp32 averages, stochastic rounding.
"""

from __future__ import annotations

from dataclasses import replace

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.half_sums import MIN_AVERAGE_STAGNATED, stagnated_average
from ampscope.analysis.half_tensors import (
    KEEPS_UP,
    KEPT,
    SLOW,
    STANDS,
    averages_keep_up,
    half_weights,
    kept_descent,
    kept_motion,
    least_moved,
    rounded_weights,
    slow_average,
    standing_share,
    was_cast,
)
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import lags, learns_slower
from ampscope.control import BASELINE, Control
from ampscope.observations import STAGNATED_SHARE
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed

STILL = 0.5  # of what moves in fp32
STANDING = "weights that end where they began, of those that fp32 moves"


def check(evidence: Evidence) -> Verdict:
    """Found by comparing what moved with the fp32 control."""
    run, fp32 = evidence.baseline, evidence.fp32
    if fp32 is None:
        return inconclusive("Only the fp32 control shows what should have moved.")
    found = _weights(run, fp32) or _slow(run, fp32)
    if found is None and not averages_keep_up(run, fp32):
        found = _stagnated(run)
    return found or passed("What fp32 moves, moves here too.")


def _weights(run: RunView, fp32: RunView) -> Verdict | None:
    """Trained weights in half, or rounded to half by the script, of which a step moves few."""
    moved, dtype = least_moved(run, fp32), half_weights(run)
    rounded = "" if dtype else rounded_weights(run)
    if not (dtype or rounded) or moved is None or moved.own >= STILL * moved.reference:
        return None
    kept = kept_descent(run, fp32, moved.optimizer) if was_cast(run) else kept_motion(run, fp32)
    # Few may move in one step and come as far over many; short of that, learning tells.
    if kept is not None and kept >= KEEPS_UP:
        return None
    stands = max(standing_share(run, fp32) or 0.0, 0.0)  # below 0 where more move than in fp32
    is_slower = learns_slower(run, fp32) or lags(run, fp32)
    is_harmed = kept is None or kept < KEPT or stands >= STANDS or is_slower
    way = [] if kept is None else [Measurement("way over the run, of fp32's", kept, KEPT, BASELINE)]
    found = _found(
        "",
        f"A step moves {moved.own:.1%} of the {dtype or 'fp32'} weights, and"
        f" {moved.reference:.1%} in fp32: the updates are below half the spacing of the numbers"
        + (f" in {rounded}, to which the script rounds the weights." if rounded else ".")
        + (
            f" At the end {stands:.0%} of those that fp32 moves stand where they began."
            if stands >= STANDS
            else ""
        ),
        Measurement("weights moved a step", moved.own, STILL * moved.reference, BASELINE),
        Measurement("weights moved a step in fp32", moved.reference, None, "fp32"),
        *way,
        *([Measurement(STANDING, stands, STANDS, BASELINE)] if stands else []),
    )
    text = "Do not round the weights." if rounded else "Keep the weights in fp32."
    fix = Fix("fp32_params", text, MASTERS, () if rounded else CONTROLS)
    if is_harmed or kept is None:
        return replace(found, fix=fix)
    lost = f" Over the run {1 - kept:.0%} of the way is lost. The loss falls as in fp32 so far."
    return replace(found, status=Status.LATENT, reason=found.reason + lost, fix=fix)


def _slow(run: RunView, fp32: RunView) -> Verdict | None:
    """An average that came less far than in fp32."""
    average = slow_average(run, fp32)
    if average is None:
        return None
    name, own, reference = average.scan.name, average.change, average.reference_change
    found = _found(
        name.rpartition(".")[0],
        f"{name} ({average.scan.dtype}, trained by no optimizer) changed by {own:.2%} over the run,"
        f" and by {reference:.2%} in fp32.",
        Measurement("change over the run", own, SLOW * reference, BASELINE),
        Measurement("change over the run in fp32", reference, None, "fp32"),
    )
    if run.steps:
        return found
    # No optimizer trains anything: these are the weights, which the script updates itself.
    return replace(found, fix=Fix("fp32_params", "Keep the weights in fp32.", MASTERS, CONTROLS))


def _stagnated(run: RunView) -> Verdict | None:
    """Updates of an average that leave it as it is."""
    op = stagnated_average(run)
    if op is None:
        return None
    share, step = op.error or 0.0, op.step
    found = _found(
        op.module,
        f"Line {op.line} updates an average of weights in {op.dtype}, and {share:.0%} of its"
        f" elements stay as they are, {op.count} times: the updates are below half the spacing.",
        Measurement("elements that stand still", share, STAGNATED_SHARE, BASELINE, step),
        Measurement("times", op.count, MIN_AVERAGE_STAGNATED, BASELINE, step),
    )
    # An average that lives in half rounds each update again, in whatever precision it is computed.
    made = (s.line for s in run.sites if s.role == "weights" and s.kind in MADE)
    lines = [*dict.fromkeys(line for line in (op.line, *made) if line)][:MOST_LINES]
    fix = replace(found.fix, controls=(Control.of(fp32_lines=tuple(lines)),)) if lines else None
    return replace(found, line=op.line, fix=fix or found.fix)


def _found(module: str, reason: str, *evidence: Measurement) -> Verdict:
    fix = Fix("fp32_params", "Keep the average in fp32.", COPY, CONTROLS)
    found = Verdict(Status.FOUND, reason, phase="step", step=0, evidence=evidence, fix=fix)
    return replace(found, module=module or None)


MADE = ("cast", "made", "loaded", "module")  # kinds of a site
MOST_LINES = 3
MASTERS = "model = model.float()  # masters in fp32; autocast computes in half\n"
COPY = "average = copy.deepcopy(model).float()  # and p.float() of the weights that go into it\n"
CONTROLS = ("fp32_state", "fp32_params")
RULE = Rule(
    code="AMP024",
    id="small_update_lost",
    title="Updates are too small for the weights' precision",
    definition="w + update equals w: weights, moving averages or weight decay stand still in half "
    "precision.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=72,
    is_measured=True,
)
