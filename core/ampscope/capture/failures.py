"""An instrument that fails says so; the training that it looks at goes on.

    failures = Failures()
    with failures.contained("the weights' histograms"):
        counts.add(...)                  # whatever this raises ends here
    failures.note                        # "Not recorded in full: the weights' histograms (…)."

The training's own errors must never pass through here: only what ampscope itself computes is run
inside, and no mode of the script's sees it (:mod:`ampscope.capture.own_ops`). A failure that is an
answer to the user (:class:`AmpscopeError`, an interrupt) goes on.

The time that instruments take is none of the training's either: :class:`OwnTime` keeps it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ampscope.capture.own_ops import own_ops, script_ops
from ampscope.errors import AmpscopeError
from ampscope.patches import Patches

if TYPE_CHECKING:
    import torch

_LONGEST = 120  # characters of an error's own words


class Failures:
    """What could not be recorded: the first failure of each kind."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def add(self, what: str, error: Exception) -> None:
        """``what`` could not be recorded because of ``error``."""
        if what not in self._first:
            self._first[what] = in_words(error)

    def contained(self, what: str) -> _Contained:
        """The body's failure is noted as that of ``what``."""
        return _Contained(self, what)

    def noted(self, what: str) -> _Noted:
        """As :meth:`contained` inside the handler of a dispatch mode, where all modes above are off
        and an op of a wrapper subclass has to be asked for by its class."""
        return _Noted(self, what)

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function`` returns; None where it fails, which is noted as that of ``what``."""
        with self.contained(what):
            return function(*args, **kwargs)
        return None

    def hook(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as torch may call it beside the training's own code."""
        return functools.partial(self.call, what, function)

    @property
    def note(self) -> str:
        """One sentence, or nothing."""
        if not self._first:
            return ""
        listed = "; ".join(f"{what} ({why})" for what, why in self._first.items())
        return f"Not recorded in full: {listed}. The training itself is not affected."


def in_words(error: Exception) -> str:
    """The kind of error and the first line of its text, cut to a length that a note may have."""
    words = str(error).split("\n", 1)[0][:_LONGEST]
    return f"{type(error).__name__}: {words}" if words else repr(error)


class _Noted:
    """A class and no generator, which would take 1.5 us more: ops enter it twice each."""

    __slots__ = ("_failures", "_what")

    def __init__(self, failures: Failures, what: str) -> None:
        self._failures = failures
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        if not isinstance(error, Exception) or isinstance(error, AmpscopeError):
            return False
        self._failures.add(self._what, error)
        return True


class _Contained(_Noted):
    """And no mode of the script's sees what is computed inside."""

    __slots__ = ()

    def __enter__(self) -> None:
        own_ops().__enter__()

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        own_ops().__exit__()
        return super().__exit__(kind, error, at)


class ContainedPatches(Patches):
    """Wrappers that only look: what one raises by itself is noted as that of ``what``, and the call
    that it is around goes on. What the original raises goes on as well."""

    def __init__(self, failures: Failures, what: str) -> None:
        super().__init__()
        self._failures = failures
        self._what = what

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        super().wrap(owner, name, functools.partial(self._contained, call))

    def _contained(
        self, call: Callable[..., Any], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        inner = _Original(original)
        try:
            with own_ops() as inner.is_scripts:
                return call(inner, *args, **kwargs)
        except Exception as error:
            # An error that a frame of its own traceback held would stay, with all that it holds.
            raised, inner.raised = inner.raised, None
            if error is raised or isinstance(error, AmpscopeError):
                del raised
                raise
            self._failures.add(self._what, error)
        if raised is not None:
            try:
                raise raised
            finally:
                del raised
        return inner.result if inner.has_returned else original(*args, **kwargs)


class _Original:
    """A function that remembers how its call ended. Called by the script, it runs as the script's
    own."""

    __slots__ = ("_function", "has_returned", "is_scripts", "raised", "result")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.has_returned = False
        self.is_scripts: bool | None = False
        self.raised: Exception | None = None
        self.result: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self.is_scripts:
                with script_ops():
                    self.result = self._function(*args, **kwargs)
            else:
                self.result = self._function(*args, **kwargs)
        except Exception as error:
            self.raised = error
            raise
        self.has_returned = True
        return self.result


class _Waits(threading.local):
    seconds = 0.0


_WAITS = _Waits()


def wait_for(event: torch.cuda.Event) -> None:
    """Until the device has come to ``event``. Meanwhile it computes the training's own step, and
    :func:`working_s` stands still."""
    started = time.perf_counter()
    event.synchronize()
    _WAITS.seconds += time.perf_counter() - started


def working_s() -> float:
    """Seconds on a clock of this thread without its waits for a device; two times are compared."""
    return time.perf_counter() - _WAITS.seconds


class OwnTime:
    """Seconds that instruments have spent; what fails meanwhile is noted in ``failures``, without
    which it is raised. A span inside another is counted once."""

    def __init__(self, failures: Failures | None = None) -> None:
        self.elapsed_s = 0.0
        self.failures = failures
        self._depth = 0

    def spent(self, what: str) -> AbstractContextManager[None]:
        """Around what the instrument does; ``what`` says what would be missing."""
        return _Span(self) if self.failures is None else self._contained(self.failures, what)

    @contextlib.contextmanager
    def _contained(self, failures: Failures, what: str) -> Iterator[None]:
        with _Span(self), failures.contained(what):
            yield

    def begin(self) -> None:
        """A span of the instrument's own work begins; spans may nest."""
        self._depth += 1

    def end(self, seconds: float) -> None:
        """A span ends that took ``seconds``; only the outermost counts."""
        self._depth -= 1
        if self._depth == 0:
            self.elapsed_s += seconds

    def take(self) -> float:
        """Since the last call."""
        elapsed_s, self.elapsed_s = self.elapsed_s, 0.0
        return elapsed_s


class _Span:
    """Without a generator: a watch opens two at each step."""

    __slots__ = ("_owner", "_started")

    def __init__(self, owner: OwnTime) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._owner.begin()

    def __exit__(self, *error: object) -> None:
        self._owner.end(time.perf_counter() - self._started)
