"""Instrument: every optimizer step, taken or skipped, with what it found and did.

Through a scaler a step begins at ``scaler.step``; when the optimizer's own step does not
follow, it was skipped. A step that the script calls itself is a step too, marked by its empty
scaler. :class:`OptimizerSteps` puts each record together; below it stands what it asks: the scale
that gradients still carry, clips, the gradients themselves, how weights moved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.failures import Failures, OwnTime
from ampscope.capture.global_hooks import a_step_runs
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.calls import Calls, Numbering
from ampscope.capture.script.gradient_changes import (
    GradientChanges,
    ReplacedGradients,
    WriteLines,
)
from ampscope.capture.script.optimizer_facts import (
    WrittenState,
    dtypes,
    evenly,
    half_format_of,
    lr_of,
    nonfinite_count,
    on_host,
    option_of,
    state_facts,
)
from ampscope.capture.tensors import (
    HALF,
    are_finite,
    fetch,
    floats,
    largest_of,
    norms_of,
    opened,
    readable,
    unreadable,
)
from ampscope.capture.training_events import StepListener, did_nothing
from ampscope.capture.user_objects import IdSet, parameters_of
from ampscope.observations import OptimizerStep, ParameterGradient

DETAILED_STEPS = 4  # first steps of which every parameter's gradient is kept
FINITE_DETAILED = 2  # first steps with finite gradients, wherever a search for a scale ends
MAX_BAD_DETAILED = 12  # and steps with non-finite gradients
SAMPLED = 64  # entries of each parameter that are looked at between two steps, and of a gradient
MAX_NUMEL = 30_000_000  # weights compared before and after a step: 120 MB of fp32 copies

T = TypeVar("T")


class StepInstruments(Protocol):
    """Looks at the parameters around each step; the first ``gradients_complete`` of one counts.
    ``after_step`` gets parameters with copies of their numbers before the step, which it may use
    up: all of them where it ``wants_updates``. The copies are made within ``spent``, which takes
    the time and notes what fails."""

    @property
    def wants_updates(self) -> bool: ...

    def gradients_complete(self, optimizer: Optimizer) -> None: ...

    def after_step(self, before: Sequence[tuple[Tensor, Tensor]]) -> None: ...

    def spent(self, what: str) -> AbstractContextManager[None]: ...


class OptimizerSteps(StepListener):
    """Collects :class:`OptimizerStep` records. ``instruments`` look at each step besides; ``ended``
    gets the number of steps so far at the end of each."""

    def __init__(
        self,
        calls: Calls,
        taint_of: Callable[[Tensor | None], int | None],
        writes: WriteLines,
        instruments: StepInstruments | None = None,
        ended: Callable[[int], None] | None = None,
    ) -> None:
        self.records: list[OptimizerStep] = []
        self.loss_taints: dict[int, int] = {}  # bad op -> steps whose loss descends from it
        self.count = 0
        self._calls = calls
        self._instruments = instruments
        self._ended = ended
        self._numbers = Numbering("optimizer")
        self.scaler_numbers = Numbering("scaler")
        self.optimizers: list[Optimizer] = self._numbers.known
        self.optimizer_name = self._numbers.name_of
        self._created: IdSet[Optimizer] = IdSet()  # named when they first do something
        self.carried = CarriedScale()
        self.clips = Clips()
        self.changes = GradientChanges(writes)
        self.replaced = ReplacedGradients(writes, taint_of)
        self.gradients = GradientReader(taint_of)
        self.failures = Failures()
        self._spent = (instruments or OwnTime(Failures())).spent
        self._motions: dict[int, WeightMotion] = {}  # id of an optimizer whose step runs
        self._samples: dict[str, WeightSample] = {}  # by optimizer, before its last step
        self._scaler: Any = None  # whose step runs
        self._if_skipped = Ending()
        self._loss = Loss()
        self._by_hand = False
        self._hand_norms: dict[str, float | None] = {}  # by optimizer, at the end of backward
        # Optimizers whose last step was skipped: whether each backward since found what it left;
        # None before the first.
        self._kept: dict[str, bool | None] = {}
        self._facts: GradientFacts | None = None
        self._states = WrittenState()
        self._written: dict[int, dict[str, Any]] = {}  # by id of an optimizer whose step runs
        self._moments: dict[int, Tensor] = {}  # samples of half second moments, by id of parameter

    def begin_at(self, count: int) -> None:
        """So many steps have passed unseen; the next one has this number."""
        self.count = self._calls.step = count

    def look_anew(self) -> None:
        """The step that begins is looked at as the first one is."""
        self._calls.begin_anew()
        self.gradients.look_anew(self.count)

    def before_backward(
        self, loss: float, dtype: str, taint: int | None, *, scaled: bool, by_hand: bool = False
    ) -> None:
        """The script is about to call backward on this loss; ``by_hand``: it multiplied the loss
        by a scale of its own."""
        self.drop_left_steps()
        self.carried.pending = scaled
        self._by_hand = by_hand
        self._hand_norms.clear()
        with self.failures.contained("gradients that were replaced"):
            if self.replaced.before_backward():
                self._calls.add("kept")
        with self.failures.contained("gradients of a skipped step"):
            self._look_for_kept()
        self.changes.before_backward()
        self._counts(loss, dtype, taint)

    def after_backward(self) -> None:
        """The backward that was announced last has ended."""
        if self.carried.pending:
            held = (p for o in self.living() for p in parameters_of(o))
            self.changes.taken([(p, p.grad) for p in held if p.grad is not None])
        with self.failures.contained("gradients that were replaced"):
            self.replaced.after_backward(self.living())
        if self._by_hand:
            with own_ops():
                for optimizer in self.optimizers:
                    parameters = parameters_of(optimizer)
                    if not any(map(_has_hooks, parameters)):
                        norm = gradient_facts(parameters, 1.0).norm
                        self._hand_norms[self.optimizer_name(optimizer)] = norm

    def optimizer_created(self, optimizer: Optimizer) -> None:
        """The script has made an optimizer."""
        self._created.add(optimizer)

    def _look_for_kept(self) -> None:
        """Whether what a skipped step left is still there. Another optimizer's backward may come
        before the script clears it: all that follow must find it."""
        for optimizer in self.optimizers:
            name = self.optimizer_name(optimizer)
            if self._kept.get(name, False) is not False:
                held = (readable(p.grad) for p in parameters_of(optimizer) if p.grad is not None)
                with own_ops():
                    self._kept[name] = not all(are_finite([g for g in held if g is not None]))

    def of_optimizers(self, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Those whose first tensor is a parameter of one of the script's optimizers."""
        own = {id(p) for o in self.living() for p in parameters_of(o)}
        return [(p, g) for p, g in pairs if id(p) in own]

    def gradients_taken(self, pairs: list[tuple[Tensor, Tensor]], *, scaled: bool) -> None:
        """The script has called ``torch.autograd.grad``: parameters and their gradients."""
        with self.failures.contained("gradients that were replaced"):
            self.replaced.taken(pairs)
        if scaled:
            self.changes.taken(pairs)

    def gradients_set(self, loss: float, dtype: str, taint: int | None, *, scaled: bool) -> None:
        """What :meth:`gradients_taken` told of is what the next step takes."""
        self.carried.pending = scaled
        self._counts(loss, dtype, taint)

    def _counts(self, loss: float, dtype: str, taint: int | None) -> None:
        self._loss = Loss(loss, dtype, self._loss.backwards + 1)
        if taint is not None and taint >= 0:
            self.loss_taints[taint] = self.loss_taints.get(taint, 0) + 1

    def living(self) -> list[Optimizer]:
        """Those that have done something, and those that were only created so far."""
        new = [o for o in self._created if not any(o is known for known in self.optimizers)]
        return [*self.optimizers, *new]

    def drop_left_steps(self) -> None:
        """Free the copies of steps that raised, of whose end nothing is heard."""
        if self._motions and not a_step_runs():
            self._motions.clear()

    def before_unscale(self, optimizer: Any, scaler: Any) -> None:
        # Inside scaler.step the scaler may be a stand-in of an intervention's; update names its own
        stepping = scaler if self._scaler is None else self._scaler
        self._look_for_changes(optimizer, stepping)
        self._gradients_complete(optimizer)
        self.carried.unscaled(optimizer, stepping, by_user=not self._calls.is_nested)

    def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
        self._scaler, scale = scaler, self._calls.scale_of(scaler)
        self._look_for_changes(optimizer, scaler)
        self._gradients_complete(optimizer)
        self._facts = self._read(optimizer, 1.0 if self.carried.is_unscaled(optimizer) else scale)
        by_user = self.carried.is_unscaled_by_user(optimizer)
        name = self.scaler_numbers.name_of(scaler)
        self._if_skipped = Ending(name, scale, skipped=True, unscaled_before=by_user)

    def after_scaler_step(
        self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        self._scaler = None
        if not stepped:
            self._finish(optimizer, self._if_skipped)

    def before_step(self, optimizer: Optimizer, scaler: Any, *, has_closure: bool) -> None:
        name = self.optimizer_name(optimizer)
        if not has_closure:
            self._gradients_complete(optimizer)
        wanted = self._instruments is not None and self._instruments.wants_updates
        # One each: a step may call another optimizer's (SAM, Lookahead).
        motion = self._motions[id(optimizer)] = WeightMotion()
        with own_ops(), self._spent("the weights before a step"):  # there may be no memory
            motion.start(parameters_of(optimizer), is_wanted=wanted)
            before = self._samples.pop(name, None)
            self._samples[name] = WeightSample(parameters_of(optimizer), before)
        with own_ops(), self.failures.contained("the state before a step"):
            self._written[id(optimizer)] = self._states.before_step(optimizer, name)
        if scaler is None:
            self._look_for_replaced(optimizer, None)
            self._facts = None if has_closure else self._read(optimizer, 1.0)

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        self._gradients_complete(optimizer)
        motion = self._motions.pop(id(optimizer), None) or WeightMotion()
        nothing: tuple[float | None, float | None, float | None] = None, None, None
        with own_ops():
            moved, norm, expected = self._fact("how weights moved", motion.measured, nothing)
        before = motion.take()
        if self._instruments is not None:
            self._instruments.after_step(before)
        sample = self._samples.get(self.optimizer_name(optimizer))
        ending = Ending(
            moved_share=moved,
            update_norm=norm,
            expected_change=expected,
            moved_since=None if sample is None else sample.moved_since,
            held_in="" if sample is None else sample.held_in,
        )
        if scaler is not None:
            ending = replace(
                ending,
                scaler=self.scaler_numbers.name_of(scaler),
                scale=self._calls.scale_of(scaler),
                skipped=did_nothing(optimizer),
                unscaled_before=self.carried.is_unscaled_by_user(optimizer),
            )
        self._finish(optimizer, ending)

    def updated(self, scaler: Any) -> None:
        self.carried.updated(scaler)

    def _gradients_complete(self, optimizer: Optimizer) -> None:
        if self._instruments is not None:
            self._instruments.gradients_complete(optimizer)

    def _look_for_changes(self, optimizer: Optimizer, scaler: Any) -> None:
        name, scale_of = self.optimizer_name(optimizer), partial(self._calls.scale_of, scaler)
        self.changes.before_unscale(optimizer, name, scale_of, self.count)
        self._look_for_replaced(optimizer, scaler)

    def _look_for_replaced(self, optimizer: Optimizer, scaler: Any) -> None:
        name, scale_of = self.optimizer_name(optimizer), partial(self._calls.scale_of, scaler)
        with self.failures.contained("gradients that were replaced"):
            self.replaced.before_step(
                optimizer, name, scale_of if scaler is not None else lambda: 1.0, self.count
            )

    def _read(self, optimizer: Optimizer, factor: float) -> GradientFacts:
        name = self.optimizer_name(optimizer)
        # What ampscope computes is none of the script's ops.
        with own_ops(), self.failures.contained("the gradients of a step"):
            return self.gradients.read(optimizer, name, factor, self.count)
        return GradientFacts((), 0, 0, 0, None, None)

    def _fact(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        """One fact about a step; ``otherwise`` where it cannot be read, which is noted: the step
        itself is never lost."""
        with self.failures.contained(what):
            return read()
        return otherwise

    def _finish(self, optimizer: Optimizer, ending: Ending) -> None:
        facts = self._facts or self._read(optimizer, 1.0)
        name, fact = self.optimizer_name(optimizer), self._fact
        parameters: list[Tensor] = []
        parameters = fact("an optimizer's parameters", lambda: parameters_of(optimizer), parameters)
        with own_ops():
            gradients = [p.grad for p in parameters if p.grad is not None]
            state: dict[str, Any] = {"state_dtypes": ""}
            state = fact("its state", lambda: state_facts(optimizer, self._moments), state)
            record = OptimizerStep(
                step=self.count,
                optimizer=name,
                grad_total=facts.total,
                grad_zero=facts.zero,
                grad_nonfinite=facts.nonfinite,
                grad_max=facts.largest,
                grad_norm=facts.norm,
                lr=fact("a learning rate", lambda: lr_of(optimizer), math.nan),
                weight_nonfinite=fact("the weights", lambda: nonfinite_count(parameters), 0),
                grad_dtypes=fact("the dtypes of gradients", lambda: dtypes(gradients), ""),
                weight_dtypes=fact("the dtypes of weights", lambda: dtypes(parameters), ""),
                eps=fact("an optimizer's eps", lambda: option_of(optimizer, "eps"), None),
                ended_at=time.time(),
                unclipped_norm=fact("a clip", lambda: self.clips.take(parameters), None),
                backward_norm=self._hand_norms.get(name),
                kept_nonfinite=self._kept.get(name) is True,
                **asdict(self._loss),
                **asdict(ending),
                **state,
                **self._written.pop(id(optimizer), {}),
            )
            if not ending.skipped:
                fact("its state", lambda: self._states.after_step(optimizer, name), None)
        self.records.append(record)
        self._kept[name] = None if ending.skipped and facts.nonfinite else False
        self._facts = None
        self._loss = replace(self._loss, backwards=0)
        self.count += 1
        self._calls.step = self.count
        if self._ended is not None:
            self._ended(self.count)


def _has_hooks(parameter: Tensor) -> bool:
    """Hooks of the script may change this parameter's gradient within backward."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [h for kind in kinds for h in (getattr(parameter, kind, None) or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of a partial
    return any(not str(getattr(f, "__module__", "")).startswith("ampscope.") for f in functions)


@dataclass(frozen=True, slots=True)
class Loss:
    """The last backward before the step, and how many there were since the one before: fields of
    :class:`OptimizerStep`."""

    loss: float | None = None  # unscaled
    loss_dtype: str = ""
    backwards: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How the step ended: fields of :class:`OptimizerStep`."""

    scaler: str = ""
    scale: float = 1.0
    skipped: bool = False
    unscaled_before: bool = False  # by the script's own call
    moved_share: float | None = 0.0
    update_norm: float | None = 0.0
    expected_change: float | None = None
    moved_since: float | None = None
    held_in: str = ""


class CarriedScale:
    """Which gradients still carry a loss scale: scaled by a backward, not unscaled since. Follows
    scaled backward passes, ``unscale_`` and ``update``, one optimizer at a time."""

    def __init__(self) -> None:
        self.pending = False  # the last backward's gradients carry a scale
        self._unscaled: dict[int, int] = {}  # id of an optimizer -> id of the scaler
        self._by_user: set[int] = set()  # the same optimizers, where the script itself called it

    def unscaled(self, optimizer: Optimizer, scaler: Any, *, by_user: bool) -> None:
        """``scaler.unscale_(optimizer)`` was called."""
        self._unscaled[id(optimizer)] = id(scaler)
        if by_user:
            self._by_user.add(id(optimizer))

    def updated(self, scaler: Any) -> None:
        """``scaler.update()``: the optimizers that it unscaled begin anew; those of another
        scaler do not (two networks that take turns)."""
        own = {key for key, by in self._unscaled.items() if by == id(scaler)}
        self._by_user -= own
        for key in own:
            del self._unscaled[key]

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """Unscaled since the last update, by whomever."""
        return id(optimizer) in self._unscaled

    def is_unscaled_by_user(self, optimizer: Optimizer) -> bool:
        """Unscaled by a call of the script's own."""
        return id(optimizer) in self._by_user

    def carries(self, parameters: list[Tensor], optimizers: list[Optimizer]) -> bool:
        """Whether gradients of these parameters were scaled and not unscaled yet."""
        if not self.pending:
            return False
        held = {id(p) for p in parameters if p.grad is not None}
        owned = [(o, held & {id(p) for p in parameters_of(o)}) for o in optimizers]
        # An optimizer that was replaced by another still lives: one that unscaled is enough.
        unscaled = {key for o, keys in owned if self.is_unscaled(o) for key in keys}
        return not unscaled or any(keys - unscaled for _, keys in owned)


class Clips:
    """The norms that the script's clips found since the last step, before they clipped."""

    def __init__(self) -> None:
        self._found: list[tuple[set[int], float]] = []  # ids of parameters, their norm

    def add(self, parameters: list[Tensor], norm: float, limit: float) -> None:
        """A clip of unscaled gradients by their 2-norm; one that changed nothing is none."""
        if not norm <= limit:
            self._found.append(({id(p) for p in parameters}, norm))

    def take(self, parameters: list[Tensor]) -> float | None:
        """Of an optimizer's gradients all together; None where not all of them were clipped."""
        found, self._found = self._found, []
        clipped: set[int] = set().union(*(ids for ids, _ in found))
        if not found or any(p.grad is not None and id(p) not in clipped for p in parameters):
            return None
        return math.sqrt(sum(norm**2 for _, norm in found))


class GradientReader:
    """Reads an optimizer's gradients at a step: sums of all, details of some in :attr:`records`,
    one per parameter, and in :attr:`taints` how many gradients descend from each bad op."""

    def __init__(self, taint_of: Callable[[Tensor | None], int | None]) -> None:
        self.records: list[ParameterGradient] = []
        self.taints: dict[int, int] = {}
        self.names: dict[int, str] = {}  # id of a parameter -> dotted name; the owner fills it in
        self._taint_of = taint_of
        self._bad_detailed = self._finite_detailed = 0
        self._from = 0

    def look_anew(self, step: int) -> None:
        """As many steps from ``step`` on are kept in detail as from the first."""
        self._from, self._bad_detailed, self._finite_detailed = step, 0, 0

    def read(
        self, optimizer: Optimizer, optimizer_name: str, factor: float, step: int
    ) -> GradientFacts:
        """Facts about all gradients, divided by ``factor``, the scale that they still carry."""
        facts = gradient_facts(parameters_of(optimizer), factor)
        detailed = step - self._from < DETAILED_STEPS
        if facts.nonfinite and self._bad_detailed < MAX_BAD_DETAILED:
            detailed, self._bad_detailed = True, self._bad_detailed + 1
        if not facts.nonfinite and self._finite_detailed < FINITE_DETAILED:
            detailed, self._finite_detailed = True, self._finite_detailed + 1
        for order, (parameter, part) in enumerate(facts.parts):
            taint = self._taint_of(parameter.grad) if part.nonfinite else None
            if taint is not None and taint >= 0:
                self.taints[taint] = self.taints.get(taint, 0) + 1
            if detailed:
                self.records.append(
                    ParameterGradient(
                        step=step,
                        optimizer=optimizer_name,
                        name=self.names.get(id(parameter), f"parameter{order}"),
                        order=order,
                        total=part.total,
                        zero=part.zero,
                        nonfinite=part.nonfinite,
                        norm=part.norm,
                        sample=_sample(parameter, factor) if step == 0 else (),
                    )
                )
        return facts


def _sample(parameter: Tensor, factor: float) -> tuple[float, ...]:
    """Some entries of its gradient, divided by ``factor``, in five digits."""
    values = None if parameter.grad is None else floats(parameter.grad)
    if values is None:
        return ()
    return tuple(float(f"{x / (factor or 1.0):.4e}") for x in evenly(values, SAMPLED).tolist())


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """All gradients of an optimizer, divided by the scale that they still carry."""

    parts: tuple[tuple[Tensor, GradientPart], ...]
    total: int
    zero: int
    nonfinite: int
    largest: float | None
    norm: float | None


@dataclass(frozen=True, slots=True)
class GradientPart:
    """One parameter's gradient; ``norm`` and ``largest`` are of the finite entries, unscaled."""

    total: int
    zero: int
    nonfinite: int
    norm: float
    largest: float


def gradient_facts(parameters: list[Tensor], factor: float) -> GradientFacts:
    """Facts about ``parameter.grad / factor`` of those that have a gradient that can be read."""
    held = [
        (p, v) for p in parameters if p.grad is not None and (v := readable(p.grad)) is not None
    ]
    only = _parts([values for _, values in held], factor or 1.0)
    return GradientFacts(
        parts=tuple(zip((p for p, _ in held), only, strict=True)),
        total=sum(p.total for p in only),
        zero=sum(p.zero for p in only),
        nonfinite=sum(p.nonfinite for p in only),
        largest=max((p.largest for p in only), default=None),
        norm=math.sqrt(sum(p.norm**2 for p in only)) if only else None,
    )


def _parts(gradients: list[Tensor], scale: float) -> list[GradientPart]:
    """Facts about each; on a device with one wait for all, and one more where some are not
    finite."""
    count = len(gradients)
    zero = [(values == 0).sum() for values in gradients]
    numbers = fetch([*zero, *_magnitudes(gradients)])
    bad = [n for n in range(count) if not math.isfinite(numbers[count + n])]
    nonfinite = dict.fromkeys(range(count), 0.0)
    again: list[Tensor] = []
    for n in bad:  # one copy at a time: there may be no memory for all
        finite = torch.isfinite(gradients[n])
        kept = torch.where(finite, gradients[n], 0.0)
        again += (~finite).sum(), *_magnitudes([kept])
    found = fetch(again)
    for place, n in enumerate(bad):
        three = found[3 * place : 3 * place + 3]
        nonfinite[n], numbers[count + n], numbers[2 * count + n] = three
    return [
        GradientPart(
            total=values.numel(),
            zero=int(numbers[n]),
            nonfinite=int(nonfinite[n]),
            norm=numbers[2 * count + n] / scale,
            largest=numbers[count + n] / scale,
        )
        for n, values in enumerate(gradients)
    ]


def _magnitudes(gradients: list[Tensor]) -> list[Tensor]:
    """The largest magnitude of each in its own dtype (fp64 and 8 bits: fp32), then the 2-norms."""
    narrow = [v if v.dtype in (*HALF, torch.float32) else v.float() for v in gradients]
    return [*largest_of(narrow), *norms_of(narrow, 2.0, torch.float64)]


class WeightMotion:
    """How far a step moves an optimizer's weights: copied before it, compared after it."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, Tensor]] = []  # each with a copy of its numbers
        self._is_compared = False

    def start(self, parameters: list[Tensor], *, is_wanted: bool) -> None:
        """The step is about to run; ``is_wanted``: too many to be compared are copied as well."""
        self._before, self._is_compared = [], False
        small = sum(p.numel() for p in parameters if not unreadable(p)) <= MAX_NUMEL
        if not small and not is_wanted:
            return
        held = ((p, opened(p)) for p in parameters)
        self._before = [(p, v.detach().clone()) for p, v in held if v is not None]
        self._is_compared = small

    def measured(self) -> tuple[float | None, float | None, float | None]:
        """(share of the weights that changed, 2-norm of the change, the change times the
        gradients); None when too many, and without a start."""
        if not self._is_compared:
            return None, None, None
        self._is_compared = False
        both = ((p, readable(p), readable(copy)) for p, copy in self._before)
        pairs = [
            (p, now, b)
            for p, now, b in both
            if now is not None and b is not None and now.shape == b.shape
        ]
        total = sum(now.numel() for _, now, _ in pairs)
        numbers: list[Tensor] = []
        for parameter, now, b in pairs:
            change = now.double() - b.double()
            numbers += torch.ne(now, b).sum(), change.square().sum(), _along(parameter, change)
        found = fetch(numbers)
        moved, square, expected = (sum(found[n::3]) for n in range(3))
        return (moved / total if total else None), math.sqrt(square), expected

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and the copies of them, which are the caller's now."""
        before, self._before = self._before, []
        return before


def _along(parameter: Tensor, change: Tensor) -> Tensor:
    """The change of one parameter times its gradient; 0 for a gradient that cannot be read."""
    gradient, nothing = parameter.grad, change.new_zeros(())
    if gradient is None or unreadable(gradient):
        return nothing
    is_sparse = gradient.layout is not torch.strided and not gradient.is_nested
    values = readable(gradient.to_dense() if is_sparse else gradient)
    if values is None or values.shape != change.shape:
        return nothing
    return (change * values.double()).sum()


class WeightSample:
    """Some of an optimizer's weights before its step: what the script makes of them between steps,
    such as rounding them, shows in no single step."""

    def __init__(self, parameters: list[Tensor], before: WeightSample | None) -> None:
        held = (v for p in parameters if (v := readable(p)) is not None and v.is_floating_point())
        parts = [evenly(v, SAMPLED) for v in held if v.numel()]
        empty = torch.empty(0)
        here = on_host(parts)
        self._values = torch.cat(here) if parts else empty
        old = empty if before is None else before._values
        comparable = parts and old.shape == self._values.shape
        moved = torch.ne(old, self._values).double().mean() if comparable else None
        self.moved_since = None if moved is None else float(moved)
        both = zip(parts, here, strict=True)
        wide = [copy.float() for part, copy in both if part.dtype is torch.float32]
        self.held_in = half_format_of(torch.cat(wide)) if wide else ""
