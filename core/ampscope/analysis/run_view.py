"""One run of a script as the rules see it: its observations by kind, and numbers read off them.

Besides the view itself, what several rules look for in it: sums in half precision that are off,
half weights, averages of weights that stand still, half buffers, an optimizer's half state, and
values that came in not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from ampscope import observations as obs
from ampscope.numerics.formats import FORMATS, FP16

TAIL_SHARE = 0.2  # the last fifth of a run says where its loss ended


class RunView:
    """Immutable by convention; every derived view is computed once."""

    def __init__(self, control: str, run_id: str, observations: Sequence[obs.Observation]) -> None:
        self.control = control
        self.run_id = run_id
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


def _finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


# Sums in half precision that are not what their terms add up to.
#
# They are seen in three ways, the surest first (:class:`~ampscope.observations.BadOp`): a result
# far from fp32's (coarse), a running total whose rounding errors add up (drift), and a running
# total that an addition does not change (stall).


MIN_STAGNATED = 8  # times that the same line added without effect: not a coincidence


def worst_sum(run: RunView) -> obs.BadOp | None:
    """The sum that is farthest off, of the surest kind there is; averages of weights left out."""
    inaccurate = [b for b in run.bad_ops if b.kind == "coarse"]
    totals = [b for b in run.bad_ops if b.kind in ("drift", "stall") and not is_average(b)]
    drifted = [b for b in totals if b.kind == "drift"]
    stagnated = [
        b for b in totals if b.kind == "stall" and b.count >= MIN_STAGNATED and _is_running_total(b)
    ]
    if inaccurate or drifted:
        return max(inaccurate or drifted, key=lambda b: b.error or 0.0)
    return max(stagnated, key=lambda b: b.count, default=None)


def _is_running_total(op: obs.BadOp) -> bool:
    """The first term is what the same op made before: a running total, not a residual. What a
    backward pass adds out of place are gradients of one tensor's several uses."""
    name = op.op.rpartition(".")[2]
    is_chain = bool(op.inputs and name in op.inputs[0].producers[:3])
    return name.endswith("_") or (is_chain and op.phase != "backward")


# What a step's gradients and weights show.


def _clipped_by_infinity(step: obs.OptimizerStep) -> bool:
    return step.unclipped_norm is not None and not math.isfinite(step.unclipped_norm)


@dataclass(frozen=True, slots=True)
class Moved:
    """Shares of one optimizer's weights that its median step changed."""

    optimizer: str
    own: float
    reference: float  # in the fp32 control


def least_moved(run: RunView, fp32: RunView) -> Moved | None:
    """The optimizer whose steps move the fewest weights beside those of the fp32 control. Taken by
    optimizer: one of an embedding moves few weights in every run."""
    pairs = [
        Moved(name, own, fp32.moved_shares[name])
        for name, own in run.moved_shares.items()
        if fp32.moved_shares.get(name)
    ]
    return min(pairs, key=lambda pair: pair.own / pair.reference, default=None)


# Trained weights that are themselves half precision, with no fp32 master copy beside them.


def half_weights(run: RunView) -> str:
    """Dtypes of the weights that the run's taken steps update, when half precision is among them
    and a gradient arrived; else ""."""
    taken = [a for a in run.steps if not a.skipped]
    half = [a for a in taken if "fp16" in a.weight_dtypes or "bf16" in a.weight_dtypes]
    return half[0].weight_dtypes if half and any(a.grad_norm for a in half) else ""


def rounded_weights(run: RunView) -> str:
    """The half format to whose values the script rounds fp32 weights between its steps, so that it
    holds all of them before nearly every step; else "". Masters that were made of half weights are
    held as well for as long as gradients of zero leave them where they began: no rounding does."""
    taken = (a for a in run.steps if not a.skipped)
    held = [a.held_in for a in taken if not a.grad_total or a.grad_zero < a.grad_total]
    found = max(set(held), key=held.count, default="")
    return found if found and held.count(found) >= NEARLY_ALL * len(held) else ""


NEARLY_ALL = 0.9  # before the first step no weight needs to be rounded
KEPT = 0.5  # of the way that fp32's weights went


