"""Instrument: every attempted optimizer step, taken or skipped, with what it found and did.

Through a scaler an attempt begins at ``scaler.step``; when the optimizer's own step does not
follow, it was skipped. A step that the script calls itself is an attempt too, marked by its empty
scaler.

How an :class:`Attempt` is put together, gradients read and weights' motion measured is here too.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils.hooks import RemovableHandle

from ampscope.capture.script.gradient_changes import GradientChanges, WriteLines
from ampscope.capture.script.optimizer_facts import (
    dtypes,
    has_closure,
    lr_of,
    nonfinite_count,
    option_of,
    parameters_of,
    state_facts,
)
from ampscope.capture.tensors import readable, unreadable
from ampscope.observations import Attempt, ParameterGradient


class StepInstruments(Protocol):
    """Looks at the parameters around each step; the first ``gradients_complete`` of one counts."""

    def gradients_complete(self, optimizer: Optimizer) -> None: ...

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...


class Attempts:
    """Collects :class:`Attempt` records through torch's global optimizer hooks."""

    def __init__(self, taint_of: Callable[[Tensor | None], int | None], writes: WriteLines) -> None:
        self.records: list[Attempt] = []
        self.loss_taints: dict[int, int] = {}  # bad op -> attempts whose loss descends from it
        self.count = 0
        self.scale_of: Callable[[Any], float] = lambda scaler: float(scaler.get_scale())
        self.on_direct_step: Callable[[str, float], None] = lambda name, lr: None
        self.on_attempt_end: Callable[[int], None] = lambda count: None
        self.on_optimizer: Callable[[bool], None] = lambda inside: None
        self.instruments: StepInstruments | None = None  # who looks at each step besides
        self._numbers = Numbering("optimizer")
        self.optimizers: list[Optimizer] = self._numbers.known
        self.optimizer_name = self._numbers.name_of
        self.carried = CarriedScale()
        self.clips = Clips()
        self.changes = GradientChanges(writes)
        self._reader = GradientReader(taint_of)
        self._motion = WeightMotion()
        self._scaler: tuple[Any, str] | None = None
        self._stepped = False
        self._loss = Loss()
        self._by_hand = False
        self._hand_norms: dict[str, float | None] = {}  # by optimizer, at the end of backward
        self._facts: GradientFacts | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Attempts:
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    @property
    def gradients(self) -> list[ParameterGradient]:
        """Every parameter's gradient at the attempts of which the details are kept."""
        return self._reader.records

    @property
    def gradient_taints(self) -> dict[int, int]:
        """Bad op -> gradients that descend from it."""
        return self._reader.taints

    @property
    def names(self) -> dict[int, str]:
        """Id of a parameter -> dotted name, filled in by the owner."""
        return self._reader.names

    def before_backward(
        self, loss: float, dtype: str, taint: int | None, *, scaled: bool, by_hand: bool = False
    ) -> None:
        """The script is about to call backward on this loss; ``by_hand``: it multiplied the loss
        by a scale of its own."""
        self.carried.pending = scaled
        self._by_hand = by_hand
        self._hand_norms.clear()
        self.changes.before_backward()
        self._loss = Loss(loss, dtype, self._loss.backwards + 1)
        if taint is not None and taint >= 0:
            self.loss_taints[taint] = self.loss_taints.get(taint, 0) + 1

    def after_backward(self) -> None:
        """The backward that was announced last has ended."""
        if self.carried.pending:
            self.changes.after_backward(self.optimizers)
        if self._by_hand:
            with no_dispatch():
                for optimizer in self.optimizers:
                    parameters = parameters_of(optimizer)
                    if not any(map(_has_hooks, parameters)):
                        norm = gradient_facts(parameters, 1.0).norm
                        self._hand_norms[self.optimizer_name(optimizer)] = norm

    def before_unscale(self, optimizer: Optimizer, scaler: Any, *, by_user: bool) -> None:
        """``scaler.unscale_(optimizer)`` is about to run."""
        # Inside scaler.step the scaler may be a stand-in of an intervention's; update names its own
        stepping = scaler if self._scaler is None else self._scaler[0]
        self._look_for_changes(optimizer, stepping)
        self._gradients_complete(optimizer)
        self.carried.unscaled(optimizer, stepping, by_user=by_user)

    def carries_scale(self, parameters: list[Tensor]) -> bool:
        """Whether gradients of these parameters were scaled and not unscaled yet."""
        return self.carried.carries(parameters, self.optimizers)

    @contextlib.contextmanager
    def through_scaler(self, optimizer: Optimizer, scaler: Any, name: str) -> Iterator[None]:
        """Around ``scaler.step``: one attempt, skipped unless the optimizer's step runs inside."""
        self._scaler, self._stepped = (scaler, name), False
        scale = self.scale_of(scaler)
        self._look_for_changes(optimizer, scaler)
        self._gradients_complete(optimizer)
        self._facts = self._read(optimizer, 1.0 if self.carried.is_unscaled(optimizer) else scale)
        by_user = self.carried.is_unscaled_by_user(optimizer)
        try:
            yield
        finally:
            self._scaler = None
            if not self._stepped:
                self._finish(optimizer, Ending(name, scale, skipped=True, unscaled=by_user))

    def _gradients_complete(self, optimizer: Optimizer) -> None:
        if self.instruments is not None:
            self.instruments.gradients_complete(optimizer)

    def _look_for_changes(self, optimizer: Optimizer, scaler: Any) -> None:
        name = self.optimizer_name(optimizer)
        self.changes.before_unscale(optimizer, name, lambda: self.scale_of(scaler), self.count)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer(not has_closure(args, kwargs))
        self.optimizer_name(optimizer)
        self._stepped = True
        if not has_closure(args, kwargs):  # a closure's gradients come inside the step
            self._gradients_complete(optimizer)
        if self.instruments is not None:
            self.instruments.before_step(optimizer)
        with no_dispatch():
            self._motion.start(parameters_of(optimizer))
        if self._scaler is None and not has_closure(args, kwargs):
            self._facts = self._read(optimizer, 1.0)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.on_optimizer(False)
        self._gradients_complete(optimizer)
        if self.instruments is not None:
            self.instruments.after_step(optimizer)
        with no_dispatch():
            moved, norm, expected = self._motion.take(parameters_of(optimizer))
        if self._scaler is None:
            if has_closure(args, kwargs) or self._facts is None:
                self._facts = self._read(optimizer, 1.0)
            self.on_direct_step(self.optimizer_name(optimizer), lr_of(optimizer))
            self._finish(optimizer, Ending(moved_share=moved, update_norm=norm, expected=expected))
            return
        scaler, name = self._scaler
        # A fused optimizer is always called; GradScaler hands it found_inf, and it does nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        by_user = self.carried.is_unscaled_by_user(optimizer)
        self._finish(
            optimizer,
            Ending(name, self.scale_of(scaler), skipped, by_user, moved, norm, expected),
        )

    def _read(self, optimizer: Optimizer, factor: float) -> GradientFacts:
        with no_dispatch():  # what ampscope computes is none of the script's ops
            return self._reader.read(optimizer, self.optimizer_name(optimizer), factor, self.count)

    def _finish(self, optimizer: Optimizer, ending: Ending) -> None:
        facts = self._facts or self._read(optimizer, 1.0)
        name = self.optimizer_name(optimizer)
        with no_dispatch():
            unclipped = self.clips.take(parameters_of(optimizer))
            record = attempt_record(
                self.count, optimizer, name, self._loss, facts, ending, unclipped,
                self._hand_norms.get(name),
            )  # fmt: skip
        self.records.append(record)
        self._facts = None
        self._loss = replace(self._loss, backwards=0)
        self.count += 1
        self.on_attempt_end(self.count)


