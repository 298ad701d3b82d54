"""What Python does between a script's last line and its end. Imports no framework."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from collections.abc import Callable


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
