"""A workload as it was typed, made independent of the folder in which it was typed."""

from __future__ import annotations

from pathlib import Path

from ampscope.workloads.catalog import BUILTIN


def absolute(workload: str) -> str:
    """A user's file is found again whatever the child's working directory is."""
    path, colon, function = workload.partition(":")
    if workload in BUILTIN or not path.endswith(".py"):
        return workload
    return f"{Path(path).expanduser().absolute()}{colon}{function}"
