"""What half precision did to gradients: entries that are zero in the run and not in its fp32
control, and how far the first gradients are from fp32's.

The two runs have the same weights until the first step that is taken, so the comparison by
parameter is made there; later steps are compared as shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import RunView

MATTERS = 1e-2  # of the whole gradient's norm
MOSTLY = 0.1  # share of zeros up to which fp32's gradient of a parameter counts as there
LATE = 5  # last steps with finite gradients
WRONG = 0.5  # of the gradient's norm; healthy bf16 trainings are off by up to 0.35
MIN_SAMPLED = 64  # entries
SAME_LOSS = 0.1  # of the loss: more, and the two runs drew other random numbers


def late_zero_share(run: RunView) -> float:
    """Exactly zero gradient entries in the last steps with finite gradients."""
    seen = run.own_gradients[-LATE:]
    total = sum(a.grad_total for a in seen)
    return sum(a.grad_zero for a in seen) / total if total else 0.0


def dead_parameters(run: RunView, fp32: RunView) -> list[str]:
    """Parameters without any gradient here that in fp32 have a part of it that matters.

    A bias before a normalisation has a gradient of rounding noise in fp32 and none in half: the
    share of the total norm tells it from a loss.
    """
    reference = {g.name: g for g in fp32.gradients if g.norm and g.step == 0}
    total = math.sqrt(sum((g.norm or 0.0) ** 2 for g in reference.values()))
    # A skipped step says nothing: its gradients are infinite, or were made zero by a clip that
    # divided by an infinite norm.
    first = next((a.step for a in run.own_gradients if not a.skipped), None)
    names = []
    for own in (g for g in run.gradients if g.step == first and g.total and not g.nonfinite):
        other = reference.get(own.name)
        if own.zero < own.total or other is None:
            continue
        if other.zero < MOSTLY * other.total and (other.norm or 0.0) > MATTERS * total:
            names.append(own.name)
    return names


@dataclass(frozen=True, slots=True)
class AskedLoss:
    """What half precision flushed of gradients that the script took by ``torch.autograd.grad`` at
    ``line``: the share of exact zeros beyond that of fp32, a mean over the first calls."""

    line: str
    step: int
    lost: float


def asked_loss(run: RunView, fp32: RunView) -> AskedLoss | None:
    """The line that loses most; None where nothing was counted in both runs."""
    shares: list[dict[str, list[float]]] = []
    for view in (run, fp32):
        by_line: dict[str, list[float]] = {}
        for call in view.calls:
            if call.name == "grad" and call.value is not None and not call.scaled:
                by_line.setdefault(call.line, []).append(call.value)
        shares.append(by_line)
    found = []
    for line, own in shares[0].items():
        pairs = list(zip(own, shares[1].get(line, ()), strict=False))
        if line and pairs:
            step = next(c.step for c in run.calls if (c.name, c.line) == ("grad", line))
            lost = math.fsum(a - b for a, b in pairs) / len(pairs)
            found.append(AskedLoss(line, step, lost))
    return max(found, key=lambda one: one.lost, default=None)


@dataclass(frozen=True, slots=True)
class GradientError:
    """How far the first gradients are from the fp32 control's: 2-norm of the difference over that
    of fp32's gradient, on sampled entries; and the parameter with the largest part of it."""

    error: float
    parameter: str


def gradient_error(run: RunView, fp32: RunView) -> GradientError | None:
    """Of the first step, at which both runs have the same weights. None where its gradients are
    not finite, were not sampled, or belong to another batch or other random numbers."""
    if difference(run, fp32) or not (run.steps and fp32.steps):
        return None
    own, other = run.steps[0], fp32.steps[0]
    before = [sum(c.name == "backward" and not c.step for c in r.calls) for r in (run, fp32)]
    if before[0] != before[1]:
        return None  # batches were left out before it
    if 0 in {*run.bad_gradient_steps, *fp32.bad_gradient_steps}:
        return None
    if own.loss is None or other.loss is None:
        return None
    if not abs(own.loss - other.loss) <= SAME_LOSS * abs(other.loss):
        return None
    samples = {g.name: g.sample for g in fp32.gradients if g.step == 0}
    errors: dict[str, float] = {}
    length, count = 0.0, 0
    for gradient in (g for g in run.gradients if g.step == 0):
        full = samples.get(gradient.name, ())
        if len(full) != len(gradient.sample):
            return None
        pairs = zip(gradient.sample, full, strict=True)
        weight = gradient.total / max(len(full), 1)  # entries that each sampled one stands for
        errors[gradient.name] = weight * math.fsum((a - b) ** 2 for a, b in pairs)
        length += weight * math.fsum(b * b for b in full)
        count += len(full)
    if count < MIN_SAMPLED or not length:
        return None
    error = math.sqrt(sum(errors.values()) / length)
    return GradientError(error, max(errors, key=errors.__getitem__))
