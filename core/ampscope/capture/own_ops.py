"""What ampscope computes is none of the script's ops: no mode of the script's sees it.

A script may train below a mode of its own: a TorchDispatchMode or TorchFunctionMode that counts
ops, draws noise or rounds results, a `torch.device` context, a tracer. An op of an instrument that
such a mode saw would change its counts and its random state, and with them the training::

    with own_ops():             # the script's modes and the functions of its tensor classes are off
        total = values.sum()
        with script_ops():      # the script's own code again, with all that it had entered
            on_alarm(event)

Whatever torch or the script calls of ours enters it once, at the door: hooks of modules and
optimizers (:mod:`ampscope.capture.global_hooks`), everything that is contained
(:mod:`ampscope.capture.failures`), a watch's guard. Inside another it costs 0.6 us, else 2.2 us.

A tensor that is made of others (a wrapper subclass) has no ops inside: it is opened first, see
:mod:`ampscope.capture.tensors`.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch

_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_EARLY = torch._C.DispatchKey.PreDispatch  # of make_fx and torch.export, above autograd
_TRACERS = torch._C.DispatchKeySet(_EARLY)


class _Here(threading.local):
    """This thread's: how many are open inside each other, and what is switched off for them."""

    depth = 0
    dispatch: Any = None
    tracers: Any = None

    def __init__(self) -> None:
        self.functions = torch._C.DisableTorchFunction()

    def switch_off(self) -> None:
        """Modes and the functions of tensor classes are asked nothing from here on."""
        self.functions.__enter__()
        self.dispatch = no_dispatch()  # takes effect as it is made
        if _is_included(_EARLY):
            self.tracers = torch._C._ExcludeDispatchKeyGuard(_TRACERS)

    def switch_on(self) -> None:
        """As before."""
        if self.tracers is not None:
            self.tracers.__exit__(None, None, None)
            self.tracers = None
        self.dispatch.__exit__(None, None, None)
        self.functions.__exit__(None, None, None)


_here = _Here()


class _OwnOps:
    """One for all: what it holds is the thread's."""

    __slots__ = ()

    def __enter__(self) -> bool:
        """Whether it is the outermost."""
        here = _here
        depth = here.depth
        here.depth = depth + 1
        if not depth:
            try:
                here.switch_off()
            except BaseException:  # a signal's handler may raise anywhere
                here.depth = depth
                raise
        return not depth

    def __exit__(self, *error: object) -> None:
        here = _here
        depth = here.depth = here.depth - 1
        if not depth:
            here.switch_on()


_OWN_OPS = _OwnOps()
_NOTHING: contextlib.nullcontext[None] = contextlib.nullcontext()


def own_ops() -> _OwnOps | contextlib.nullcontext[None]:
    """Around what an instrument computes; may be entered inside another. Nothing is computed where
    torch.compile reads the instrument's code as a part of the script's, which it may break at no
    place: it knows how to enter a context that does nothing."""
    return _NOTHING if torch.compiler.is_compiling() else _OWN_OPS


def is_own() -> bool:
    """Whether an instrument computes what runs now."""
    return _here.depth > 0


class script_ops:  # noqa: N801  # as contextlib's; a generator would take 2 us more
    """Around code of the script's that an instrument calls: with the modes that the script has."""

    __slots__ = ("_depth",)

    def __enter__(self) -> None:
        self._depth, _here.depth = _here.depth, 0
        if self._depth:
            _here.switch_on()

    def __exit__(self, *error: object) -> None:
        if self._depth:
            _here.switch_off()
        _here.depth = self._depth
