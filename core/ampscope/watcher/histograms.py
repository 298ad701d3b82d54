"""Instrument: the exponent histograms of one step of a watched training.

What modules put out and the gradients that come back are counted as they pass. Weights, their
gradients and updates are counted around the optimizer's step. A copy of all weights would be more
memory than a guest may take, so each recorded step copies as many as fit beside what the training
itself has needed at its peak, and the next goes on where this one ended.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ampscope.analysis.ranks import merged
from ampscope.capture import weights
from ampscope.capture.accumulator import Accumulator, PendingFrames
from ampscope.capture.failures import Failures, OwnTime
from ampscope.capture.histograms import HistogramHooks
from ampscope.capture.model_map import NamedParameter
from ampscope.capture.own_ops import own_ops
from ampscope.capture.script.optimizer_facts import lr_of
from ampscope.capture.tensors import HALF, opened
from ampscope.capture.user_objects import parameters_of
from ampscope.late_imports import late_import
from ampscope.records import Frame, NonFiniteRecord, Role
from ampscope.watcher.flight import free_bytes
from ampscope.watcher.guard import Guard
from ampscope.watcher.models import WatchedModels

if TYPE_CHECKING:
    from ampscope.capture.taps import RunningModules, TapPlace

MOST_ARRIVALS = 100_000  # of one step


class StepHistograms:
    """Counts while entered; the caller names the moments of a step."""

    def __init__(
        self, models: WatchedModels, guard: Guard, inside: TappedHistograms | None = None
    ) -> None:
        """``inside`` counts in compiled code."""
        self._guard = guard
        self.inside = inside
        self._time = OwnTime()  # without the hooks' own
        self._models = models
        self._outputs = Accumulator(Failures())
        self._counts: dict[int, Accumulator] = {}  # by optimizer: one may be unscaled before
        self._unscaled: set[int] = set()  # optimizers whose gradients of this step were unscaled
        self._hooks = HistogramHooks(models, self._outputs, guarded=guard.hook)
        self._active(on=False)
        self._step, self._is_scheduled, self._with_weights = 0, False, False
        self._before: dict[int, Tensor] = {}  # position -> weight before the step
        self._next = 0  # place in an optimizer's parameters where the next copies begin
        self.stalled_share: float | None = None  # of the present step, where it was compared
        self._stalling = StagnatedWeights()
        # Parameters as backward reached them. Steps that are not seen never empty it.
        self._arrivals: deque[Tensor] = deque(maxlen=MOST_ARRIVALS)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> StepHistograms:
        # Nothing is seen inside a compiled model, and a global hook makes torch.compile warn.
        if not all(root.is_compiled for root in self._models.roots):
            self._hooks.__enter__()
        if self.inside is not None:
            self.inside.open(self._outputs)
        # A function in C that cannot fail, without the guard: it is called for each parameter of
        # each step, and what a hook in Python takes would be 0.5 % of a step of a small ResNet.
        note = self._arrivals.append
        for parameter in self._models.parameters:
            if parameter.tensor.requires_grad:
                self._handles.append(parameter.tensor.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.__exit__(*error)
        if self.inside is not None:
            self.inside.close()
        self._before.clear()

    def start(self, step: int, *, histograms: bool, weights: bool) -> None:
        """A step begins, of which ``histograms`` are wanted, and those of ``weights`` too."""
        self._step, self._is_scheduled, self._with_weights = step, histograms, weights
        self.stalled_share = None
        self._hooks.start_step(step, active=histograms)
        self._active(on=histograms)

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient arrived since the last step that was seen."""
        return bool(self._arrivals)

    def pause(self, *, on: bool) -> None:
        """Count nothing of what runs now; go on as the schedule says."""
        self._hooks.active = self._is_scheduled and not on
        self._active(on=self._hooks.active)

    def _active(self, *, on: bool) -> None:
        if self.inside is not None:
            self.inside.active = on

    def gradients_complete(self, optimizer: Optimizer) -> None:
        """Backward is done; gradients are still scaled."""
        if self._is_scheduled:
            self._count(optimizer, with_weights=self._with_weights)

    def _count(self, optimizer: Optimizer, *, with_weights: bool) -> None:
        with self._time.spent("gradients"), own_ops():
            counts = self._counts.setdefault(id(optimizer), Accumulator())
            own = self._parameters(optimizer)
            weights.count_gradients(counts, ((i, p.tensor) for i, p in own))
            if with_weights:
                weights.count_weights(counts, ((p.owner, p.tensor) for _, p in own if p.is_counted))

    def count_bad(self, optimizer: Optimizer, *, is_unscaled: bool) -> None:
        """Count gradients that are not finite, whatever the schedule."""
        if not self._is_scheduled:
            if is_unscaled:
                self._unscaled.add(id(optimizer))
            self._count(optimizer, with_weights=False)

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step."""
        if not self._with_weights:
            return
        with self._time.spent("weights"), torch.no_grad(), own_ops():
            held = [p.tensor for _, p in self._parameters(optimizer)]
            self.stalled_share = self._stalling.look(optimizer, held, self._step)
            own = [(i, p) for i, p in self._parameters(optimizer) if p.is_counted]
            if not own:
                return
            step_bytes = sum(p.tensor.numel() * p.tensor.element_size() for _, p in own)
            free = free_bytes(own[0][1].tensor.device, step_bytes)
            start = self._next % len(own)
            for place in range(len(own)):
                position, parameter = own[(start + place) % len(own)]
                tensor = opened(parameter.tensor)
                if tensor is None or tensor.itemsize == 1:  # no difference can be taken of these
                    continue
                free -= tensor.numel() * tensor.element_size()
                if free < 0 and place:
                    self._next = start + place
                    return
                self._before[position] = tensor.clone()

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after the optimizer's step."""
        if not self._before:
            return
        with self._time.spent("updates"):
            counts = self._counts.setdefault(id(optimizer), Accumulator())
            before = ((self._models.parameters[i], copy) for i, copy in self._before.items())
            weights.count_updates(counts, ((p.owner, p.tensor, copy) for p, copy in before))
            self._before.clear()

    def drop(self, optimizer: Optimizer) -> None:
        """What was counted of this optimizer belongs to no step."""
        if id(optimizer) in self._counts:
            self._counts[id(optimizer)].collect(self._step, 1.0)
        self._before.clear()

    def take(self, optimizers: Sequence[Optimizer], scale: float) -> StepFrames:
        """What was counted at this step, and ends it. Waits for no device."""
        self._hooks.end_step()
        if self.inside is not None and self._is_scheduled:
            self.inside.end_step()
        self._active(on=False)
        self._before.clear()
        known = [id(one) for one in optimizers if id(one) in self._counts]
        parts = [self._outputs.collect(self._step, scale)]
        parts += [
            self._counts[one].collect(self._step, 1.0 if one in self._unscaled else scale)
            for one in known
        ]
        self._unscaled.clear()
        reached = list(self._arrivals) if any(part.roles for part in parts) else []
        self._arrivals.clear()
        return StepFrames(parts, reached, self._models)

    def take_elapsed_s(self) -> float:
        """The instrument's own time since the last call."""
        total = self._time.take() + self._hooks.elapsed_s
        self._hooks.elapsed_s = 0.0
        if self.inside is not None:
            total += self.inside.elapsed_s
            self.inside.elapsed_s = 0.0
        return total

    def _parameters(self, optimizer: Optimizer) -> list[tuple[int, NamedParameter]]:
        found = (self._models.position(tensor) for tensor in parameters_of(optimizer))
        return [
            (i, parameter)
            for i in found
            if i is not None
            and (parameter := self._models.parameters[i]).tensor.is_floating_point()
        ]


