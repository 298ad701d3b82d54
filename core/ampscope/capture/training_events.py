"""Instrument: what optimizers and GradScalers do, and the losses that backward is called on.

    scaler.scale(loss)      scaled
    scaler.unscale_(opt)    before_unscale
    scaler.step(opt)        before_scaler_step, after_scaler_step
    optimizer.step()        before_step, after_step; inside ``scaler.step`` or without a scaler
    scaler.update()         updated

:class:`StepEvents` hears of these and tells its listeners. :class:`TrainingEvents` makes of them
the losses and the steps of one training among others. Optimizers are seen through torch's
global hooks, a scaler through its class's methods; everything is put back on exit.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampscope.capture.global_hooks import (
    OPTIMIZER_POST,
    OPTIMIZER_PRE,
    Subscription,
    steps_that_run,
)
from ampscope.capture.tensors import floating_tensors, floats, in_backward, is_traced, readable
from ampscope.capture.user_objects import plain_optimizer
from ampscope.patches import Patches

MOST_SCALED = 1024  # calls of ``scaler.scale`` that wait for their backward pass
MOST_TAKEN = 64  # of these, with gradients taken of them; each such call reads them all


class StepListener:
    """Overrides what it wants to hear. Every call comes from the thread that trains; a scaler that
    is disabled is none. An optimizer is torch's own, also where the script hands the scaler a
    wrapper around it; what holds none of torch's is passed on as it is."""

    def scaled(self, scaler: Any, loss: Any, result: Any) -> None:
        """``scaler.scale(loss)`` has returned ``result``."""

    def before_unscale(self, optimizer: Any, scaler: Any) -> None:
        """``scaler.unscale_(optimizer)`` begins, the script's own or the one in ``scaler.step``."""

    def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
        """``scaler.step(optimizer)`` begins: it will let the optimizer step, or not."""

    def after_scaler_step(
        self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        """``scaler.step(optimizer)`` has ended, or a listener behind this one raised before it
        began. ``stepped``: an optimizer's own step has begun inside. ``raised``: an exception came
        out of it."""

    def before_step(self, optimizer: Optimizer, scaler: Any, *, has_closure: bool) -> None:
        """The optimizer's own step begins, inside that scaler's; None: called directly. With a
        closure the gradients come inside the step."""

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        """The optimizer's own step has ended; see :func:`did_nothing`."""

    def updated(self, scaler: Any) -> None:
        """``scaler.update()`` has ended."""


class CallGuard(Protocol):
    """Calls a function so that what it raises does not end the training."""

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...


def _unguarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a listener raises goes to the training."""
    return function(*args, **kwargs)


def _base_scaler() -> Iterator[type]:
    yield torch.amp.GradScaler


class _Running(threading.local):
    """The ``scaler.step`` of this thread: an optimizer steps in the thread of its scaler, and other
    threads may train something else."""

    def __init__(self) -> None:  # once for each thread
        self.scaler: Any = None  # whose step runs
        self.stepped = False  # an optimizer's own step has begun inside
        self.steps: list[int] = []  # ids of the optimizers whose own steps run, innermost last


class StepEvents:
    """Tells ``listeners`` while entered, in their order. ``classes`` are those whose methods are
    the scalers', :class:`torch.amp.GradScaler` alone by default."""

    def __init__(
        self,
        *listeners: StepListener,
        classes: Callable[[], Iterable[type]] = _base_scaler,
        guard: CallGuard | None = None,
    ) -> None:
        self._listeners = listeners
        self._classes = classes
        self._call = _unguarded if guard is None else guard.call
        self._patches = Patches()
        self._handles: list[Subscription] = []
        self._is_open = False  # a wrapper of ours may live on inside another's
        self._running = _Running()

    def __enter__(self) -> StepEvents:
        self._is_open = True
        try:
            self._attach()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _attach(self) -> None:
        for hooks, hear in (
            (OPTIMIZER_PRE, self._before_step),
            (OPTIMIZER_POST, self._after_step),
        ):
            self._handles.append(hooks.subscribe(functools.partial(self._call, hear)))
        calls = {
            "scale": self._scale,
            "unscale_": self._unscale,
            "step": self._step,
            "update": self._update,
        }
        for kind in self._classes():
            for name in vars(kind).keys() & calls.keys():
                self._patches.wrap(kind, name, calls[name])

    def __exit__(self, *error: object) -> None:
        self._is_open = False
        while self._handles:
            self._handles.pop().remove()
        self._patches.undo()

    @property
    def _hears(self) -> bool:
        return self._is_open and not is_traced()

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if self._hears:
            self._call(self._after_scale, scaler, outputs, scaled)
        return scaled

    def _after_scale(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        if scaler.is_enabled():
            for one in self._listeners:
                self._call(one.scaled, scaler, outputs, scaled)

    def _unscale(self, original: Any, scaler: Any, optimizer: Any) -> Any:
        if self._hears:
            self._call(self._before_unscale, scaler, optimizer)
        return original(scaler, optimizer)

    def _before_unscale(self, scaler: Any, optimizer: Any) -> None:
        if scaler.is_enabled():
            optimizer = plain_optimizer(optimizer)
            for one in self._listeners:
                self._call(one.before_unscale, optimizer, scaler)

    def _step(self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        # A subclass's own step may call this one: the outermost counts.
        running = self._running
        if not self._hears or running.scaler is not None:
            return original(scaler, optimizer, *args, **kwargs)
        if not self._call(self._before_scaler_step, scaler, optimizer):
            return original(scaler, optimizer, *args, **kwargs)
        running.scaler, running.stepped, raised = scaler, False, True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
            raised = False
        finally:
            running.scaler = None
            self._call(self._after_scaler_step, scaler, optimizer, raised=raised)
        return result

    def _before_scaler_step(self, scaler: Any, optimizer: Any) -> bool:
        """Whether there is a scaler that steps."""
        if not scaler.is_enabled():
            return False
        optimizer = plain_optimizer(optimizer)
        for count, one in enumerate(self._listeners):
            try:
                self._call(one.before_scaler_step, optimizer, scaler)
            except BaseException:  # it may be meant for the training, which may go on
                for told in self._listeners[:count]:
                    told.after_scaler_step(optimizer, scaler, stepped=False, raised=True)
                raise
        return True

    def _after_scaler_step(self, scaler: Any, optimizer: Any, *, raised: bool) -> None:
        stepped, optimizer = self._running.stepped, plain_optimizer(optimizer)
        for one in self._listeners:
            self._call(one.after_scaler_step, optimizer, scaler, stepped=stepped, raised=raised)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # torch wraps the step of each class: one that calls its base class's is heard twice.
        steps = self._running.steps
        if steps:
            del steps[steps_that_run() - 1 :]  # nothing was heard of the end of one that raised
        steps.append(id(optimizer))
        if id(optimizer) in steps[:-1]:
            return
        self._running.stepped = True
        has_closure = _has_closure(args, kwargs)
        for one in self._listeners:
            self._call(one.before_step, optimizer, self._running.scaler, has_closure=has_closure)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        steps = self._running.steps
        del steps[-1:]
        if id(optimizer) in steps:
            return
        for one in self._listeners:
            self._call(one.after_step, optimizer, self._running.scaler)

    def _update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(scaler, *args, **kwargs)
        if self._hears:
            self._call(self._after_update, scaler)
        return result

    def _after_update(self, scaler: Any) -> None:
        if scaler.is_enabled():
            for one in self._listeners:
                self._call(one.updated, scaler)


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Whether the arguments of a step hook hold a closure."""
    # The hook's args hold the optimizer itself first.
    return any(callable(a) and not isinstance(a, Optimizer) for a in args) or callable(
        kwargs.get("closure")
    )


def did_nothing(optimizer: Optimizer) -> bool:
    """Whether the step that has just ended was left out. A fused optimizer is always called;
    GradScaler hands it found_inf, and it does nothing."""
    return bool(_found_inf(optimizer))


def _found_inf(optimizer: Optimizer) -> bool | Tensor:
    """As :func:`did_nothing`; what is on a device is not waited for."""
    found_inf = getattr(optimizer, "found_inf", None)
    if isinstance(found_inf, Tensor) and not found_inf.is_cpu:
        return found_inf
    return found_inf is not None and bool(found_inf)


class TrainingListener:
    """Overrides what it wants to hear. Every call comes from the thread that trains."""

    def loss_seen(self, loss: Tensor) -> None:
        """A backward pass of this loss begins."""

    def gradients_taken(self, scaled: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """The training itself took gradients of what was scaled."""

    def losses_dropped(self) -> None:
        """Gradients were set to zero: the loss of the next backward pass counts."""

    def backward_ended(self) -> None:
        """A backward pass has ended."""

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None:
        """Backward is done; gradients are still scaled and the weights are as they were. The step
        comes through ``scaler`` or, where that is None, directly."""

    def before_step(self, optimizer: Optimizer) -> None:
        """The optimizer's own step begins."""

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer's own step has ended, and was taken, or it is not known yet whether it was;
        :meth:`optimizer_stepped` follows."""

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool | Tensor) -> None:
        """The step is over, taken or skipped. A tensor on a device: a fused optimizer's, which is
        true where it was skipped; to ask it waits for the device."""

    def optimizer_dropped(self, optimizer: Optimizer) -> None:
        """The optimizer's gradients were unscaled, and it is not going to step."""


@dataclass(slots=True)
class _Scaled:
    """One call of ``scaler.scale``; its backward pass has not begun. No tensor holds a graph."""

    losses: list[Tensor]
    outputs: list[Tensor]  # all that was scaled, unscaled
    is_taken: bool = False  # the loop has taken gradients by itself since


class TrainingEvents(StepListener):
    """One training among others: its losses, and its steps, taken or skipped.

        scaler.scale(loss)      the unscaled loss of the backward pass that follows
        backward(loss)          the loss itself, where no scaler has scaled one
        autograd.grad(scaled)   gradients that the loop goes on computing its loss with, or steps by
        optimizer.zero_grad()   gradients that were there are gone, and with them their losses
        scaler.unscale_(opt)    gradients are complete and still scaled (the first of these calls)
        scaler.step(opt)        likewise; without the optimizer's own step it was skipped
        optimizer.step()        likewise without a scaler
        scaler.update()         optimizers that were unscaled and did not step are not going to

    What a loop does with a scaled loss before it calls backward (a sum, a division) changes
    nothing: the losses that were scaled since the last backward pass are what it is called on.
    Those that the loop has taken gradients of by itself are over with the step.

    A listener is told of the optimizers for which ``is_ours`` holds. Given ``scalers``, these count
    and those that take their place; without any, every one does. A thread that steps one of the
    optimizers is added to ``threads``, those that train what is watched; what other threads do is
    not looked at. With None, every thread counts.
    """

    def __init__(
        self,
        listener: TrainingListener,
        is_ours: Callable[[Optimizer], bool],
        threads: set[int] | None,
        guard: CallGuard,
        scalers: Sequence[Any] = (),
    ) -> None:
        self._listener = listener
        self._is_ours = is_ours
        self._threads = threads
        self._guard = guard
        self._followed = {id(scaler) for scaler in scalers}
        self._events = StepEvents(
            self, classes=functools.partial(scaler_classes, scalers), guard=guard
        )
        self._patches = Patches()
        self._told: dict[int, Optimizer] = {}  # whose gradients were complete in this step
        self._scaled: list[_Scaled] = []  # since the last backward
        self._is_open = False
        # Inside scaler.step, which unscales and steps with no code of the script's between.
        self.is_in_scaler_step = False

    def __enter__(self) -> TrainingEvents:
        self._is_open = True
        try:
            self._events.__enter__()
            self._patches.wrap(torch.autograd, "backward", self._backward)
            self._patches.wrap(torch.autograd, "grad", self._grad)
            self._patches.wrap(Optimizer, "zero_grad", self._zero_grad)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._is_open = False  # a wrapper of ours may live on inside another's
        self._events.__exit__(*error)
        self._patches.undo()
        self._told.clear()
        self._scaled.clear()

    def before_unscale(self, optimizer: Any, scaler: Any) -> None:
        if self._is_ours(optimizer):
            if self._followed:
                self._followed.add(id(scaler))  # it has taken the place of one that was given
            self._complete(optimizer, scaler)

    def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
        self.is_in_scaler_step = True
        try:
            self.before_unscale(optimizer, scaler)
        finally:
            self.is_in_scaler_step = False

    def after_scaler_step(
        self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
    ) -> None:
        if not stepped and not raised and self._is_open and self._is_ours(optimizer):
            self._ended(optimizer, skipped=True)

    def before_step(self, optimizer: Optimizer, scaler: Any, *, has_closure: bool) -> None:
        if self._is_ours(optimizer):
            if not has_closure:
                self._complete(optimizer, scaler)
            self._listener.before_step(optimizer)

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        if not self._is_ours(optimizer):
            return
        self._complete(optimizer, scaler)
        skipped = _found_inf(optimizer)
        if skipped is not True:
            self._listener.after_step(optimizer)
        self._ended(optimizer, skipped=skipped)

    def updated(self, scaler: Any) -> None:
        # Another training's scaler is none of ours.
        if self._is_here() and (not self._followed or id(scaler) in self._followed):
            told, self._told = self._told, {}
            for optimizer in told.values():
                self._listener.optimizer_dropped(optimizer)
            self._drop_taken()

    def scaled(self, scaler: Any, loss: Any, result: Any) -> None:
        # Through any scaler: which optimizer it will step is not known yet.
        if self._is_here():
            tensors = floating_tensors(loss)
            outputs = [x for t in tensors if (x := readable(t)) is not None]
            self._scaled.append(_Scaled(_losses(loss), outputs))
            del self._scaled[:-MOST_SCALED]

    def _complete(self, optimizer: Optimizer, scaler: Any) -> None:
        if id(optimizer) not in self._told:
            if self._threads is not None:
                self._threads.add(threading.get_ident())
            self._told[id(optimizer)] = optimizer
            self._listener.gradients_complete(optimizer, scaler)

    def _ended(self, optimizer: Optimizer, *, skipped: bool | Tensor) -> None:
        self._told.pop(id(optimizer), None)
        self._drop_taken()
        self._listener.optimizer_stepped(optimizer, skipped=skipped)

    def _drop_taken(self) -> None:
        """No backward follows for what the loop took gradients of. What it has scaled since, for
        the next optimizer, is kept."""
        if self._scaled:
            self._scaled = [one for one in self._scaled if not one.is_taken]

    def _is_here(self) -> bool:
        """Whether this thread is one that trains what is watched."""
        here = self._threads is None or threading.get_ident() in self._threads
        return self._is_open and here

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            self._guard.call(self._note_backward, tensors)
        result = original(tensors, *args, **kwargs)
        if not is_traced():
            self._guard.call(self._note_backward_end)
        return result

    def _note_backward(self, tensors: Any) -> None:
        if self._is_here() and not in_backward():  # not inside another
            losses = [loss for one in self._scaled for loss in one.losses]
            self._scaled = []
            for loss in losses or _losses(tensors):
                self._listener.loss_seen(loss)

    def _grad(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = original(*args, **kwargs)
        if not is_traced():
            self._guard.call(self._note_gradients, gradients)
        return gradients

    def _note_gradients(self, gradients: Any) -> None:
        if self._scaled and self._is_here() and not in_backward():
            del self._scaled[:-MOST_TAKEN]  # a loop without steps takes them again and again
            for one in self._scaled:
                one.is_taken = True
            outputs = [output for one in self._scaled for output in one.outputs]
            if outputs:
                self._listener.gradients_taken(outputs, floating_tensors(gradients))

    def _note_backward_end(self) -> None:
        if self._is_open and not in_backward():
            self._listener.backward_ended()

    def _zero_grad(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_traced():
            self._guard.call(self._note_zeroed, optimizer)
        return original(optimizer, *args, **kwargs)

    def _note_zeroed(self, optimizer: Any) -> None:
        if self._is_open and self._is_ours(optimizer):
            self._listener.losses_dropped()


def _losses(value: Any) -> list[Tensor]:
    """``value`` where it is one number that can be read."""
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        return []
    loss = floats(value)
    return [] if loss is None else [loss]


def scale_of(scaler: Any) -> float:
    """What a scaler multiplies losses by; torch's own number, whatever a class made from torch's
    tells."""
    if issubclass(type(scaler), torch.amp.GradScaler):
        return float(torch.amp.GradScaler.get_scale(scaler))
    return float(scaler.get_scale())


def scaler_classes(scalers: Sequence[Any]) -> Iterator[type]:
    """Whose methods a scaler may run: the classes of the given ones; without any,
    :class:`torch.amp.GradScaler` and every class made from it."""
    if scalers:
        kinds = (kind for scaler in scalers for kind in type(scaler).__mro__)
        yield from dict.fromkeys(kind for kind in kinds if kind is not object)
        return
    waiting: list[type] = [torch.amp.GradScaler]
    while waiting:
        kind = waiting.pop()
        yield kind
        waiting += kind.__subclasses__()
