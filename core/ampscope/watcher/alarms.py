"""What a person should hear of while a training runs: four alarms over the steps' numbers.

    scale_collapse      the loss scale fell below a bound: no scale makes the gradients finite
    skips_in_a_row      GradScaler left out many steps one after another
    lost_share          fp16 could not hold that share of the weight gradients at this loss scale
    weights_not_moving  steps were taken, and the weights stayed as they were

Each is told once when it begins, and again only after it had stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.errors import AmpscopeError
from ampscope.exponents import zones
from ampscope.formats import FORMATS
from ampscope.records import Event, Frame, StepRecord

CALIBRATED_BELOW = 64.0  # ten halvings of GradScaler's 65536: no calibration goes below


class AmpscopeWarning(UserWarning):
    """An alarm under the policy ``warn``."""


class Alarm(AmpscopeError):  # noqa: N818  # says what happened, as the others of the tree
    """An alarm under the policy ``raise``."""


class StopAsked(AmpscopeError):  # noqa: N818  # as above
    """A person asked the run to stop; a `with` block ends on it quietly."""


class TrainingStopped(AmpscopeError):  # noqa: N818  # as above
    """An alarm under the policy ``stop``; ``with ampscope.watch(...)`` ends on it quietly."""


@dataclass(frozen=True, slots=True)
class AlarmBounds:
    """When an alarm is raised; 0 switches one off."""

    scale_below: float = 1.0  # scaling down is for overflow of the model itself, which it hides
    skips_in_a_row: int = 10  # from 65536 ten halvings reach 64: no calibration takes so many
    lost_share: float = 0.2
    moved_below: float = 1e-3  # share of the weights that a step changes
    still_steps: int = 3  # measured steps in a row of which that holds


class Alarms:
    """Looks at one step after the other; :meth:`check` returns the alarms that begin there."""

    def __init__(self, bounds: AlarmBounds) -> None:
        self.bounds = bounds
        self._ringing: set[str] = set()
        self._skips = self._still = 0
        self._was_taken = False  # any step so far

    def check(self, step: StepRecord, gradients: Frame | None = None) -> list[Event]:
        """``gradients`` are the step's weight gradients, where they were counted."""
        return [
            *self._scale(step),
            *self._skipped(step),
            *self._lost(step, gradients),
            *self._not_moving(step),
        ]

    def _scale(self, step: StepRecord) -> list[Event]:
        bound = self.bounds.scale_below
        if step.scale is None or not bound:
            return []
        text = (
            f"The loss scale fell to {step.scale:g}. At a scale this low gradients underflow, and "
            "what overflows is the model itself: find the module, or train in bf16."
        )
        return self._ring("scale_collapse", step.scale < bound, step, text, step.scale)

    def _skipped(self, step: StepRecord) -> list[Event]:
        self._skips = self._skips + 1 if step.skipped else 0
        self._was_taken |= not step.skipped
        bound = self.bounds.skips_in_a_row
        if not bound or (not self._was_taken and (step.scale or 0.0) > CALIBRATED_BELOW):
            return []  # a high init_scale takes many skips to come down
        text = (
            f"GradScaler has left out {self._skips} steps in a row: the gradients are not finite "
            "at any scale that it tried lately. The capsule of this run says where they come from."
        )
        ringing = self._skips >= bound
        return self._ring("skips_in_a_row", ringing, step, text, float(self._skips))

    def _lost(self, step: StepRecord, gradients: Frame | None) -> list[Event]:
        bound = self.bounds.lost_share
        if gradients is None or not bound or step.scale is None or step.skipped:
            return []
        share = lost_share(gradients)
        if share is None:
            return []
        text = (
            f"{share:.0%} of the non-zero weight gradients are too small for fp16 at the loss "
            f"scale {gradients.scale:g}. Raise the scale (GradScaler's init_scale) or use bf16."
        )
        return self._ring("lost_share", share > bound, step, text, share)

    def _not_moving(self, step: StepRecord) -> list[Event]:
        nothing_to_do = step.skipped or not step.lr or not step.grad_norm
        if step.moved_share is None or nothing_to_do or not self.bounds.still_steps:
            return []
        still = step.moved_share < self.bounds.moved_below
        self._still = self._still + 1 if still else 0
        text = (
            f"The last {self._still} measured steps changed {step.moved_share:.2%} of the weights. "
            "Weights in half precision lose small updates: keep them in fp32 (autocast casts them)."
        )
        ringing = self._still >= self.bounds.still_steps
        return self._ring("weights_not_moving", ringing, step, text, step.moved_share)

    def _ring(
        self, name: str, ringing: bool, step: StepRecord, text: str, value: float
    ) -> list[Event]:
        if not ringing:
            self._ringing.discard(name)
            return []
        if name in self._ringing:
            return []
        self._ringing.add(name)
        return [Event(step.step, "alarm", name, text, value=value)]


def lost_share(gradients: Frame) -> float | None:
    """Share of the non-zero elements that fp16 would round to zero; None without any."""
    found = zones(gradients.rows.sum(axis=0), FORMATS["fp16"])
    return found.lost / found.nonzero if found.nonzero else None
