"""For every skipped step: which parameters held Inf or NaN, in the order backward reached them.

The first in backward order is nearest to where the trouble began; the rest mostly inherit it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ampscope.analysis.skip_causes import SkipCause, SkipEvidence, skip_causes
from ampscope.records import StepRecord


@dataclass(frozen=True, slots=True)
class BadStep:
    """One step that was skipped, or whose gradients were not finite although it was taken."""

    step: int
    scale: float | None
    skipped: bool
    parameter_count: int  # parameters whose gradients held NaN or Inf
    first_parameter: str  # the first that backward reached, "" when none was recorded
    cause: SkipCause | None = None  # of a skipped step


def bad_steps(
    steps: Sequence[StepRecord],
    firsts: Mapping[int, tuple[int, str]],
    optimizers: Mapping[int, str] | None = None,
    evidence: Mapping[int, SkipEvidence] | None = None,
) -> list[BadStep]:
    """Skipped steps and steps with non-finite gradients. ``firsts`` maps a step to the number of
    its non-finite parameters and the first of them in backward order; ``optimizers`` to whose step
    it is; ``evidence`` is what is known of the bad gradients."""
    causes = skip_causes(steps, optimizers, evidence)
    return [
        BadStep(s.step, s.scale, s.skipped, *firsts.get(s.step, (0, "")), causes.get(s.step))
        for s in steps
        if s.skipped or s.step in firsts
    ]