def _has_hooks(parameter: Tensor) -> bool:
    """Hooks of the script may change this parameter's gradient within backward."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    hooks = [h for kind in kinds for h in (getattr(parameter, kind, None) or {}).values()]
    functions = [getattr(hook, "func", hook) for hook in hooks]  # of a partial
    return any(not str(getattr(f, "__module__", "")).startswith("ampscope.") for f in functions)


# Puts one :class:`Attempt` together: the backward before it, the gradients, how the step ended.


@dataclass(frozen=True, slots=True)
class Loss:
    """The last backward before the attempt, and how many there were since the one before."""

    value: float | None = None  # unscaled
    dtype: str = ""
    backwards: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """How the step ended."""

    scaler: str = ""  # "" when the script called it directly
    scale: float = 1.0
    skipped: bool = False
    unscaled: bool = False  # by the script's own call
    moved_share: float | None = 0.0
    update_norm: float | None = 0.0
    expected: float | None = None  # change of the loss


class Clips:
    """The norms that the script's clips found since the last attempt, before they clipped."""

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


def attempt_record(
    number: int,
    optimizer: Optimizer,
    name: str,
    loss: Loss,
    facts: GradientFacts,
    ending: Ending,
    unclipped_norm: float | None = None,
    backward_norm: float | None = None,
) -> Attempt:
    """The record of attempt ``number``; ``name`` is the optimizer's."""
    parameters, state = parameters_of(optimizer), state_facts(optimizer)
    return Attempt(
        attempt=number,
        optimizer=name,
        scaler=ending.scaler,
        loss=loss.value,
        loss_dtype=loss.dtype,
        scale=ending.scale,
        skipped=ending.skipped,
        unscaled_before=ending.unscaled,
        backwards=loss.backwards,
        grad_total=facts.total,
        grad_zero=facts.zero,
        grad_nonfinite=facts.nonfinite,
        grad_max=facts.largest,
        grad_norm=facts.norm,
        lr=lr_of(optimizer),
        moved_share=ending.moved_share,
        update_norm=ending.update_norm,
        weight_nonfinite=nonfinite_count(parameters),
        grad_dtypes=dtypes([p.grad for p in parameters if p.grad is not None]),
        weight_dtypes=dtypes(parameters),
        state_dtypes=state.dtypes,
        state_nonfinite=state.nonfinite,
        state_zero_share=state.zero_share,
        eps=option_of(optimizer, "eps"),
        ended_at=time.time(),
        expected_change=ending.expected,
        unclipped_norm=unclipped_norm,
        backward_norm=backward_norm,
    )


