"""Which measurement a run asks for. Each is imported when it is asked for: a child does one."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from ampscope.records import RunSpec
from ampscope.store.writer import RunWriter

# kind of run -> module with a function `measure(spec, device, writer, is_cancelled) -> note`
_MODULES = {
    "bench": "ampscope.measure.bench",
    "cores": "ampscope.measure.cores",
    "compare": "ampscope.measure.comparison",
    "batch": "ampscope.measure.batch_search",
    "lesson": "ampscope.lessons.teach",
}


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Do it; one sentence on what could not be measured, or nothing. Raises Cancelled."""
    module = importlib.import_module(_MODULES[spec.kind])
    note: str = module.measure(spec, device, writer, is_cancelled)
    return note
