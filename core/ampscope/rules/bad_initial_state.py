"""Weights were not finite before training.

What it detects
    NaN or infinity in a parameter at its first sight, in fp32 as well.

Why it matters
    Nothing that follows can be finite.

Blind spots
    Weights that are finite and absurd show as an overflow instead.

Remedy
    Initialise every parameter; torch.empty is not an initialisation.
"""

from __future__ import annotations

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.run_view import RunView
from ampscope.control import BASELINE
from ampscope.observations import Scan
from ampscope.rules.verdict import Fix, Measurement, Rule, Status, Verdict, inconclusive, passed


def check(evidence: Evidence) -> Verdict:
    """Found by the scan of parameters at the first forward pass."""
    if evidence.fp32 is None:
        return inconclusive("Without the fp32 control a cast may have made them so.")
    reference = {s.name for s in _bad(evidence.fp32)}
    bad = [s for s in _bad(evidence.baseline) if s.name in reference]
    if not evidence.fp32_fails or evidence.fp32.first_bad_step not in (0, None):
        # A mask of infinities that no optimizer trains means to be one, and fp32 trains with it.
        bad = [s for s in bad if s.kind == "parameter" or s.nan or not s.inf]
    if bad and not evidence.symptoms and not evidence.fp32_symptoms:
        return passed("Such weights were there, and did no harm.")
    if not bad:
        return passed("All parameters are finite before the first step.")
    first = bad[0]
    return Verdict(
        Status.FOUND,
        f"Parameter {first.name} holds {first.nan} NaN, {first.inf} infinities and values up to "
        f"{first.max_abs or 0:.3g} before training.",
        module=first.name.rpartition(".")[0] or None,
        step=first.step,
        evidence=tuple(
            Measurement(f"NaN and infinities in {s.name}", s.nan + s.inf, 0, BASELINE, s.step)
            for s in bad[:5]
        ),
        fix=Fix("fix_init", f"Initialise {first.name}.", "nn.init.normal_(parameter, std=0.02)\n"),
    )


ABSURD = 1e6  # no initialisation in use gives such a weight; uninitialised memory does


def _bad(run: RunView) -> list[Scan]:
    kinds = ("parameter", "frozen")
    first = [s for s in run.scans if s.moment == "start" and s.kind in kinds and not s.step]
    return [s for s in first if s.nan + s.inf or (s.max_abs or 0.0) > ABSURD]


RULE = Rule(
    code="AMP030",
    id="bad_initial_state",
    title="The weights were bad before training",
    definition="NaN, infinity or absurd magnitudes in the parameters before the first step.",
    check=check,
    needs=(BASELINE, "fp32"),
    needs_ops=False,
    order=20,
    explains=("bad_input_data", "activation_overflow", "not_amp_divergence", "singular_gradient"),
    in_one_step=False,
)