# Counts and magnitudes of an optimizer's gradients.


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter's gradient; ``norm`` and ``largest`` are of the finite entries, unscaled."""

    total: int
    zero: int
    nonfinite: int
    norm: float
    largest: float


@dataclass(frozen=True, slots=True)
class GradientFacts:
    """All gradients of an optimizer, divided by the scale that they still carry."""

    parts: tuple[tuple[Tensor, Part], ...]
    total: int
    zero: int
    nonfinite: int
    largest: float | None
    norm: float | None


def gradient_facts(parameters: list[Tensor], factor: float) -> GradientFacts:
    """Facts about ``parameter.grad / factor`` of those that have a gradient that can be read."""
    held = ((p, readable(p.grad)) for p in parameters if p.grad is not None)
    parts = tuple((p, _part(values, factor)) for p, values in held if values is not None)
    only = [part for _, part in parts]
    return GradientFacts(
        parts=parts,
        total=sum(p.total for p in only),
        zero=sum(p.zero for p in only),
        nonfinite=sum(p.nonfinite for p in only),
        largest=max((p.largest for p in only), default=None),
        norm=math.sqrt(sum(p.norm**2 for p in only)) if only else None,
    )


def _part(values: Tensor, factor: float) -> Part:
    finite = torch.isfinite(values)
    kept = values.float()[finite].abs()
    scale = factor or 1.0
    return Part(
        total=values.numel(),
        zero=int((values == 0).sum()),
        nonfinite=values.numel() - int(finite.sum()),
        norm=float(torch.linalg.vector_norm(kept, dtype=torch.float64)) / scale,
        largest=float(kept.max()) / scale if kept.numel() else 0.0,
    )


# Reads an optimizer's gradients at an attempt: sums of all, details of some, taints of the bad.


DETAILED_ATTEMPTS = 4  # first attempts of which every parameter's gradient is kept
FINITE_DETAILED = 2  # first attempts with finite gradients, wherever a search for a scale ends
MAX_BAD_DETAILED = 12  # and attempts with non-finite gradients


