"""Did a fix work? A run with it is judged like the original, by symptom and by rule."""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.diagnose import Finding, diagnose

# With these a script leaves steps out, or ends, by itself: a fix has to bring the steps back.
GUARDED = frozenset({Symptom.ENDED, Symptom.DROPPED, Symptom.EXCEPTION})
NUMBERS = frozenset({Symptom.LOSS, Symptom.WEIGHTS, Symptom.GRADIENTS, Symptom.DIVERGED})


def is_cured(
    finding: Finding, evidence: Evidence, fixed: RunView, fixed_fp32: RunView | None
) -> bool:
    """Whether ``fixed`` shows none of the original's symptoms, and the cause is found no more."""
    if not fixed.attempts or fixed.has_exception:
        return False
    if evidence.fp32 is not None and not _ends_alike(fixed, evidence):
        return False
    if finding.cause == "not_amp_divergence":
        reference = symptoms(fixed_fp32, None) if fixed_fp32 is not None else NUMBERS
        return not (reference & NUMBERS) and not (symptoms(fixed, None) & NUMBERS)
    if finding.cause == "shared_scaler_interference":
        return _victims_learn(evidence.as_is, fixed)
    if symptoms(fixed, evidence.fp32) & evidence.symptoms:
        return False
    if finding.cause == "clip_before_unscale":
        return _clips_unscaled(evidence.as_is, fixed)
    again = diagnose(Evidence({"as_is": fixed, "fp32": evidence.fp32 or fixed}, evidence.policy))
    return all(f.cause != finding.cause for f in again.findings)


def _ends_alike(fixed: RunView, evidence: Evidence) -> bool:
    """Whether ``fixed`` comes to the end that the fp32 control comes to: its exit status, and its
    number of steps where the script as it is made another. What a time limit cut short is compared
    by its status alone."""
    fp32, before = evidence.fp32, evidence.as_is
    assert fp32 is not None
    if fp32.has_exception or not fixed.ended_itself:
        return True  # no end to come to; or it went on to a limit of the run
    if fp32.ended_itself and fixed.outcome.exit_code != fp32.outcome.exit_code:
        return False
    if not fp32.ended_itself and fixed.outcome.exit_code:
        return False
    guards = bool(evidence.symptoms & GUARDED or before.guarded_losses)
    if not guards or "time" in (fp32.outcome.ended, fixed.outcome.ended):
        return True
    return fixed.outcome.attempts >= fp32.outcome.attempts


def _clips_unscaled(before: RunView, after: RunView) -> bool:
    """The log sees the script's own clip in both runs; the norm that it met tells them apart."""
    norms = [
        next((c.value for c in run.calls if c.name == "clip" and c.value is not None), None)
        for run in (before, after)
    ]
    moved = [
        next((a.update_norm for a in r.attempts if a.update_norm), 0.0) for r in (before, after)
    ]
    if norms[0] is not None and norms[1] is not None:
        return norms[1] < norms[0] / 2
    return (moved[1] or 0.0) > 2 * (moved[0] or 0.0)


def _victims_learn(before: RunView, after: RunView) -> bool:
    """The optimizers that never overflowed have gradients again; the other one's fault remains."""
    victims = {a.optimizer for a in before.attempts} - {
        a.optimizer for a in before.attempts if a.grad_nonfinite
    }
    shares = [_last_zero_share(run, victims) for run in (before, after)]
    return bool(victims) and shares[1] < 0.5 * shares[0]


def _last_zero_share(run: RunView, optimizers: set[str]) -> float:
    own = [a for a in run.attempts if a.optimizer in optimizers and a.grad_total][-5:]
    total = sum(a.grad_total for a in own)
    return sum(a.grad_zero for a in own) / total if total else 0.0
