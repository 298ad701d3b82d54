"""What Python does between a script's last line and its end; how the script's own exception is
shown and kept. How the run ended, in a sentence, is in :mod:`ampscope.script_ends`.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import ampscope
from ampscope.source_lines import SourceLines, line_name

# What Python does between a script's last line and its end. Imports no framework.


def end_python() -> None:
    """Wait for threads, call what was registered with ``atexit``, write what is left of the
    output."""
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # there is no public name for it
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def end_python_within(limit_s: float, too_long: Callable[[], None]) -> None:
    """The same; ``too_long``, called in another thread after ``limit_s``, ends the process."""
    waiting = threading.Timer(limit_s, too_long)
    waiting.daemon = True
    waiting.start()
    end_python()
    waiting.cancel()


# How a script's own exception is shown and kept: as Python would, without ampscope's frames.


_OWN_FOLDERS = (  # as it lies, and as it was imported: for other frameworks through a link
    str(Path(ampscope.__file__).resolve().parent),
    str(Path(ampscope.__file__).parent),
)
# What no op raises: with these, an innermost frame of ampscope's own means its own fault.
_BUGS = (AttributeError, NameError, AssertionError, KeyError)
_RUNPY = "<frozen runpy>"


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
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
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


def _without_own(found: TracebackType | None, lines: SourceLines) -> TracebackType | None:
    kept: list[TracebackType] = []
    link = found
    while link is not None:
        if not _is_own(link, lines) and link.tb_frame.f_code.co_filename != _RUNPY:
            kept.append(link)
        link = link.tb_next
    chain: TracebackType | None = None
    for part in reversed(kept):
        chain = TracebackType(chain, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return chain


def _is_own(link: TracebackType, lines: SourceLines) -> bool:
    code = link.tb_frame.f_code
    return code.co_filename.startswith(_OWN_FOLDERS) and not lines.is_user(code)
