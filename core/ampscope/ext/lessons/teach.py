"""What a child process does for a lesson: find its module, hand over the settings, write results.

A lesson's module has one function ``measure(asked, device)`` that yields results in the order in
which they are found. On a CPU it runs by CUDA's rules where the spec asks for that.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from ampscope.errors import Cancelled
from ampscope.ext.lessons.catalog import checked_lesson
from ampscope.records import RunSpec
from ampscope.runner.device import choose_policy
from ampscope.runner.probe import arithmetic
from ampscope.store.writer import RunWriter


def measure(
    spec: RunSpec, device: torch.device, writer: RunWriter, is_cancelled: Callable[[], bool]
) -> str:
    """Measure and write. Raises Cancelled between two results."""
    checked_lesson(spec)
    module = importlib.import_module(f"ampscope.ext.lessons.{spec.workload}")
    torch.manual_seed(spec.seed)
    with arithmetic(choose_policy(spec.policy, device)):
        for number, result in enumerate(module.measure(dict(spec.settings), device)):
            if is_cancelled():
                raise Cancelled(f"Cancelled after {number} results.")
            writer.add_result(result)
            writer.flush_if_due()
    writer.flush()
    return ""
