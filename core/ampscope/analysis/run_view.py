"""One run of a script as the rules see it: its observations by kind, and numbers read off them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from ampscope.gradient_change import GradientChange
from ampscope.observations import (
    READ_GRADIENT,
    READ_LOSS,
    Attempt,
    BadOp,
    Call,
    Observation,
    OpUse,
    Outcome,
    ParameterGradient,
    Scan,
)

TAIL_SHARE = 0.2  # the last fifth of a run says where its loss ended


class RunView:
    """Immutable by convention; every derived view is computed once."""

    def __init__(self, control: str, run_id: str, observations: Sequence[Observation]) -> None:
        self.control = control
        self.run_id = run_id
        self.calls = [o for o in observations if isinstance(o, Call)]
        self.attempts = [o for o in observations if isinstance(o, Attempt)]
        self.gradients = [o for o in observations if isinstance(o, ParameterGradient)]
        self.gradient_changes = [o for o in observations if isinstance(o, GradientChange)]
        self.scans = [o for o in observations if isinstance(o, Scan)]
        self.bad_ops = [o for o in observations if isinstance(o, BadOp)]
        self.uses = [o for o in observations if isinstance(o, OpUse)]
        outcomes = [o for o in observations if isinstance(o, Outcome)]
        self.outcome = outcomes[-1] if outcomes else Outcome(ended="killed")

    @cached_property
    def losses(self) -> list[float]:
        """Loss of every backward that the script ran at top level, unscaled."""
        return [c.value for c in self.calls if c.name == "backward" and c.value is not None]

    @cached_property
    def guarded_losses(self) -> list[Call]:
        """Losses that were not finite, that the script looked at, and whose batch it then left out
        or ended with; and those of a last backward that no optimizer step followed."""
        calls = [c for c in self.calls if c.name == "read" and c.subject == READ_LOSS]
        return calls + [
            c
            for c in self.calls
            if c.name == "backward" and not _finite(c.value) and c.attempt >= len(self.attempts)
        ]

    @cached_property
    def guarded_gradients(self) -> list[Call]:
        """Gradients that were not finite, that the script looked at, and then made no step."""
        return [c for c in self.calls if c.name == "read" and c.subject == READ_GRADIENT]

    @cached_property
    def first_bad_attempt(self) -> int | None:
        """First attempt whose loss, gradients or weights are not finite; the number that it would
        have had where the script kept it from being made."""
        bad = [
            a.attempt
            for a in self.attempts
            if a.grad_nonfinite or a.weight_nonfinite or not _finite(a.loss)
        ]
        return min([*bad, *(c.attempt for c in self.guarded_losses)], default=None)

    @cached_property
    def bad_loss_attempts(self) -> list[int]:
        """Attempts whose loss is NaN or infinite, those that the script kept from being made
        included."""
        bad = {a.attempt for a in self.attempts if not _finite(a.loss)}
        return sorted(bad | {c.attempt for c in self.guarded_losses})

    def taints_of(self, reads: Sequence[Call]) -> set[int]:
        """Bad ops that the values behind ``reads`` descend from."""
        return {int(c.note) for c in reads if c.name == "read"}

    @cached_property
    def bad_gradient_attempts(self) -> list[int]:
        """Attempts with a gradient that holds NaN or infinities."""
        return [a.attempt for a in self.attempts if a.grad_nonfinite]

    @cached_property
    def weights_broken(self) -> bool:
        """Weights are not finite after the last attempt."""
        return bool(self.attempts) and self.attempts[-1].weight_nonfinite > 0

    @cached_property
    def skips(self) -> list[int]:
        """Attempts that the scaler left out."""
        return [a.attempt for a in self.attempts if a.skipped]

    @cached_property
    def leading_skips(self) -> int:
        """Skipped attempts before the first that was taken."""
        for number, attempt in enumerate(self.attempts):
            if not attempt.skipped:
                return number
        return len(self.attempts)

    @cached_property
    def has_scaler(self) -> bool:
        """An enabled scaler scaled at least one loss."""
        return any(c.name == "scale" for c in self.calls)

    @cached_property
    def scales(self) -> list[float]:
        """Loss scales of the attempts that went through a scaler."""
        return [a.scale for a in self.attempts if a.scaler]

    @cached_property
    def zero_share(self) -> float | None:
        """Exactly zero gradient entries in the first attempts with finite gradients."""
        seen = [a for a in self.attempts if not a.grad_nonfinite and a.grad_total][:3]
        total = sum(a.grad_total for a in seen)
        return sum(a.grad_zero for a in seen) / total if total else None

    @cached_property
    def moved_share(self) -> float | None:
        """Median share of weights that a taken step changed."""
        seen = sorted(
            a.moved_share for a in self.attempts if a.moved_share is not None and not a.skipped
        )
        return seen[len(seen) // 2] if seen else None

    @cached_property
    def head_loss(self) -> float | None:
        """Mean of the first three finite losses, or of as many as there are; None without any."""
        finite = [x for x in self.losses if math.isfinite(x)]
        head = finite[: max(1, min(3, len(finite)))]
        return sum(head) / len(head) if head else None

    @cached_property
    def tail_loss(self) -> float | None:
        """Mean of the last fifth of the losses; NaN when one of them is not finite."""
        return self.tail_of(None)

    def tail_of(self, count: int | None) -> float | None:
        """The same of the first ``count`` losses; all when it is None."""
        losses = self.losses[:count]
        if not losses:
            return None
        tail = losses[-max(1, int(len(losses) * TAIL_SHARE)) :]
        return sum(tail) / len(tail)

    @cached_property
    def ended_itself(self) -> bool:
        """The script came to an end of its own, and not to a limit of the run."""
        return self.outcome.ended in ("returned", "exit", "exception")

    @cached_property
    def has_exception(self) -> bool:
        """The script ended by an exception of its own."""
        return self.outcome.ended == "exception"

    def bad_op(self, op_id: int) -> BadOp | None:
        """The bad op with that id; None when there is none."""
        return next((b for b in self.bad_ops if b.id == op_id), None)

    def use(self, name: str) -> OpUse | None:
        """The first use of that name."""
        return next((u for u in self.uses if u.name == name), None)

    @cached_property
    def broken_buffers(self) -> list[Scan]:
        """Buffers that are not finite at the end and were at their first sight.

        A causal mask is a buffer of minus infinities from the start, and means to be.
        """
        meant = {s.name for s in self.scans_of("start", "buffer") if s.nan + s.inf}
        end = self.scans_of("end", "buffer")
        return [s for s in end if s.nan + s.inf and s.name not in meant]

    def scans_of(self, moment: str, kind: str) -> list[Scan]:
        """Scans of one moment (start, batch, end) and kind (parameter, buffer, batch, frozen)."""
        return [s for s in self.scans if s.moment == moment and s.kind == kind]


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
