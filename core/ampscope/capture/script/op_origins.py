"""Where an op belongs: module, source line and user Function, in the forward and backward passes.

In the backward pass no user frame is on the stack. Autograd numbers its nodes in the order in which
forward made them, so the number of the node that runs now leads back to the forward op's place.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]  # bound in C++

from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.source_lines import SourceLines, line_name
from ampscope.capture.tensors import in_backward

NOWHERE = ("", 0)  # no line is known
MAX_NODES = 50_000  # remembered nodes; a few steps of a large model


class Origin(NamedTuple):
    """Where one op was called."""

    module: nn.Module | None
    place: tuple[str, int]  # file and line of the user's own code
    function: str  # the user's autograd.Function around it, "" outside
    library: tuple[str, int] = NOWHERE  # file and line of the library that the place led to


class Origins:
    """Remembers, for every autograd node made while watching, where its forward op was called."""

    def __init__(self, paths: ModulePaths, lines: SourceLines) -> None:
        self.paths = paths
        self.lines = lines
        self.functions: list[str] = []  # user autograd.Functions that run now
        self._numbers: list[int] = []
        self._origins: deque[Origin] = deque()

    def here(self) -> Origin:
        """Where the program stands now."""
        place, library = self.lines.places()
        return Origin(self.paths.current(), place, (self.functions or [""])[-1], library)

    def remember(self) -> None:
        """A forward op has just run; its node was made just before it."""
        number = _get_sequence_nr() - 1
        if not self._numbers or self._numbers[-1] < number:
            self._numbers.append(number)
            self._origins.append(self.here())

    def module_changes(self) -> None:
        """Another module is about to run, or the present one has ended. Nodes that no watched op
        made (those of functions in C++ or Python) belong to the module that ran until now."""
        if not torch.is_grad_enabled() or in_backward():
            return
        number = _get_sequence_nr() - 1
        first = self._numbers[-1] + 1 if self._numbers else number
        if first <= number:
            self._numbers.append(first)
            self._origins.append(Origin(self.paths.current(), NOWHERE, ""))

    def of(self, node: Any) -> Origin:
        """Where the op that runs now belongs; ``node`` is autograd's current node, None forward."""
        if node is None:
            return self.here()
        at = bisect.bisect_right(self._numbers, node._sequence_nr()) - 1
        if at < 0 or self.paths.stack:
            return Origin(self.paths.current(), self.lines.where(), "")
        return self._origins[at]

    def names(self, node: Any) -> tuple[str, str]:
        """(dotted module, "train.py:41") of the same."""
        origin = self.of(node)
        return self.paths.path(origin.module), line_name(origin.place)

    def new_attempt(self) -> None:
        """An optimizer step begins: forget the nodes when there are too many."""
        if len(self._numbers) > MAX_NODES:
            self._numbers, self._origins = [], deque()
