"""One probe at a time per device: a lock file per device and the store's queue for the order.

The lock is ``flock`` on a file in the temporary folder: the kernel releases it when the holder
dies, however it dies. Waiting runs take turns in the order of their creation.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ampscope.privacy import private_folder

POLL_S = 0.1


def lock_path(device: str) -> Path:
    """Lock file of a device, shared by all of this user's stores."""
    return private_folder() / f"{device.replace(':', '-')}.lock"


@contextlib.contextmanager
def device_turn(device: str, is_next: Callable[[], bool]) -> Iterator[None]:
    """Hold the device. Waits until ``is_next()`` is true and the lock is free; ``is_next`` may
    raise to leave the queue."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    handle = os.open(lock_path(device), flags, 0o600)
    try:
        while not (is_next() and _try_lock(handle)):
            time.sleep(POLL_S)
        yield
    finally:
        os.close(handle)  # releases the lock


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
