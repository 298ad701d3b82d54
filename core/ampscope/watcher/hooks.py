"""Instrument: sees the steps of somebody else's training loop, taken or skipped.

    scaler.unscale_(opt)    gradients are complete and still scaled (the first of these calls)
    scaler.step(opt)        likewise; when the optimizer's own step does not follow, it was skipped
    optimizer.step()        likewise without a scaler
    scaler.update()         optimizers that were unscaled and did not step are not going to

Optimizers are seen through torch's global hooks, a scaler through its class's methods. Everything
is put back on exit.

Also here: the losses of that loop, which scalers are followed, and which optimizers belong to it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.global_hooks import OPTIMIZER_POST, OPTIMIZER_PRE, Subscription
from ampscope.capture.script.optimizer_facts import has_closure, parameters_of
from ampscope.capture.tensors import floating_tensors, in_backward, readable
from ampscope.patches import Patches
from ampscope.watcher.guard import Guard
from ampscope.watcher.models import WatchedModels


class StepListener(Protocol):
    """Who is told; every call comes from the thread that trains."""

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None: ...

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...

    def attempt_ended(self, optimizer: Optimizer, *, skipped: bool) -> None: ...

    def attempt_dropped(self, optimizer: Optimizer) -> None: ...


class StepHooks:
    """Tells a listener of every attempted step of the optimizers for which ``is_ours`` holds;
    ``follows`` says which scalers count. A thread that steps one of them is added to ``threads``,
    those that train the watched models; what other threads do is not looked at."""

    def __init__(
        self,
        listener: StepListener,
        is_ours: Callable[[Optimizer], bool],
        follows: Followed,
        threads: set[int],
        guard: Guard,
        scalers: Sequence[Any] = (),
    ) -> None:
        self._listener = listener
        self._is_ours = is_ours
        self._follows = follows
        self._threads = threads
        self._guard = guard
        self._scalers = scalers
        self._patches = Patches()
        self._handles: list[Subscription] = []
        self._stepping: Any = None  # the scaler whose step runs
        self._stepped = False
        self._told: dict[int, Optimizer] = {}  # whose gradients were complete in this attempt
        self._is_open = False

    def __enter__(self) -> StepHooks:
        self._is_open = True
        self._handles = [
            OPTIMIZER_PRE.subscribe(self._guard.hook(self._before_step)),
            OPTIMIZER_POST.subscribe(self._guard.hook(self._after_step)),
        ]
        wrappers = {"unscale_": self._unscale, "step": self._step, "update": self._update}
        for kind in scaler_classes(self._scalers):
            for name, make in wrappers.items():
                if name in vars(kind):
                    self._patches.replace(kind, name, make)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_open = False  # a wrapper of ours may live on inside somebody else's
        for handle in self._handles:
            handle.remove()
        self._patches.undo()
        self._told.clear()

    def _unscale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guard.call(self._before_unscale, scaler, optimizer)
            return original(scaler, optimizer)

        return wrapper

    def _step(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._stepping is not None or not self._is_open:
                return original(scaler, optimizer, *args, **kwargs)
            inner = self._guard.call(self._before_scaler, scaler, optimizer)
            if inner is None:
                return original(scaler, optimizer, *args, **kwargs)
            self._stepping, self._stepped = scaler, False
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._stepping = None
            if not self._stepped:
                self._guard.call(self._ended, inner, skipped=True)
            return result

        return wrapper

    def _update(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._after_update, scaler)
            return result

        return wrapper

    def _before_unscale(self, scaler: Any, optimizer: Any) -> None:
        inner = plain_optimizer(optimizer)
        if self._is_open and self._is_ours(inner) and self._follows.steps_ours(scaler):
            self._complete(inner, scaler)

    def _before_scaler(self, scaler: Any, optimizer: Any) -> Optimizer | None:
        """The optimizer whose attempt begins; None when it is none of ours."""
        inner: Optimizer = plain_optimizer(optimizer)
        if not self._is_ours(inner) or not self._follows.steps_ours(scaler):
            return None
        self._complete(inner, scaler)
        return inner

    def _after_update(self, scaler: Any) -> None:
        here = threading.get_ident() in self._threads  # another's scaler is none of ours
        if here and self._is_open and self._follows(scaler):
            told, self._told = self._told, {}
            for optimizer in told.values():
                self._listener.attempt_dropped(optimizer)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._stepped = True
        if not has_closure(args, kwargs):  # a closure's gradients come inside the step
            self._complete(optimizer, self._stepping)
        self._listener.before_step(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._complete(optimizer, self._stepping)
        # A fused optimizer is always called; GradScaler hands it found_inf, and it does nothing.
        found_inf = getattr(optimizer, "found_inf", None)
        skipped = found_inf is not None and bool(found_inf)
        if not skipped:
            self._listener.after_step(optimizer)
        self._ended(optimizer, skipped=skipped)

    def _complete(self, optimizer: Optimizer, scaler: Any) -> None:
        if id(optimizer) not in self._told:
            self._threads.add(threading.get_ident())
            self._told[id(optimizer)] = optimizer
            self._listener.gradients_complete(optimizer, scaler)

    def _ended(self, optimizer: Optimizer, *, skipped: bool) -> None:
        self._told.pop(id(optimizer), None)
        self._listener.attempt_ended(optimizer, skipped=skipped)


def plain_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper such as Accelerate's or Lightning's."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    inner = getattr(optimizer, "optimizer", None)  # Accelerate's wrapper is an Optimizer itself
    return inner if isinstance(inner, Optimizer) else optimizer


# Instrument: sees the losses of somebody else's training loop.
#
#     scaler.scale(loss)      the unscaled loss of the backward pass that follows
#     backward(loss)          the loss itself, where no scaler has scaled one
#     autograd.grad(scaled)   gradients that the loop goes on computing its loss with
#     optimizer.zero_grad()   gradients that were there are gone, and with them their losses
#
# What a loop does with a scaled loss before it calls backward (a sum, a division) changes nothing:
# the losses that were scaled since the last backward pass are what it is called on. Losses of
# threads that train something else are not looked at.


class LossListener(Protocol):
    """Who is told; every call comes from the thread that trains."""

    def loss_seen(self, loss: Tensor) -> None: ...

    def gradients_taken(self, scaled: Sequence[Tensor], gradients: Sequence[Tensor]) -> None: ...

    def losses_dropped(self) -> None: ...

    def backward_ended(self) -> None: ...


class LossHooks:
    """Tells a listener of the losses of ``threads``; ``follows`` says which scalers count."""

    def __init__(
        self,
        listener: LossListener,
        is_ours: Callable[[Optimizer], bool],
        follows: Callable[[Any], bool],
        threads: set[int],
        guard: Guard,
        scalers: Sequence[Any] = (),
    ) -> None:
        self._listener = listener
        self._is_ours = is_ours
        self._follows = follows
        self._threads = threads
        self._guard = guard
        self._scalers = scalers
        self._patches = Patches()
        self._scaled: list[Tensor] = []  # losses whose backward has not begun
        self._outputs: list[Tensor] = []  # all that was scaled since the last backward
        self._is_open = False

    def __enter__(self) -> LossHooks:
        self._is_open = True
        for kind in scaler_classes(self._scalers):
            if "scale" in vars(kind):
                self._patches.replace(kind, "scale", self._scale)
        self._patches.replace(torch.autograd, "backward", self._backward)
        self._patches.replace(torch.autograd, "grad", self._grad)
        self._patches.replace(Optimizer, "zero_grad", self._zero_grad)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._is_open = False  # a wrapper of ours may live on inside somebody else's
        self._patches.undo()
        self._scaled.clear()
        self._outputs.clear()

    def _scale(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_scaled, scaler, outputs)
            return scaled

        return wrapper

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_backward, tensors)
            result = original(tensors, *args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_backward_end)
            return result

        return wrapper

    def _grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            gradients = original(*args, **kwargs)
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_gradients, gradients)
            return gradients

        return wrapper

    def _note_gradients(self, gradients: Any) -> None:
        if self._outputs and self._is_here() and not in_backward():
            self._listener.gradients_taken(self._outputs, floating_tensors(gradients))

    def _note_backward_end(self) -> None:
        if self._is_open and not in_backward():
            self._listener.backward_ended()

    def _note_scaled(self, scaler: Any, outputs: Any) -> None:
        if self._is_here() and self._follows(scaler):
            self._scaled += _losses(outputs)
            self._outputs += [
                x for t in floating_tensors(outputs) if (x := readable(t)) is not None
            ]

    def _note_backward(self, tensors: Any) -> None:
        if self._is_here() and not in_backward():  # not inside another
            losses, self._scaled, self._outputs = self._scaled, [], []
            for loss in losses or _losses(tensors):
                self._listener.loss_seen(loss)

    def _note_zeroed(self, optimizer: Any) -> None:
        if self._is_open and self._is_ours(optimizer):
            self._listener.losses_dropped()

    def _is_here(self) -> bool:
        """Whether this thread is one that trains what is watched."""
        return self._is_open and threading.get_ident() in self._threads

    def _zero_grad(self, original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._guard.call(self._note_zeroed, optimizer)
            return original(optimizer, *args, **kwargs)

        return wrapper


def _losses(value: Any) -> list[Tensor]:
    """``value`` where it is one number that can be read."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        return []
    loss = readable(value)
    return [] if loss is None else [loss]


