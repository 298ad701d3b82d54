"""Files of /proc and /sys that are read again and again: opened once, read from their beginning."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 4096  # more than any of them but /proc/stat and /proc/cpuinfo on a large machine


class KernelFile:
    """One file. A file that is absent or gives an error reads as empty."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def read(self) -> bytes:
        """Its beginning as it is now."""
        if self._descriptor < 0:
            return b""
        try:
            return os.pread(self._descriptor, self._max_bytes, 0)
        except OSError:  # a process that has ended, a sensor that is asleep
            return b""

    def number(self) -> int | None:
        """The whole number that it consists of; None where it is none."""
        try:
            return int(self.read())
        except ValueError:
            return None

    def field(self, name: bytes) -> int | None:
        """The number behind ``name`` at the beginning of a line (``MemTotal:  24684096 kB``)."""
        text = self.read()
        place = 0 if text.startswith(name) else text.find(b"\n" + name) + 1
        if not text.startswith(name, place):
            return None
        words = text[place + len(name) : text.find(b"\n", place) % (len(text) + 1)].split()
        return int(words[0]) if words and words[0].isdigit() else None

    def close(self) -> None:
        """Again does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
