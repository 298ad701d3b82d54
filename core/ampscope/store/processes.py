"""Is the process that writes a run still there? A pid can be reused, so its start time counts.

On Linux the start time is field 22 of /proc/PID/stat, in clock ticks since boot (proc(5)). Where
there is no /proc, only the pid's existence is checked and the heartbeat decides the rest.
"""

from __future__ import annotations

import os
import pwd
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


def whose(pid: int | None) -> str:
    """Whose process ``pid`` is, for a person: ``process 4711 of me, started by process 4700`` or
    ``process 4711 of me; the command that started it has ended``. "" where it is not here."""
    if pid is None:
        return ""
    try:
        user_id = Path(f"/proc/{pid}").stat().st_uid
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    try:
        user = pwd.getpwuid(user_id).pw_name
    except KeyError:  # a container's user may have no name
        user = f"user {user_id}"
    parent = int(stat.rpartition(")")[2].split()[1])
    if is_init(parent):
        return f"process {pid} of {user}; the command that started it has ended"
    return f"process {pid} of {user}, started by process {parent}"


def is_init(pid: int) -> bool:
    """Whether ``pid`` is what adopts processes whose parent has ended: the first process, or a
    user's service manager (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    if pid <= 1:
        return True
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in ("systemd", "init", "tini")
    except OSError:
        return False
