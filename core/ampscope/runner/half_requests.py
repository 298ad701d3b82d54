"""What a script does where it would use half precision, seen where nothing comes of it.

A script on a machine without CUDA is often an fp32 run in disguise: it asks whether there is a
device and goes another way, enters a ``nullcontext`` in autocast's place, or hands ``fp16=True`` to
a trainer that leaves it undone on a CPU. Each is noted once, with its line.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ampscope.observations import OpUse
from ampscope.patches import Patches
from ampscope.runner.device import has_cuda
from ampscope.source_lines import SourceLines, line_name

# Of torch.cuda; they answer where there is no device.
_ASKING = ("is_available", "device_count", "is_bf16_supported")


class HalfRequests:
    """Collects :class:`OpUse` records of the kinds cuda_missing, cuda_asked, nullcontext and
    trainer_fp16."""

    def __init__(self, lines: SourceLines) -> None:
        self._lines = lines
        self._found: dict[tuple[str, str, str], OpUse] = {}
        # A CUDA device is stood in for: who asks decides about the answer, so nothing stands
        # between (:func:`ampscope.ext.rehearsal.current_device.asked_by_torch`).
        self.finds_cuda = False

    def records(self) -> list[OpUse]:
        """All facts so far, in the order of their first sight."""
        asked = _trainers_precision()
        trainer = [OpUse("trainer_fp16", asked, "", "", 0)] if asked else []
        return [*self._found.values(), *trainer]

    def add(self, fact: str, what: str, line: str) -> None:
        """Note a request; again at the same line it is passed over."""
        self._found.setdefault((fact, what, line), OpUse(fact, what, "", line, 0))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note the script's own calls; with a CUDA device there is nothing to explain."""
        if has_cuda():
            yield
            return
        with Patches() as patches:
            for name in () if self.finds_cuda else _ASKING:
                patches.wrap(torch.cuda, name, partial(self._noted, "cuda_asked", name))
            enters = partial(self._noted, "nullcontext", "with")
            patches.wrap(contextlib.nullcontext, "__enter__", enters)
            yield

    def _noted(self, fact: str, what: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(2)  # of the wrapper
        if self._lines.is_user(caller.f_code):  # libraries ask and enter all the time
            self.add(fact, what, line_name((caller.f_code.co_filename, caller.f_lineno)))
        return original(*args, **kwargs)


def _trainers_precision() -> str:
    """ "fp16" where Accelerate (so Transformers' Trainer) was asked for it on a CPU, for
    which it has no fp16; else ""."""
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "AcceleratorState", None), "_shared_state", None) or {}
    device = getattr(shared.get("device"), "type", "")
    precision = str(shared.get("_mixed_precision", ""))
    return precision if precision == "fp16" and device == "cpu" else ""