def kept_descent(run: RunView, fp32: RunView, optimizer: str) -> float | None:
    """How far one optimizer's steps led down their gradients, as a share of what they did in fp32:
    sums of gradient times update over the steps that both runs took. None where a run recorded
    none, or fp32's steps lead up. Where the loss stays higher than in fp32 the gradients stay
    larger, so the share is rather too large."""
    taken = [
        {
            a.step: a.expected_change
            for a in view.steps
            if a.optimizer == optimizer and not a.skipped
        }
        for view in (run, fp32)
    ]
    pairs = [(own, taken[1].get(step)) for step, own in taken[0].items()]
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    own, full = (math.fsum(part) for part in zip(*known, strict=True)) if known else (0.0, 0.0)
    return own / full if full < 0 and math.isfinite(own) else None


def was_cast(run: RunView) -> bool:
    """Whether weights became half after the run had begun: their way over the run is then mostly
    that of the steps before."""
    first = {s.name: s.dtype for s in run.scans if s.moment == "start"}
    ends = ((s, first.get(s.name, s.dtype)) for s in run.scans_of("end", "parameter"))
    return any(s.dtype in ("fp16", "bf16") and before == "fp32" for s, before in ends)


def kept_motion(run: RunView, fp32: RunView, kind: str = "parameter") -> float | None:
    """How far half-precision tensors of one ``kind`` came over the whole run, as a share of the way
    in fp32; None when no displacements of the same tensors were recorded.

    Many steps may each move few weights and still lose nothing: stochastic rounding moves one
    weight in ten by ten times the update, Kahan's compensation moves each at every tenth step. So
    displacements at the same places are projected on the direction that fp32 took:
    sum(d * sign(d32)) / sum(abs(d32)). It is 1 where rounding keeps the mean, whatever its noise,
    and 0 where updates are rounded away.
    """
    reference = {s.name: s for s in fp32.scans_of("end", kind)}
    formats = {"fp16", "bf16"} | ({"fp32"} if rounded_weights(run) else set())
    along = length = 0.0
    for scan in run.scans_of("end", kind):
        other = reference.get(scan.name)
        if other is None or scan.dtype not in formats:
            continue
        if not scan.displacement or len(scan.displacement) != len(other.displacement):
            continue
        for own, full in zip(scan.displacement, other.displacement, strict=True):
            if math.isfinite(own) and math.isfinite(full):
                along += math.copysign(own, own * full) if full else 0.0
                length += abs(full)
    return along / length if length else None


STANDS = 0.3  # of the weights that fp32 moves; rounding that keeps the mean leaves less than 0.05


def standing_share(run: RunView, fp32: RunView) -> float | None:
    """Of the weights that the fp32 control's run moves, the share that stand at the end of this one
    where they began; None where that was not recorded, or fp32 moves none."""
    reference = {s.name: s for s in fp32.scans_of("end", "parameter") if s.still is not None}
    pairs = [
        (own.total, own.still, reference[own.name].still or 0.0)
        for own in run.scans_of("end", "parameter")
        if own.still is not None and own.name in reference
    ]
    moves = math.fsum(total * (1 - still) for total, _, still in pairs)
    moved = math.fsum(total * (1 - still) for total, still, _ in pairs)
    return 1 - moved / moves if moves else None


# Moving averages of weights that half precision holds back.
#
# An average takes a small share of each new weight: ``average += 0.001 * (weight - average)``. In
# bf16 such a step is mostly below half the spacing of the numbers, and the average stays as it is.
# It shows in two places: in a parameter that no optimizer trains and that ends nearer to its start
# than in fp32, and in additions that leave nearly all elements as they are.


SLOW = 0.5  # less than half as far as in fp32; rounding alone makes no such difference
KEEPS_UP = 0.9  # of fp32's way; compensated and stochastically rounded averages come 0.99 as far
MIN_AVERAGE_STAGNATED = 5  # updates that moved next to nothing


@dataclass(frozen=True, slots=True)
class SlowAverage:
    """One tensor at the end of a run. Changes are 2-norms over that of its first sight."""

    scan: obs.Scan
    change: float
    reference_change: float  # the same in the fp32 control, never zero


def slow_average(run: RunView, fp32: RunView) -> SlowAverage | None:
    """The first half-precision tensor outside every optimizer that came less than :data:`SLOW` as
    far as in the fp32 control. A move below the spacing of its numbers says nothing: a rounded copy
    of the weights, made from fp32 ones at each step, may stand still then, too."""
    found = (a for a in _averages(run, fp32) if a.change < SLOW * a.reference_change)
    return next((a for a in found if a.reference_change > _spacing(a.scan.dtype) / 2), None)