class GradientReader:
    """Results: :attr:`records`, one a parameter; :attr:`taints`, bad op -> gradients."""

    def __init__(self, taint_of: Callable[[Tensor | None], int | None]) -> None:
        self.records: list[ParameterGradient] = []
        self.taints: dict[int, int] = {}
        self.names: dict[int, str] = {}  # id of a parameter -> dotted name
        self._taint_of = taint_of
        self._bad_detailed = self._finite_detailed = 0

    def read(
        self, optimizer: Optimizer, optimizer_name: str, factor: float, attempt: int
    ) -> GradientFacts:
        """Facts about all gradients, divided by ``factor``, the scale that they still carry."""
        facts = gradient_facts(parameters_of(optimizer), factor)
        detailed = attempt < DETAILED_ATTEMPTS
        if facts.nonfinite and self._bad_detailed < MAX_BAD_DETAILED:
            detailed, self._bad_detailed = True, self._bad_detailed + 1
        if not facts.nonfinite and self._finite_detailed < FINITE_DETAILED:
            detailed, self._finite_detailed = True, self._finite_detailed + 1
        for order, (parameter, part) in enumerate(facts.parts):
            taint = self._taint_of(parameter.grad)
            if part.nonfinite and taint is not None and taint >= 0:
                self.taints[taint] = self.taints.get(taint, 0) + 1
            if detailed:
                self.records.append(
                    ParameterGradient(
                        attempt=attempt,
                        optimizer=optimizer_name,
                        name=self.names.get(id(parameter), f"parameter{order}"),
                        order=order,
                        total=part.total,
                        zero=part.zero,
                        nonfinite=part.nonfinite,
                        norm=part.norm,
                    )
                )
        return facts


# How far an optimizer's step moved the weights: copied before, compared after.


MAX_NUMEL = 30_000_000  # weights compared before and after a step: 120 MB of fp32 copies


class WeightMotion:
    """The weights of one optimizer before its step."""

    def __init__(self) -> None:
        self._before: list[Tensor | None] | None = None  # None: cannot be read

    def start(self, parameters: list[Tensor]) -> None:
        """The step is about to run."""
        small = sum(p.numel() for p in parameters if not unreadable(p)) <= MAX_NUMEL
        self._before = [_copy(p) for p in parameters] if small else None

    def take(self, parameters: list[Tensor]) -> tuple[float | None, float | None, float | None]:
        """(share of the weights that changed, 2-norm of the change, the change times the
        gradients); None when too many."""
        if self._before is None:
            return None, None, None
        before, self._before = self._before, None
        both = ((p, readable(p), b) for p, b in zip(parameters, before, strict=True))
        pairs = [
            (p, now, b)
            for p, now, b in both
            if now is not None and b is not None and now.shape == b.shape
        ]
        total = sum(now.numel() for _, now, _ in pairs)
        moved = sum(int(torch.ne(now, b).sum()) for _, now, b in pairs)
        square = sum(float((now.double() - b.double()).square().sum()) for _, now, b in pairs)
        expected = sum(_along(p, now, b) for p, now, b in pairs)
        return (moved / total if total else None), math.sqrt(square), expected


def _along(parameter: Tensor, now: Tensor, before: Tensor) -> float:
    """The change of one parameter times its gradient; 0 for a gradient that is not dense."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        return 0.0
    values = readable(gradient)
    if values is None or values.shape != now.shape:
        return 0.0
    return float(((now.double() - before.double()) * values.double()).sum())


def _copy(parameter: Tensor) -> Tensor | None:
    values = readable(parameter)
    return None if values is None else values.clone()


# Which gradients still carry a loss scale: scaled by a backward, not unscaled since.


class CarriedScale:
    """Follows scaled backward passes, ``unscale_`` and ``update``, one optimizer at a time."""

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


# Names for objects that have none: "optimizer0", "scaler1", in the order of first sight.


class Numbering:
    """Numbers objects by identity; keeping them alive keeps their numbers their own."""

    def __init__(self, word: str) -> None:
        self.known: list[Any] = []
        self._word = word

    def name_of(self, thing: object) -> str:
        """The object's name; a new number when it was not seen before."""
        for number, known in enumerate(self.known):
            if known is thing:
                return f"{self._word}{number}"
        self.known.append(thing)
        return f"{self._word}{len(self.known) - 1}"

    def named(self, name: str) -> Any | None:
        """The object of that name; None when there is none."""
        return next((k for n, k in enumerate(self.known) if f"{self._word}{n}" == name), None)
