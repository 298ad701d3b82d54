"""One run of a script as the rules see it: its observations by kind, and numbers read off them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from ampscope import observations as obs

TAIL_SHARE = 0.2  # the last fifth of a run says where its loss ended


class RunView:
    """Immutable by convention; every derived view is computed once."""

    def __init__(self, control: str, run_id: str, observations: Sequence[obs.Observation]) -> None:
        self.control = control
        self.run_id = run_id
        self.repeat: RunView | None = None  # the same script once more, in the same precision
        self.calls = [o for o in observations if isinstance(o, obs.Call)]
        self.steps = [o for o in observations if isinstance(o, obs.OptimizerStep)]
        self.gradients = [o for o in observations if isinstance(o, obs.ParameterGradient)]
        changes = [o for o in observations if isinstance(o, obs.GradientChange)]
        self.gradient_changes = [c for c in changes if c.kind != obs.REPLACED]
        self.replaced_gradients = [c for c in changes if c.kind == obs.REPLACED]
        self.scans = [o for o in observations if isinstance(o, obs.Scan)]
        self.bad_ops = [o for o in observations if isinstance(o, obs.BadOp)]
        self.uses = [o for o in observations if isinstance(o, obs.OpUse)]
        self.line_uses = [o for o in observations if isinstance(o, obs.LineUse)]
        self.sites = [o for o in observations if isinstance(o, obs.HalfSite)]
        self.printed = [o for o in observations if isinstance(o, obs.Printed)]
        digests = [o for o in observations if isinstance(o, obs.Digests)]
        self.line_digests = [d for d in digests if d.role == obs.LINE_ROLE]
        self.taps = [o for o in observations if isinstance(o, obs.Tap)]
        self.kernels = [o for o in observations if isinstance(o, obs.Kernel)]
        self.sources = [o for o in observations if isinstance(o, obs.SourceText)]
        outcomes = [o for o in observations if isinstance(o, obs.Outcome)]
        self.outcome = outcomes[-1] if outcomes else obs.Outcome(ended="killed")

    @cached_property
    def last_phase(self) -> RunView:
        """What the run did since another optimizer took over for good, as fine-tuning follows
        pre-training: its calls, steps and scans. The run itself where none did."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for record in self.steps:
            first.setdefault(record.optimizer, record.step)
            last[record.optimizer] = record.step
        newest = max(first, key=first.__getitem__, default="")
        begins = first.get(newest, 0)
        if len(first) < 2 or any(last[name] >= begins for name in first if name != newest):
            return self
        steps = [a for a in self.steps if a.step >= begins]
        calls = [c for c in self.calls if c.step >= begins]
        return RunView(self.control, self.run_id, [*calls, *steps, *self.scans, self.outcome])

    @cached_property
    def losses(self) -> list[float]:
        """Loss of every backward that the script ran at top level, unscaled."""
        return [c.value for c in self.calls if c.name == "backward" and c.value is not None]

    @cached_property
    def guarded_losses(self) -> list[obs.Call]:
        """Losses that were not finite, that the script looked at, and whose batch it then left out
        or ended with; and those of a last backward that no optimizer step followed."""
        calls = [c for c in self.calls if c.name == "read" and c.subject == obs.READ_LOSS]
        return calls + [
            c
            for c in self.calls
            if c.name == "backward" and not _finite(c.value) and c.step >= len(self.steps)
        ]

    @cached_property
    def guarded_gradients(self) -> list[obs.Call]:
        """Gradients that were not finite, that the script looked at, and then made no step."""
        return [c for c in self.calls if c.name == "read" and c.subject == obs.READ_GRADIENT]

    @cached_property
    def first_bad_step(self) -> int | None:
        """First step whose loss, gradients or weights are not finite; the number that it would
        have had where the script kept it from being made."""
        bad = [
            a.step
            for a in self.steps
            if a.grad_nonfinite or a.weight_nonfinite or not _finite(a.loss)
        ]
        bad += self.replaced_steps
        return min([*bad, *(c.step for c in self.guarded_losses)], default=None)

    @cached_property
    def bad_loss_steps(self) -> list[int]:
        """Steps whose loss is NaN or infinite, those that the script kept from being made
        included."""
        bad = {a.step for a in self.steps if not _finite(a.loss)}
        return sorted(bad | {c.step for c in self.guarded_losses})

    def taints_of(self, reads: Sequence[obs.Call]) -> set[int]:
        """Bad ops that the values behind ``reads`` descend from."""
        return {int(c.note) for c in reads if c.name == "read"}

    @cached_property
    def bad_gradient_steps(self) -> list[int]:
        """Steps with a gradient that holds NaN or infinities as backward computed it."""
        return [a.step for a in self.steps if a.grad_nonfinite or a.step in self.replaced_steps]

    @cached_property
    def replaced_steps(self) -> set[int]:
        """Steps that were taken on gradients that the script had made finite."""
        return {c.step for c in self.replaced_gradients} - set(self.skips)

    @cached_property
    def weights_broken(self) -> bool:
        """Weights are not finite after the last step."""
        return bool(self.steps) and self.steps[-1].weight_nonfinite > 0

    @cached_property
    def skips(self) -> list[int]:
        """Steps that the scaler left out."""
        return [a.step for a in self.steps if a.skipped]

    @cached_property
    def leading_skips(self) -> int:
        """Skipped steps before the first that was taken."""
        for number, step in enumerate(self.steps):
            if not step.skipped:
                return number
        return len(self.steps)

    @cached_property
    def has_scaler(self) -> bool:
        """An enabled scaler scaled at least one loss."""
        return any(c.name == "scale" for c in self.calls)

    @cached_property
    def scales(self) -> list[float]:
        """Loss scales of the steps that went through a scaler."""
        return [a.scale for a in self.steps if a.scaler]

    @cached_property
    def zero_share(self) -> float | None:
        """Exactly zero gradient entries in the first steps with finite gradients."""
        seen = self.own_gradients[:3]
        total = sum(a.grad_total for a in seen)
        return sum(a.grad_zero for a in seen) / total if total else None

    @cached_property
    def own_gradients(self) -> list[obs.OptimizerStep]:
        """Steps whose gradients are finite, and what the backward pass gave: not what the script
        put in the place of others, nor what a clip by an infinite norm, to which another
        optimizer's overflow may have led, left of them."""
        return [
            a
            for a in self.steps
            if a.grad_total > 0
            and not a.grad_nonfinite
            and not _clipped_by_infinity(a)
            and a.step not in self.replaced_steps
        ]

    @cached_property
    def moved_shares(self) -> dict[str, float]:
        """By optimizer: the median share of its weights that a taken step changed, and that the
        script left changed until the next one."""
        seen: dict[str, list[float]] = {}
        for name in {a.optimizer for a in self.steps}:
            own = [a for a in self.steps if a.optimizer == name]
            for a, later in zip_longest(own, own[1:]):
                if a.moved_share is None or a.skipped or _clipped_by_infinity(a):
                    continue
                since = None if later is None or later.skipped else later.moved_since
                shares = [a.moved_share] if since is None else [a.moved_share, since]
                seen.setdefault(name, []).append(min(shares))
        return {name: sorted(shares)[len(shares) // 2] for name, shares in seen.items()}

    @cached_property
    def head_loss(self) -> float | None:
        """Mean of the first three finite losses, or of as many as there are; None without any."""
        finite = [x for x in self.losses if math.isfinite(x)]
        head = finite[: max(1, min(3, len(finite)))]
        return sum(head) / len(head) if head else None

    def tail_of(self, count: int | None) -> float | None:
        """Mean loss over the end of the first ``count`` steps; over the end of the run when it is
        None."""
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

    def bad_op(self, op_id: int) -> obs.BadOp | None:
        """The bad op with that id; None when there is none."""
        return next((b for b in self.bad_ops if b.id == op_id), None)

    def use(self, name: str) -> obs.OpUse | None:
        """The first use of that name."""
        return next((u for u in self.uses if u.name == name), None)

    @cached_property
    def broken_buffers(self) -> list[obs.Scan]:
        """Buffers that are not finite at the end and were at their first sight.

        A causal mask is a buffer of minus infinities from the start, and means to be.
        """
        meant = {s.name for s in self.scans_of("start", "buffer") if s.nan + s.inf}
        end = self.scans_of("end", "buffer")
        return [s for s in end if s.nan + s.inf and s.name not in meant]

    def scans_of(self, moment: str, kind: str) -> list[obs.Scan]:
        """Scans of one moment (start, batch, end) and kind (parameter, buffer, batch, frozen)."""
        return [s for s in self.scans if s.moment == moment and s.kind == kind]


def is_broken(run: RunView) -> bool:
    """Whether a number of ``run`` was not finite, wherever and whatever came of it: what made it so
    is seen in its ops alone."""
    ops = any(op.kind == "nonfinite" for op in run.bad_ops)
    steps = run.first_bad_step is not None or run.guarded_gradients or run.skips
    others = run.broken_buffers or run.outcome.eval_nonfinite or foreign_values(run)
    return bool(ops or steps or others)


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _clipped_by_infinity(step: obs.OptimizerStep) -> bool:
    return step.unclipped_norm is not None and not math.isfinite(step.unclipped_norm)


@dataclass(frozen=True, slots=True, order=True)
class ForeignValue:
    """First sight of one kind of non-finite value at one place; NaN sorts before infinity."""

    is_infinite: bool  # infinities only, as a mask has them
    step: int
    name: str
    line: str
    count: int
    index: tuple[int, ...] = ()  # of the first one; the first number is the sample's


def foreign_values(run: RunView) -> list[ForeignValue]:
    """One per place and kind, the first sight of each.

    A batch with the same trouble again is left out: it did no harm before, as a mask of minus
    infinities that comes with every batch does none.
    """
    seen = [
        ForeignValue(not s.nan, s.step, s.name, "", s.nan + s.inf, s.index)
        for s in run.scans
        if s.moment == "batch" and s.nan + s.inf
    ]
    seen += [
        ForeignValue(False, u.step, f"an operand of {u.op}", u.line, u.count)
        for u in run.uses
        if u.name == "nan_operand"
    ]
    first: dict[tuple[bool, str, str], ForeignValue] = {}
    for value in sorted(seen, key=lambda v: v.step):
        first.setdefault((value.is_infinite, value.name, value.line), value)
    return list(first.values())
