"""Which line of the script last wrote a tensor, while that matters: between backward and step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampscope.capture.script.op_call import OpCall
from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.capture.tensors import has_own_memory


class WriteLines:
    """Keeps a line by storage address, for the ops noted since :meth:`start`."""

    def __init__(self, lines: SourceLines) -> None:
        self.active = False
        self._lines = lines
        self._written: dict[int, str] = {}

    def start(self) -> None:
        """Begin anew."""
        self._written.clear()
        self.active = True

    def stop(self) -> None:
        """Note no more; what was noted stays until the next start."""
        self.active = False

    def note(self, call: OpCall, outputs: list[Tensor]) -> None:
        """An op has just run. An in-place op on a list of tensors returns nothing."""
        in_place = call.name.endswith("_") and not outputs
        line = line_name(self._lines.where())
        for tensor in call.tensors if in_place else outputs:
            if tensor.layout is torch.strided and has_own_memory(tensor):
                self._written[tensor.data_ptr()] = line

    def line_of(self, tensors: Iterable[Tensor]) -> str:
        """The line that wrote the first of ``tensors`` that was noted; "" when none was."""
        found = (self._written.get(t.data_ptr()) for t in tensors)
        return next((line for line in found if line is not None), "")
