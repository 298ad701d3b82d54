"""torch's global hooks, shared by every instrument: registered once, and never changed by steps.

torch walks its global optimizer hooks with a live iterator. A hook that comes or goes while another
thread is inside ``optimizer.step()`` raises "OrderedDict mutated during iteration" there, out of
the user's own code. So each kind of hook has one dispatcher in torch's table, and instruments come
and go in the dispatcher's tuple, which is replaced and never changed::

    heard = OPTIMIZER_POST.subscribe(after_step)     # any thread, at any moment, also from a hook
    heard.remove()                                   # again does nothing; or a ``with`` block

The optimizer dispatchers stay in torch's table for good; with no subscriber one costs 0.2 us a
step. A module dispatcher costs every call of every module torch's slower path (1.4 us), so it is in
the table only while a subscriber is awake. Where a thread is inside a module's call at the moment
at which the last one falls asleep, it stays, does nothing, and leaves at a later such moment.

Code that torch.compile traces never reaches a subscriber: :meth:`Dispatcher.__call__` asks first.
But that code is guarded by what is in torch's table, and is compiled again for every other state of
it. In a process that uses torch.compile a module dispatcher is therefore in the table from the
first subscription to the last, asleep or not. While it is there, torch's warning of a compiled
module beside a global hook is left out: where warnings are errors, it would end a training.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ampscope.capture.tensors import is_traced

Hear = Callable[..., None]
_CALL = nn.Module._call_impl.__code__  # where torch walks the modules' hooks
_STEP = Optimizer.profile_hook_step(len).__code__  # around every optimizer's step, with its hooks

_HOOK_WARNING: Any = (
    "ignore",
    re.compile(r"Using `torch\.compile\(module\)` when there are global hooks"),
    UserWarning,
    None,
    0,
)

_lock = threading.RLock()  # a subscriber may be removed by a finalizer, in the midst of a change


class Subscription:
    """One subscriber of a dispatcher."""

    __slots__ = ("_dispatcher", "hear", "is_awake")

    def __init__(self, dispatcher: Dispatcher, hear: Hear, is_awake: bool) -> None:
        self._dispatcher = dispatcher
        self.hear = hear
        self.is_awake = is_awake

    def wake(self, awake: bool) -> None:
        """Whether it hears; one that sleeps costs a call nothing and keeps its place."""
        if awake is not self.is_awake:
            self.is_awake = awake
            self._dispatcher.renew()

    def remove(self) -> None:
        """Unsubscribe: the listener is not called any more. A second call does nothing."""
        self._dispatcher.drop(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


class Dispatcher:
    """What torch calls; hands the call on to the subscribers of the moment."""

    def __init__(self, register: Callable[[Hear], RemovableHandle], *, stays: bool) -> None:
        self.subscribers: tuple[Subscription, ...] = ()  # those awake
        self._all: tuple[Subscription, ...] = ()
        self._register = register
        self._stays = stays
        self._handle: RemovableHandle | None = None

    def is_registered_as(self, key: int) -> bool:
        """Whether torch's table has it, or should, under ``key``."""
        return self._handle is not None and self._handle.id == key

    @property
    def is_in_table(self) -> bool:
        """Whether torch calls it."""
        return self._handle is not None

    def subscribe(self, hear: Hear, *, awake: bool = True) -> Subscription:
        """``hear`` is called with what torch passes to such a hook. What it raises goes to the
        training once all have heard."""
        one = Subscription(self, hear, awake)
        with _lock:
            self._all = (*self._all, one)
            self.renew()
        return one

    def renew(self) -> None:
        """One came, left, fell asleep or woke."""
        with _lock:
            self.subscribers = tuple(one for one in self._all if one.is_awake)
            if self.subscribers or (self._all and _compiles()):
                if self._handle is None:
                    self._handle = self._register(self)
                    if not self._stays:
                        _expect_no_warning()
            elif self._handle is not None and not self._stays and not _runs(_CALL):
                handle, self._handle = self._handle, None
                handle.remove()
                if not any(other.is_in_table for other in (FORWARD_PRE, FORWARD, FORWARD_ALWAYS)):
                    _expect_warnings()

    def drop(self, one: Subscription) -> None:
        """Without ``one`` from the next call on."""
        with _lock:
            self._all = tuple(kept for kept in self._all if kept is not one)
            self.renew()

    def __call__(self, *facts: Any) -> None:
        # First, so that torch.compile traces a hook that does nothing, and no graph is broken.
        if is_traced():
            return
        raised: Exception | None = None
        for one in self.subscribers:
            try:
                one.hear(*facts)
            except Exception as error:  # an alarm that is meant: the others hear of the step too
                raised = error
        if raised is not None:
            raise raised


def a_step_runs() -> bool:
    """Whether any thread is inside an optimizer's step."""
    return _runs(_STEP)


def steps_that_run() -> int:
    """How many optimizers' steps this thread is inside of."""
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        count += frame.f_code is _STEP
        frame = frame.f_back
    return count


def _runs(code: CodeType) -> bool:
    """Whether any thread is inside a call of this code."""
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_code is code:
                return True
            frame = frame.f_back
    return False


def _compiles() -> bool:
    """Whether anything in this process was given to torch.compile so far."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    backends = getattr(frames, "cached_backends", None)  # None for what compilation leaves out
    return backends is None or any(one is not None for one in list(backends.values()))


@contextlib.contextmanager
def no_own_module_hooks() -> Iterator[None]:
    """ampscope's global module hooks are out of torch's tables inside: a strict export traces what
    it finds there, and gives up. A script's own hooks stay."""
    taken: list[tuple[OrderedDict[int, Hear], int, Dispatcher]] = []
    try:
        with _lock:
            for name in ("_global_forward_pre_hooks", "_global_forward_hooks"):
                table: OrderedDict[int, Hear] = getattr(torch.nn.modules.module, name)
                for key, hook in list(table.items()):
                    if isinstance(hook, Dispatcher):
                        taken.append((table, key, hook))
                        del table[key]
        yield
    finally:
        with _lock:
            for table, key, own in reversed(taken):
                if own.is_registered_as(key):  # else it was removed meanwhile
                    table[key] = own
                    table.move_to_end(key, last=False)


def _expect_no_warning() -> None:
    # Not by warnings.filterwarnings, which makes Python forget what it has warned of once.
    filters: Any = warnings.filters
    if _HOOK_WARNING not in filters:
        filters.insert(0, _HOOK_WARNING)


def _expect_warnings() -> None:
    filters: Any = warnings.filters
    if _HOOK_WARNING in filters:
        filters.remove(_HOOK_WARNING)


REGISTERED = Dispatcher(register_module_module_registration_hook, stays=False)  # in a parent
PARAMETERS = Dispatcher(register_module_parameter_registration_hook, stays=False)
BUFFERS = Dispatcher(register_module_buffer_registration_hook, stays=False)
FORWARD_PRE = Dispatcher(register_module_forward_pre_hook, stays=False)
FORWARD = Dispatcher(register_module_forward_hook, stays=False)
_register_leaving = partial(register_module_forward_hook, always_call=True)
FORWARD_ALWAYS = Dispatcher(_register_leaving, stays=False)  # also when the module raised
OPTIMIZER_PRE = Dispatcher(register_optimizer_step_pre_hook, stays=True)
OPTIMIZER_POST = Dispatcher(register_optimizer_step_post_hook, stays=True)