def _spacing(dtype: str) -> float:
    """Of numbers of a half-precision format, relative: half of it at most."""
    return float(2.0 ** -(FORMATS[dtype].mantissa_bits + 1))


def averages_keep_up(run: RunView, fp32: RunView) -> bool:
    """There are half-precision averages, and they came as far as in fp32: an update that had no
    effect by itself was made up for, as Kahan's compensation and stochastic rounding do.

    An average that follows until the distance is too small for its format comes far, too, but not
    as far: 0.4 to 0.7 of fp32's way, where weights move by a fifth of themselves.
    """
    found = _averages(run, fp32)
    if not found or slow_average(run, fp32) is not None:
        return False
    kept = kept_motion(run, fp32, "frozen")
    if kept is None:
        kept = min(a.change / a.reference_change for a in found)
    share_of_steps = len(run.steps) / max(1, len(fp32.steps))  # a watch ends by the clock
    return kept >= KEEPS_UP * min(1.0, share_of_steps)


def _averages(run: RunView, fp32: RunView) -> list[SlowAverage]:
    """Half-precision tensors outside every optimizer that move in fp32."""
    end = {s.name: s for s in fp32.scans_of("end", "frozen") + fp32.scans_of("end", "buffer")}
    return [
        SlowAverage(scan, scan.change or 0.0, other.change)
        for scan in run.scans_of("end", "frozen")
        if scan.dtype in ("fp16", "bf16")
        and (other := end.get(scan.name)) is not None
        and other.change
    ]


def stagnated_average(run: RunView) -> obs.BadOp | None:
    """The first addition to an average of weights that had no effect at least
    :data:`MIN_AVERAGE_STAGNATED` times."""
    stagnated = (b for b in run.bad_ops if b.kind == "stall" and b.count >= MIN_AVERAGE_STAGNATED)
    return next(filter(is_average, stagnated), None)


def is_average(op: obs.BadOp) -> bool:
    """Weights are involved: the target, or what is added, is a parameter or made of one."""
    return any(o.is_parameter for o in op.inputs)


# Buffers in half precision: tables that a model computed once and keeps.


INACCURATE_SPREAD = 0.05  # one rounding to bf16 is at most 0.4 % of a value


@dataclass(frozen=True, slots=True)
class InaccurateTable:
    """A buffer, and how far it is from the fp32 control's: largest difference over the spread."""

    scan: obs.Scan
    error: float


def inaccurate_table(run: RunView, fp32: RunView) -> InaccurateTable | None:
    """The first buffer that was built in another dtype than fp32 and differs from the control's by
    more than :data:`INACCURATE_SPREAD`."""
    tables = {s.name: s for s in _built(fp32)}
    for scan in _built(run):
        reference = tables.get(scan.name)
        if reference is None or scan.dtype == "fp32":
            continue
        error = _distance(scan.sample, reference.sample)
        if error is not None and error > INACCURATE_SPREAD:
            return InaccurateTable(scan, error)
    return None


def owner_of_only_table(run: RunView) -> str:
    """Path of the module that owns the half buffers of the model, when it is a single one; else "".

    A table is mostly built in a constructor, where no module runs that could be named.
    """
    names = {scan.name.rpartition(".")[0] for scan in _built(run) if scan.dtype in ("fp16", "bf16")}
    return names.pop() if len(names) == 1 else ""


def _built(run: RunView) -> list[obs.Scan]:
    """Buffers as they were before the first step that was recorded. One that is seen first after
    it, as of a half copy that is validated, may hold what a training made of it, and differ from
    run to run."""
    first = run.steps[0].step if run.steps else 0
    return [s for s in run.scans_of("start", "buffer") if s.step <= first]


def _distance(values: tuple[float, ...], reference: tuple[float, ...]) -> float | None:
    """None when the samples cannot be compared: of different lengths, or all values the same."""
    if len(values) != len(reference) or not values:
        return None
    spread = max(reference) - min(reference)
    largest = max(abs(a - b) for a, b in zip(values, reference, strict=True))
    return largest / spread if spread else None


# The optimizer's own numbers where they are kept in half precision.
#
# Adam divides by sqrt(v) + eps: in fp16 v = g^2 is zero for a gradient below 2^-12.5, and an
# epsilon of 1e-8 is zero too, being no more than half of the smallest number, 2^-24.


COMPARED = 3  # first steps, in which both runs still have much the same weights
ALIKE = 1.5  # gradient norms of two runs that have not parted yet differ by less than this factor


