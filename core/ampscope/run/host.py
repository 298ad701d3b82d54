"""The machine around a run, the same for every framework; needs nothing but Python."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostFacts:
    """As ``Machine`` records them."""

    cpu: str  # "Intel(R) Xeon(R) Processor, 2 cores": those that this process may use
    python: str
    platform: str
    host: str


def host_facts() -> HostFacts:
    """Of the machine and Python at hand."""
    return HostFacts(
        cpu=f"{_processor()}, {_cores()} cores",
        python=platform.python_version(),
        platform=platform.platform(),
        host=socket.gethostname(),
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