class StepFrames:
    """The histograms of one step, which may be on their way from a device."""

    def __init__(
        self, parts: Sequence[PendingFrames], reached: Sequence[Tensor], models: WatchedModels
    ) -> None:
        """``reached`` are parameters in the order in which backward came to them."""
        self._parts = list(parts)
        positions = map(models.position, reached)
        self._reached = [i for i in positions if i is not None]
        self._names = models.parameters

    @property
    def is_here(self) -> bool:
        """Whether nothing comes from a device."""
        return all(part.is_here for part in self._parts)

    @property
    def frames(self) -> dict[Role, Frame]:
        """A frame for each role that was counted. Waits for the device where it has to."""
        return self._read[0]

    @property
    def nonfinite(self) -> list[NonFiniteRecord]:
        """The parameters whose gradients held NaN or Inf. Waits for the device where it has to."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[dict[Role, Frame], list[NonFiniteRecord]]:
        frames: dict[Role, Frame] = {}
        counted = [part.frames() for part in self._parts]
        self._parts = []  # the recorder may keep the frames waiting
        for role in Role:
            if found := [frames_of[role] for frames_of in counted if role in frames_of]:
                frames[role] = found[0] if len(found) == 1 else merged(found)
        gradients = frames.pop(Role.WEIGHT_GRAD, None)
        if gradients is None:
            return frames, []
        # A sharded gradient arrives without a hook: then backward's order is the reverse of names.
        order = dict.fromkeys((*self._reached, *sorted(gradients.modules, reverse=True)))
        names = self._names
        bad = weights.nonfinite(gradients, order, lambda i: names[i].name)
        kept = [i for i, p in enumerate(gradients.modules) if names[p].is_counted]
        if kept:
            own = replace(
                gradients,
                modules=tuple(gradients.modules[i] for i in kept),
                dtypes=tuple(gradients.dtypes[i] for i in kept),
                rows=gradients.rows[kept],
            )
            frames[Role.WEIGHT_GRAD] = weights.by_module(own, lambda i: names[i].owner)
        return frames, bad


class TappedHistograms:
    """Counts what taps inside compiled code hand over, while :attr:`active`."""

    def __init__(self, models: WatchedModels, guard: Guard, note: Callable[[str], None]) -> None:
        """``note`` gets a sentence on what cannot be counted, each once."""
        self.active = False
        self.elapsed_s = 0.0
        self._models, self._guard, self._note = models, guard, note
        self._counts = Accumulator(Failures())
        self._running: RunningModules
        self._below: Callable[[object, str], object]
        self._heard: set[Role] = set()
        self._has_ended = False
        self._told: set[str] = set()
        self._stack = contextlib.ExitStack()

    def open(self, counts: Accumulator) -> None:
        """Taps from here on, counted into ``counts``."""
        try:
            taps: Any = late_import("ampscope.capture.taps")  # loads torch._dynamo: 1 s
            self._counts, self._running, self._below = counts, taps.RunningModules(), taps.below
            look = self._guard.hook(self._look)
            self._stack.enter_context(taps.tapping(look, self._failed, everything=False))
        except ImportError as error:
            self._has_ended = True
            self._tell(f"Compiled code gets no taps: {error}")

    def close(self) -> None:
        """No taps in what is compiled after this."""
        self._stack.close()

    def end_step(self) -> None:
        """A step ended that was to be counted."""
        if self._has_ended:  # later steps say nothing new
            return
        self._has_ended = True
        if not self._heard:
            self._tell(
                "No tap was heard: the model was compiled before watch(), by a backend without "
                "AOTAutograd, or not at all. Call watch(…, taps=True) before the first step."
            )
        elif Role.GRAD_OUTPUT not in self._heard:
            self._tell(
                "No gradient is counted in compiled code: compiled autograd makes one graph of the "
                "whole backward pass, which names no module; and frozen modules have none."
            )

    def _failed(self, reason: str) -> None:
        self._tell(f"A compiled graph has no taps: {reason}.")

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._note(text)

    def _look(self, place: TapPlace, tensor: Tensor) -> None:
        role = Role(place.role)
        self._heard.add(role)
        if not self.active:
            return
        started = time.perf_counter()
        module = self._below(self._running.begins(place), place.module)
        if not isinstance(module, nn.Module):
            self._tell(
                f"Compiled code does not tell which module {place.module or place.kind} is: it is "
                "not counted."
            )
        elif (index := self._models.index(module)) is not None:
            self._counts.add(role, index, tensor)
        self.elapsed_s += time.perf_counter() - started


class StagnatedWeights:
    """Compares half-precision weights over a long span: which of those that get gradients moved.

    One step shows nothing: stochastic rounding moves few weights in each, and all over many. Only
    optimizers of torch itself are looked at, which round to the nearest and carry no error along;
    what others do with it is not known here. One tensor of each optimizer is followed.
    """

    SPAN = 100  # steps at least
    LEAST = 64  # weights
    MOST = 1 << 22  # weights: 8 MiB
    RISEN = 0.5  # of the largest learning rate so far: where it decays to nothing, weights may stop

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int, Tensor, Tensor]] = {}  # step, id, weights, reached
        self._rates: dict[int, float] = {}

    def look(self, optimizer: Optimizer, tensors: Sequence[Tensor], step: int) -> float | None:
        """The share that moved since the last look, which is at least :data:`SPAN` steps ago; None
        where nothing can be said."""
        key, rate = id(optimizer), lr_of(optimizer)
        self._rates[key] = max(self._rates.get(key, 0.0), rate)
        known = self._known.get(key)
        if known is not None and step - known[0] < self.SPAN:
            return None
        fits = [t for t in tensors if t.dtype in HALF and self.LEAST <= t.numel() <= self.MOST]
        if not type(optimizer).__module__.startswith("torch.optim.") or not fits:
            return None
        followed = next(
            (t for t in fits if known and id(t) == known[1]), max(fits, key=Tensor.numel)
        )
        now, gradient = opened(followed), followed.grad
        reached = None if gradient is None else opened(gradient)
        if now is None or reached is None or now.shape != reached.shape:
            return None
        reached = (reached != 0) & torch.isfinite(reached)
        self._known[key] = (step, id(followed), now.clone(), reached)
        if known is None or known[1] != id(followed) or rate < self.RISEN * self._rates[key]:
            return None
        both = reached & known[3]
        count = int(both.sum())
        if count < self.LEAST:
            return None
        return int(((now != known[2]) & both).sum()) / count
