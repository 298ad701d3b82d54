"""Buffers in half precision: tables that a model computed once and keeps."""

from __future__ import annotations

from ampscope.analysis.run_view import RunView


def owner_of_only_table(run: RunView) -> str:
    """Path of the module that owns the half buffers of the model, when it is a single one; else "".

    A table is mostly built in a constructor, where no module runs that could be named.
    """
    names = {
        scan.name.rpartition(".")[0]
        for scan in run.scans
        if scan.moment == "start" and scan.kind == "buffer" and scan.dtype in ("fp16", "bf16")
    }
    return names.pop() if len(names) == 1 else ""
