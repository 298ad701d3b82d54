"""Where a script's run is ended, what Python does between its last line and its end, how its own
exception is shown and kept (as Python would, without ampscope's frames), whatever it trains with.
Imports no framework.

How the run ended, in a sentence, is in :mod:`ampscope.script_ends`.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ampscope
from ampscope.records import RunSpec
from ampscope.source_lines import SourceLines, line_name, line_text

HANG_FACTOR, HANG_GRACE_S = 1.5, 5.0  # the time limit counts at optimizer steps; this one always


class Enough(SystemExit):
    """Ends the script at a limit. ``except Exception`` lets it by, and a thread ends without a
    word, as it does on ``sys.exit``."""


def limit_reached(
    spec: RunSpec, steps: int, elapsed_s: float, is_cancelled: Callable[[], bool]
) -> str:
    """Why the run ends after this optimizer step: steps, time or cancelled; "" when it goes on."""
    if steps >= spec.steps and elapsed_s >= spec.grace_s:
        return "steps"
    if elapsed_s > spec.time_limit_s:
        return "time"
    return "cancelled" if is_cancelled() else ""


def hard_limit_s(spec: RunSpec) -> float:
    """After so long a run of ``spec`` is ended, whatever it does."""
    waits = 2 if spec.skip_to else 1  # one limit for the steps that pass unrecorded
    return waits * spec.time_limit_s * HANG_FACTOR + HANG_GRACE_S


def end_python(*, joins_threads: bool = True) -> None:
    """Wait for threads, call what was registered with ``atexit``, write what is left of the
    output."""
    if joins_threads:
        with contextlib.suppress(Exception):
            threading._shutdown()  # type: ignore[attr-defined]  # there is no public name for it
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def end_python_within(
    limit_s: float, too_long: Callable[[], None], *, joins_threads: bool = True
) -> None:
    """End Python as :func:`end_python` does. ``too_long`` is called in another thread after
    ``limit_s`` seconds and ends the process."""
    waiting = threading.Timer(limit_s, too_long)
    waiting.daemon = True
    waiting.start()
    end_python(joins_threads=joins_threads)
    waiting.cancel()


_OWN_FOLDERS = (  # as it lies, and as it was imported: for other frameworks through a link
    str(Path(ampscope.__file__).resolve().parent),
    str(Path(ampscope.__file__).parent),
)
# What no op raises: with these, an innermost frame of ampscope's own means its own fault.
_BUGS = (AttributeError, NameError, AssertionError, KeyError)
_RUNPY = "<frozen runpy>"
MAX_ERROR_TEXT = 2_000


@dataclass(frozen=True, slots=True)
class Raised:
    """The script's own exception: ``facts`` are fields of its :class:`Outcome`."""

    error: BaseException  # without frames of ampscope
    text: str  # the traceback
    function: str  # in which the user's innermost line stands
    facts: dict[str, Any]


def raised(error: BaseException, lines: SourceLines) -> Raised:
    """What is kept of the exception that ended the script."""
    error = clean(error, lines)
    place, function = place_of(error, lines)
    facts = {
        "exit_code": 1,
        "error_type": type(error).__name__,
        "error_text": _words(error, place)[:MAX_ERROR_TEXT],
        "error_line": line_name(place),
    }
    return Raised(error, text_of(error), function, facts)


def _words(error: BaseException, place: tuple[str, int]) -> str:
    """What the error says; of an import that failed inside, also what was imported; of an assertion
    that says nothing itself, its line."""
    text = str(error)
    if not text and isinstance(error, AssertionError):
        return line_text(place)
    name = getattr(error, "name", None) if type(error) is ImportError else None
    return text if not name or name in text else f"import of {name}: {text}"


def left_because_of(leaving: SystemExit, lines: SourceLines) -> Raised | None:
    """The error that the script was handling when it left with a status other than 0, as Hydra does
    with every error; None where there was none. It says nothing of the status."""
    error = leaving.__context__
    if leaving.code in (None, 0) or not isinstance(error, Exception):
        return None
    found = raised(error, lines)
    del found.facts["exit_code"]
    return found


def spawned_error(leaving: SystemExit) -> Exception | None:
    """The error of a process of ``torch.multiprocessing.spawn``, which hands it to the process that
    started it, and exits; None where the script left by itself."""
    last = _innermost(leaving)
    where = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    error = leaving.__context__ if where == "torch.multiprocessing.spawn" else None
    return error if isinstance(error, Exception) else None


def clean(error: BaseException, lines: SourceLines) -> BaseException:
    """``error`` and the errors that led to it, with tracebacks that hold no frame of ampscope."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _without_own(link.__traceback__, lines)
        link = link.__cause__ or link.__context__
    return error


def own_fault(error: BaseException, lines: SourceLines) -> str:
    """Where in ampscope ``error`` was made, "call_log.py:12"; "" when the script made it."""
    last = _innermost(error)
    if last is None or not isinstance(error, _BUGS) or not _is_own(last, lines):
        return ""
    return line_name((last.tb_frame.f_code.co_filename, last.tb_lineno))


def report(error: BaseException) -> None:
    """Tell the script's ``sys.excepthook`` (Python's own prints to standard error)."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as second:
        with contextlib.suppress(Exception):
            sys.__excepthook__(type(second), second, second.__traceback__)
            sys.__excepthook__(type(error), error, error.__traceback__)


def text_of(error: BaseException) -> str:
    """The traceback as text."""
    return "".join(traceback.format_exception(error))


def place_of(error: BaseException, lines: SourceLines) -> tuple[tuple[str, int], str]:
    """The user's innermost line in the traceback, and its function's name."""
    found: tuple[tuple[str, int], str] = (("", 0), "")
    for frame, number in traceback.walk_tb(error.__traceback__):
        if lines.is_user(frame.f_code):
            found = ((frame.f_code.co_filename, number), frame.f_code.co_name)
    return found


def exit_code(leaving: SystemExit) -> int:
    """The status that Python gives to ``sys.exit(…)``; a text goes to standard error and is 1."""
    if leaving.code is None or isinstance(leaving.code, int):
        return int(leaving.code or 0)
    with contextlib.suppress(Exception):
        print(leaving.code, file=sys.stderr)
    return 1


def _without_own(link: TracebackType | None, lines: SourceLines) -> TracebackType | None:
    kept: list[TracebackType] = []
    while link is not None:
        if not _is_own(link, lines) and link.tb_frame.f_code.co_filename != _RUNPY:
            kept.append(link)
        link = link.tb_next
    chain: TracebackType | None = None
    for part in reversed(kept):
        chain = TracebackType(chain, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return chain


def _innermost(error: BaseException) -> TracebackType | None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last


def _is_own(link: TracebackType, lines: SourceLines) -> bool:
    code = link.tb_frame.f_code
    return code.co_filename.startswith(_OWN_FOLDERS) and not lines.is_user(code)