# Which classes' methods a GradScaler may run, and whether one is followed.


def scaler_classes(scalers: Sequence[Any]) -> Iterator[type]:
    """Those of the given scalers; without any, of every `torch.amp.GradScaler`."""
    if scalers:
        kinds = (kind for scaler in scalers for kind in type(scaler).__mro__)
        yield from dict.fromkeys(kind for kind in kinds if kind is not object)
        return
    waiting: list[type] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()


class Followed:
    """Says of a scaler whether it is one of those that are watched; without any, every enabled one
    is."""

    def __init__(self, scalers: Sequence[Any]) -> None:
        self._ids = {id(scaler) for scaler in scalers}

    def __call__(self, scaler: Any) -> bool:
        return (not self._ids or id(scaler) in self._ids) and self.is_enabled(scaler)

    @staticmethod
    def is_enabled(scaler: Any) -> bool:
        """Whether it scales at all. A loss is seen through every such scaler: which optimizer it
        will step is not known yet."""
        return bool(scaler.is_enabled())

    def steps_ours(self, scaler: Any) -> bool:
        """As a call, for a scaler that steps a watched optimizer: one that was not given has taken
        the place of one that was."""
        if self.is_enabled(scaler) and self._ids:
            self._ids.add(id(scaler))
        return self(scaler)


