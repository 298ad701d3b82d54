"""Is the process that writes a run still there? A pid can be reused, so its start time counts.

On Linux the start time is field 22 of /proc/PID/stat, in clock ticks since boot (proc(5)). Where
there is no /proc, only the pid's existence is checked and the heartbeat decides the rest.
"""

from __future__ import annotations

import os
from pathlib import Path

HEARTBEAT_EVERY_S = 1.0
HEARTBEAT_STALE_S = 30.0  # thirty missed beats: suspended, on another machine, or gone


def process_start_time(pid: int) -> float | None:
    """Clock ticks since boot at which ``pid`` started; None when unknown or gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()  # the name may hold spaces and brackets
    if after_name[0] == "Z":  # a zombie writes nothing any more
        return None
    return float(after_name[19])


def is_alive(pid: int | None, started: float | None) -> bool:
    """Whether ``pid`` exists and is the process that started at ``started``."""
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    now = process_start_time(pid)
    if not Path("/proc/self/stat").exists():
        return True
    return now is not None and (started is None or now == started)