@dataclass(frozen=True, slots=True)
class HalfState:
    """Of a run whose optimizer keeps its state in half precision."""

    first: obs.OptimizerStep
    broken: obs.OptimizerStep | None  # weights or moments not finite although the gradients are
    dead_share: float  # second moments that vanished although the gradients did not, at most
    eps_vanished: bool
    update_ratio: float | None  # largest update norm over the fp32 control's, in the first steps
    lost_decay: LostDecay | None  # of second moments; None where they fall as they should


@dataclass(frozen=True, slots=True)
class LostDecay:
    """Second moments that rounding keeps from falling. ``due`` and ``done`` are sums of falls over
    sampled moments, in spacings of their format; None where the optimizer's options name no decay,
    and all that is known is that none fell."""

    steps: int  # taken steps at which moments were compared
    decay: float | None = None
    due: float | None = None
    done: float | None = None


def optimizer_class(run: RunView, name: str) -> str:
    """Class of the optimizer that the records call ``optimizer1``; "" where it is not known."""
    number = name.removeprefix("optimizer")
    known = run.outcome.optimizers
    return known[int(number)] if number.isdecimal() and int(number) < len(known) else ""


def half_state(run: RunView, fp32: RunView | None) -> HalfState | None:
    """None when no optimizer keeps its state in half precision."""
    half = [a for a in run.steps if "fp16" in a.state_dtypes or "bf16" in a.state_dtypes]
    if not half:
        return None
    return HalfState(
        first=half[0],
        broken=next(
            (a for a in half if (a.weight_nonfinite or a.state_nonfinite) and not a.grad_nonfinite),
            None,
        ),
        dead_share=max(a.state_zero_share or 0.0 for a in half),
        eps_vanished=_vanishes(half[0]),
        update_ratio=_update_ratio(half, fp32),
        lost_decay=_lost_decay(half),
    )


MIN_DUE = 8.0  # spacings: rounding that keeps the mean leaves all out with a chance of e^-8
FALLS = 0.5  # of what is due; rounding to nearest takes at least 2/3 of a fall beyond a spacing
RIGID = 20  # taken steps without any sampled second moment that fell, where no decay is known


def _lost_decay(half: Sequence[obs.OptimizerStep]) -> LostDecay | None:
    """Exact falls against those that were seen: stochastic rounding leaves most moments as they
    are at a step, and their sum falls all the same. Without the formula's decay: gradients differ
    from batch to batch, so in fp32 some of the sampled moments fall at every step."""
    seen = [a for a in half if not a.skipped and a.state_fell_share is not None and a.grad_norm]
    decay = next((a.state_decay for a in seen if a.state_decay is not None), None)
    if decay is None:
        fell = len(seen) < RIGID or any(a.state_fell_share for a in seen)
        return None if fell else LostDecay(len(seen))
    due = math.fsum(a.state_fall_due or 0.0 for a in seen)
    done = math.fsum(a.state_fall_done or 0.0 for a in seen)
    is_lost = due >= MIN_DUE and done < FALLS * due
    return LostDecay(len(seen), decay, due, done) if is_lost else None


def _vanishes(step: obs.OptimizerStep) -> bool:
    # Half of the smallest number is a tie, which goes to the even neighbour: zero.
    small = step.eps is not None and step.eps <= FP16.min_subnormal / 2
    return small and "fp16" in step.state_dtypes


def _update_ratio(half: Sequence[obs.OptimizerStep], fp32: RunView | None) -> float | None:
    """Where such an optimizer begins late, as in a second phase, it is compared at steps whose
    gradients still are those of the control."""
    if fp32 is None:
        return None
    control = {a.step: a for a in fp32.steps}
    pairs = [(a, control[a.step]) for a in half[:COMPARED] if a.step in control]
    ratios = [
        a.update_norm / b.update_norm
        for a, b in pairs
        if a.update_norm and b.update_norm and math.isfinite(a.update_norm)
        if a.step < COMPARED or _same_gradients(a, b)
    ]
    return max(ratios, default=None)


def _same_gradients(one: obs.OptimizerStep, other: obs.OptimizerStep) -> bool:
    norms = one.grad_norm, other.grad_norm
    if one.optimizer != other.optimizer or not all(n and math.isfinite(n) for n in norms):
        return False
    low, high = sorted(n for n in norms if n)
    return high < ALIKE * low


# Values that were not finite before any op of the script made them: they came in with a tensor.


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