# Which optimizers belong to the watched models, and what they hold.


SUCCESSOR = (
    "An optimizer that watch() was not given steps parameters of one that watch() was given: it is "
    "taken for the successor, and its steps are recorded."
)
UNSEEN = (
    "An optimizer steps {} parameters that the watched models did not have when watch() was "
    "called: they are not seen, and gradient norms are without them. Call watch() again where the "
    "model's parameters were made anew."
)


@dataclass(frozen=True, slots=True)
class _Held:
    """What an optimizer steps, as of its last step."""

    ids: list[int]  # of all its parameters
    ours: list[tuple[int, Tensor]]  # those of watched models, each with its position
    models: set[str]


class OurOptimizers:
    """Those that were ``given``; with none given, all that hold a watched parameter.

    An optimizer that steps parameters of a given one takes its place (a training that begins a new
    phase, or that loads a checkpoint, makes a new one), and is theirs too. ``say`` gets a sentence
    for what changed, and whether steps or numbers are lost by it.
    """

    def __init__(
        self,
        models: WatchedModels,
        given: Sequence[Optimizer],
        say: Callable[[str, bool], None],
    ) -> None:
        self._models = models
        self._say = say
        self._given = {id(p) for optimizer in given for p in parameters_of(optimizer)}
        # Whether it is one, and its parameter groups when that was found out.
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[bool, int]]
        self._known = weakref.WeakKeyDictionary({o: (True, len(o.param_groups)) for o in given})
        self._unseen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._held: weakref.WeakKeyDictionary[Optimizer, _Held] = weakref.WeakKeyDictionary()
        self._together: set[tuple[str, ...]] = set()  # models whose optimizers step in backward
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def has(self, optimizer: Optimizer) -> bool:
        """Whether its steps are steps of this run."""
        is_ours, groups = self._known.get(optimizer, (False, -1))
        if is_ours or groups == len(optimizer.param_groups):
            return is_ours
        own = parameters_of(optimizer)
        if self._given:
            is_ours = any(id(p) in self._given for p in own)
        else:
            is_ours = any(self._models.position(p) is not None for p in own)
        self._known[optimizer] = is_ours, len(optimizer.param_groups)
        if is_ours and self._given:
            self._say(SUCCESSOR, False)
        elif not is_ours and (count := self._anew(own)):
            self._known[optimizer] = True, len(optimizer.param_groups)  # its steps are counted
            self._unseen[optimizer] = count
            self._say(UNSEEN.format(count), True)
            return True
        return is_ours

    def _anew(self, parameters: Sequence[Tensor]) -> int:
        """How many of these the watched models hold now, and did not when they were given."""
        roots = self._models.roots
        now = {id(p) for root in roots for p in root.plain.parameters()}
        return sum(id(p) in now and self._models.position(p) is None for p in parameters)

    def gradients(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Position of a parameter -> its gradient, where it has one."""
        parameters = parameters_of(optimizer)
        ids = list(map(id, parameters))
        held = self._held.get(optimizer)
        if held is None or held.ids != ids:
            held = self._held[optimizer] = self._found(parameters, ids)
        unknown = len(ids) - len(held.ours)
        found = {i: gradient for i, p in held.ours if (gradient := p.grad) is not None}
        if unknown > self._unseen.get(optimizer, 0):  # once for each that came
            self._unseen[optimizer] = unknown
            self._say(UNSEEN.format(unknown), False)
        return found

    def with_gradients(self, optimizer: Optimizer) -> Iterator[Tensor]:
        """The watched parameters that it steps and that have a gradient now."""
        held = self._held.get(optimizer)
        return (p for _, p in ([] if held is None else held.ours) if p.grad is not None)

    def models(self, optimizer: Optimizer) -> set[str]:
        """The models whose parameters it steps, as of its last :meth:`gradients`."""
        held = self._held.get(optimizer)
        return set() if held is None else held.models

    def _found(self, parameters: Sequence[Tensor], ids: list[int]) -> _Held:
        places = ((self._models.position(p), p) for p in parameters)
        ours = [(i, p) for i, p in places if i is not None]
        return _Held(ids, ours, {self._models.parameters[i].root for i, _ in ours})

    def stepped(self, optimizers: Sequence[Optimizer]) -> int:
        """They have made a step together, nearly always one alone. A number for who steps."""
        if len(optimizers) == 1:
            self._stepped.add(optimizers[0])
            return id(optimizers[0])
        key = tuple(sorted(set().union(*map(self.models, optimizers))))
        self._together.add(key)
        return hash(key)

    def round_of(self, step: int) -> int:
        """A round is a step of each optimizer."""
        return step // max(1, len(self._stepped) + len(self._together))
