"""How a script's run ended, in one sentence, and whether that leaves anything to judge; what Python
does between a script's last line and its end; how the script's own exception is shown.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import ampscope
from ampscope.frameworks.pythons import FRAMEWORKS, TORCH
from ampscope.observations import Outcome
from ampscope.records import RunSpec, State
from ampscope.source_lines import SourceLines, line_name

MAX_TEXT = 200
# torch/cuda/__init__.py (_lazy_init), c10/cuda/CUDAFunctions.cpp, torch/serialization.py.
_NO_CUDA = (
    "Torch not compiled with CUDA enabled",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "torch.cuda.is_available() is False",
    "PyTorch is not linked with support for cuda devices",
)


def ending(outcome: Outcome, spec: RunSpec, processes: int = 0) -> tuple[State, str]:
    """(state, sentence) of a run that ended by itself; "" where there is nothing to add.

    ``processes``: how many others it started. FAILED means that there is nothing to judge, whatever
    the run has recorded.
    """
    when = _when(outcome)
    if outcome.ended == "exception":
        return _raised(outcome, spec, when)
    if outcome.ended == "cancelled":
        return State.CANCELLED, f"Cancelled {when}."
    if outcome.attempts or outcome.ended == "steps":
        return State.FINISHED, ""
    if outcome.ended == "time":
        return State.FINISHED, "The script made no optimizer step within the time limit."
    if processes:
        return State.FAILED, (
            "The script made no optimizer step in its own process, but it started "
            f"{processes} other{'s' if processes > 1 else ''}: training in a child process is not "
            "watched. Let the script train in its main process."
        )
    if outcome.ended == "exit":
        return State.FINISHED, f"The script ended with exit status {outcome.exit_code} {when}."
    if outcome.backwards:
        return State.FINISHED, (
            "The script called backward but never an optimizer's step: a training that changes its "
            "weights by hand cannot be followed."
        )
    return State.FINISHED, "The script ended without calling backward: there is no training in it."


def passed_limit(limit_s: float, attempts: int) -> str:
    """The sentence for a script that was ended because it did not get on."""
    done = f"{attempts} optimizer step{'s' if attempts > 1 else ''}" if attempts else "no step"
    return (
        f"The script was stopped: it passed the time limit of {limit_s:g} s after {done} and did "
        "not come to a next one. It hangs, or needs a higher --time-limit."
    )


def _raised(outcome: Outcome, spec: RunSpec, when: str) -> tuple[State, str]:
    lines = outcome.error_text.strip().splitlines()
    text = lines[0][:MAX_TEXT] if lines else ""
    at = f" at {outcome.error_line}" if outcome.error_line else ""
    kind = outcome.error_type
    if kind == "KeyboardInterrupt":
        return State.CANCELLED, f"The script was interrupted{at} {when}."
    if outcome.is_out_of_memory:
        limit = f" (limit {spec.memory_limit_mib} MiB)" if spec.memory_limit_mib else ""
        higher = ", or a higher --memory-limit" if spec.memory_limit_mib else ""
        return State.FAILED, (
            f"The script ran out of memory{at} {when}{limit}. Use a smaller model or batch{higher}."
        )
    if any(s in outcome.error_text for s in _NO_CUDA):
        return State.FAILED, (
            f"The script asks for a CUDA device{at}, and this machine has none: let it choose "
            'with device = "cuda" if torch.cuda.is_available() else "cpu", then --policy cuda '
            "rehearses CUDA's rules on the CPU."
        )
    if kind == "EOFError" and "EOF when reading a line" in outcome.error_text:
        return State.FAILED, (
            f"The script asks for input{at} {when}, and it gets none here: give it as an argument."
        )
    if kind == "ModuleNotFoundError" and not outcome.attempts:
        lacks = f"the Python at {sys.executable} lacks"
        words = f"The script needs a package{at} that {lacks}: {text}."
        return State.FAILED, f"{words} {_other_framework(text, spec)}".strip()
    return State.FINISHED, f"The script raised {kind}{at} {when}: {text}"


def _other_framework(text: str, spec: RunSpec) -> str:
    """What to do about a script that was taken for PyTorch's and is another framework's."""
    missing = re.search(r"No module named '(\w+)", text)
    if missing is None or spec.framework != TORCH:
        return ""
    for framework in FRAMEWORKS.values():
        if missing[1] in framework.modules:
            return (
                f"It was taken for a script of PyTorch: if it trains with {framework.title}, say "
                f"--framework {framework.name}."
            )
    return ""


def _when(outcome: Outcome) -> str:
    if not outcome.attempts:
        return "before its first optimizer step"
    return f"after {outcome.attempts} optimizer step{'s' if outcome.attempts > 1 else ''}"


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
