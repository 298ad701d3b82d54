"""What the Gradients page looks at, and what roles and numbers are called."""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.records import Role
from app.text import power_of_two

ROLE_NAMES = {
    Role.GRAD_OUTPUT: "output gradients",
    Role.WEIGHT_GRAD: "weight gradients",
    Role.ACTIVATION: "activations",
    Role.WEIGHT: "weights",
    Role.UPDATE: "weight updates",
}
UNDERFLOW_NAMES = {
    "below_range": "below range",
    "cancelled": "cancelled or flipped",
    "subnormal": "subnormal",
    "zero_before": "zero before",
}
UNSPLIT_NAMES = {"lost": "lost", "subnormal": "subnormal", "zero_before": "zero before"}


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at: one role at one step, as recorded or at another loss scale."""

    role: Role
    step: int  # of a frame that adds up several steps, the first
    format_name: str
    recorded_scale: float
    wanted_exponent: int | None  # None where no loss scale multiplies these values
    shift: int
    last_step: int | None = None
    recorded_steps: int | None = 1  # in the frame; None where that cannot be told

    @property
    def when(self) -> str:
        """Which steps are shown."""
        if self.last_step is None or self.last_step == self.step:
            return f"Step {self.step}"
        many = f"{self.recorded_steps:,} recorded steps" if self.recorded_steps else "several steps"
        return f"Steps {self.step:,} to {self.last_step:,} ({many} added up)"

    @property
    def is_plain(self) -> bool:
        """True where the recorded gradients carry no scale: it is 1, or there is no scaler."""
        return self.recorded_scale == 1.0

    @property
    def axis_title(self) -> str:
        """The same in a few words, for an axis."""
        if not self.role.is_gradient:
            return "magnitude, as recorded"
        if self.wanted_exponent is None or self.shift == 0:
            factor = "" if self.is_plain else f" (× {power_of_two(self.recorded_scale)})"
            return f"magnitude, as recorded{factor}"
        kind = "unscaled" if self.wanted_exponent == 0 else "at another scale"
        return f"magnitude, {kind} (× 2^{self.wanted_exponent})"

    @property
    def title(self) -> str:
        """Which of the views this is; the views are never mixed."""
        if not self.role.is_gradient:
            return "as recorded"
        recorded = power_of_two(self.recorded_scale)
        if self.wanted_exponent is None:
            return f"as recorded, at loss scale {recorded}"
        if self.shift == 0 and self.is_plain:
            return "as recorded, with no loss scale in them"
        if self.shift == 0:
            return f"as recorded, at the run's loss scale {recorded}"
        if self.wanted_exponent == 0:
            return f"unscaled (recorded at loss scale {recorded})"
        return f"as if the loss scale were 2^{self.wanted_exponent} (recorded at {recorded})"
