"""What a person should hear of while a training runs: alarms over the steps' numbers.

    nonfinite_loss      the loss is NaN or infinite, and not by a loss scale that is too high
    nonfinite_gradient  a gradient is, and the optimizer stepped with it
    nonfinite_weight    a weight is
    zero_gradients      every gradient is exactly zero, many steps in a row, and the loss is not
    loss_spike          the loss jumped far above all that this run has seen, and stayed there
    stalled_weights     half-precision weights that get gradients are where they were long ago
    scale_collapse      the loss scale fell below a bound: no scale makes the gradients finite
    skips_in_a_row      GradScaler left out many steps one after another
    lost_share          fp16 could not hold that share of the weight gradients at this loss scale
    weights_not_moving  steps were taken, and the weights stayed as they were

Each is reported once when it begins, and again only after it had stopped.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections import deque
from dataclasses import dataclass

from ampscope.errors import AmpscopeError
from ampscope.number_words import value
from ampscope.numerics.formats import FORMATS
from ampscope.numerics.histogram import zones
from ampscope.records import Event, Frame, StepRecord

CALIBRATED_BELOW = 64.0  # ten halvings of GradScaler's 65536: no calibration goes below


class AmpscopeWarning(UserWarning):
    """An alarm under the policy ``warn``."""


def warn(text: str) -> None:
    """A warning; where warnings are made errors, a line on stderr: only the policy ``raise`` ends a
    training."""
    try:
        warnings.warn(text, AmpscopeWarning, stacklevel=2)
    except AmpscopeWarning:
        print(f"ampscope: {text}", file=sys.stderr)


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
    nonfinite: bool = True  # loss, gradients that are used, weights
    zero_steps: int = 10  # in a row; a loss of zero may have gradients of zero
    spike: float = 10.0  # times the largest loss of the run so far
    stalled_share: float = 0.05  # of the half-precision weights that got gradients, moved since


@dataclass(frozen=True, slots=True)
class Signs:
    """What is known of a step besides its record."""

    gradients: Frame | None = None  # of the weights, where they were counted
    optimizer: int = 0  # which one stepped: two losses are not compared with each other
    has_gradients: bool = True
    bad_gradient: str = ""  # a parameter whose gradient is not finite
    bad_weight: str = ""  # a parameter that is not finite after the step
    stalled: float | None = None  # share of the weights that moved in the last long span
    is_search: bool = False  # the loss went bad by a scaled gradient that it was computed with


class SpikeDetector:
    """Says when a loss has left everything that its run has seen, from the losses alone.

    A single outlier of a heavy-tailed loss comes back with the next batch: two losses in a row must
    be ``times`` the largest magnitude so far, and above it by :data:`RANGES` times the range of the
    last :data:`WINDOW` losses. A level that lasts for :data:`WINDOW` steps is the new normal.
    """

    WINDOW = 64
    LEAST = 20  # losses before any judgement
    RANGES = 20.0

    def __init__(self, times: float) -> None:
        self._times = times
        self._recent: deque[float] = deque(maxlen=self.WINDOW)
        self._largest = 0.0
        self._high = 0  # losses in a row that are

    @property
    def largest(self) -> float:
        """Of the losses so far that were no spike."""
        return self._largest

    def saw(self, loss: float) -> bool:
        """The next finite loss; True from the second one on that is too high."""
        if len(self._recent) >= self.LEAST and self._is_high(loss) and self._high < self.WINDOW:
            self._high += 1
            return self._high >= 2
        if self._high >= self.WINDOW:
            self._recent.clear()
        self._high = 0
        self._recent.append(loss)
        self._largest = max(self._largest, abs(loss))
        return False

    def _is_high(self, loss: float) -> bool:
        if loss <= self._times * self._largest:  # nearly always
            return False
        top, bottom = max(self._recent), min(self._recent)
        return loss - top > self.RANGES * (top - bottom)


class Alarms:
    """Looks at one step after the other; :meth:`check` returns the alarms that begin there."""

    def __init__(self, bounds: AlarmBounds) -> None:
        self.bounds = bounds
        self._ringing: set[str] = set()
        self._skips = self._still = 0
        self._was_taken = False  # any step so far
        self._zeros: dict[int, int] = {}  # steps in a row, by optimizer
        self._spikes: dict[int, SpikeDetector] = {}

    def rings(self, name: str) -> bool:
        """Whether the alarm was reported and has not stopped since."""
        return name in self._ringing

    def check(
        self, step: StepRecord, gradients: Frame | None = None, signs: Signs = Signs()
    ) -> list[Event]:  # frozen
        """``gradients`` are the step's weight gradients, where they were counted."""
        return [
            *self._not_finite(step, signs),
            *self._zero(step, signs),
            *self._spike(step, signs),
            *self._stalled(step, signs),
            *self._scale(step),
            *self._skipped(step),
            *self._lost(step, gradients),
            *self._not_moving(step),
        ]

    def _not_finite(self, step: StepRecord, signs: Signs) -> list[Event]:
        if not self.bounds.nonfinite:
            return []
        loss = step.loss
        is_bad = loss is not None and not math.isfinite(loss)
        if not (is_bad or signs.bad_gradient or signs.bad_weight):  # nearly always
            return self._calm("nonfinite_loss") + self._calm("nonfinite_gradient")
        text = f"The loss is {value(loss)}."
        # What GradScaler leaves out is its search for a scale, or skips_in_a_row.
        is_search = step.skipped and signs.is_search
        found = self._ring("nonfinite_loss", is_bad and not is_search, step, text)
        used = bool(signs.bad_gradient) and not step.skipped
        text = f"The optimizer stepped with a gradient that is not finite: {signs.bad_gradient}."
        found += self._ring("nonfinite_gradient", used, step, text)
        text = f"The weight {signs.bad_weight} is not finite: every later step is lost."
        if signs.bad_weight:  # looked for at some steps only
            found += self._ring("nonfinite_weight", True, step, text)
        return found

    def _zero(self, step: StepRecord, signs: Signs) -> list[Event]:
        bound = self.bounds.zero_steps
        if not bound or step.grad_norm is None or not signs.has_gradients or step.skipped:
            return []
        is_zero = step.grad_norm == 0.0 and step.loss != 0.0
        count = self._zeros[signs.optimizer] = (
            self._zeros.get(signs.optimizer, 0) + 1 if is_zero else 0
        )
        if count < bound:
            return self._calm("zero_gradients")
        text = (
            f"Every gradient was exactly zero in the last {count} steps, and the loss was not: "
            "nothing is learned. In fp16 they underflow without a loss scale; otherwise the loss "
            "does not depend on the parameters."
        )
        return self._ring("zero_gradients", True, step, text, float(count))

    def _spike(self, step: StepRecord, signs: Signs) -> list[Event]:
        if not self.bounds.spike or step.loss is None or not math.isfinite(step.loss):
            return []
        detector = self._spikes.get(signs.optimizer)
        if detector is None:
            detector = self._spikes[signs.optimizer] = SpikeDetector(self.bounds.spike)
        usual = detector.largest
        if not detector.saw(step.loss):
            return self._calm("loss_spike")
        text = f"The loss jumped to {step.loss:.6g} and stays; the largest before was {usual:.6g}."
        return self._ring("loss_spike", True, step, text, step.loss)

    def _stalled(self, step: StepRecord, signs: Signs) -> list[Event]:
        if signs.stalled is None or not self.bounds.stalled_share:
            return []
        text = (
            f"Of the half-precision weights that get gradients {signs.stalled:.1%} are elsewhere "
            "than at the last look, many steps ago: updates are below half an ulp and are rounded "
            "away. Keep the weights in fp32 (autocast casts them)."
        )
        stalled = signs.stalled < self.bounds.stalled_share
        return self._ring("stalled_weights", stalled, step, text, signs.stalled)

    def _scale(self, step: StepRecord) -> list[Event]:
        bound = self.bounds.scale_below
        if step.scale is None or not bound:
            return []
        if not step.scale < bound:  # NaN is not
            return self._calm("scale_collapse")
        text = (
            f"The loss scale fell to {step.scale:g}. At a scale this low gradients underflow, and "
            "what overflows is the model itself: find the module, or train in bf16."
        )
        return self._ring("scale_collapse", True, step, text, step.scale)

    def _skipped(self, step: StepRecord) -> list[Event]:
        self._skips = self._skips + 1 if step.skipped else 0
        self._was_taken |= not step.skipped
        bound = self.bounds.skips_in_a_row
        if not bound or (not self._was_taken and (step.scale or 0.0) > CALIBRATED_BELOW):
            return []  # a high init_scale takes many skips to come down
        if self._skips < bound:
            return self._calm("skips_in_a_row")
        text = (
            f"GradScaler has left out {self._skips} steps in a row: the gradients are not finite "
            "at any scale that it tried lately. The capsule of this run says where they come from."
        )
        return self._ring("skips_in_a_row", True, step, text, float(self._skips))

    def _lost(self, step: StepRecord, gradients: Frame | None) -> list[Event]:
        bound = self.bounds.lost_share
        if gradients is None or not bound or step.scale is None or step.skipped:
            return []
        share = lost_share(gradients)
        if share is None:
            return []
        text = (
            f"{share:.0%} of the non-zero weight gradients are too small for fp16 at the loss "
            f"scale {gradients.scale:g}. Raise the scale (GradScaler's init_scale), or use bf16 "
            "(on a GPU: from compute capability 8.0 on)."
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
        self, name: str, ringing: bool, step: StepRecord, text: str, value: float | None = None
    ) -> list[Event]:
        if not ringing:
            return self._calm(name)
        if name in self._ringing:
            return []
        self._ringing.add(name)
        return [Event(step.step, "alarm", name, text, value=value)]

    def _calm(self, name: str) -> list[Event]:
        """The alarm does not ring: its text, of no use, is not written."""
        self._ringing.discard(name)
        return []


def lost_share(gradients: Frame) -> float | None:
    """Share of the non-zero elements that fp16 would round to zero; None without any."""
    found = zones(gradients.rows.sum(axis=0), FORMATS["fp16"])
    return found.lost / found.nonzero if found.nonzero else None
