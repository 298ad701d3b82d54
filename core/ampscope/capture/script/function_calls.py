"""Wrapper of the user's own autograd.Functions: tells the op watch which one is running.

The ops of a Function's forward run without gradients, so none of them has an autograd node; the
Function has one node for all, whose place is where it was applied.
"""

from __future__ import annotations

from typing import Any

import torch

from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.patches import Patches


def wrap_functions(watch: OpWatch, patches: Patches) -> None:
    """Put the wrapper on; ``patches`` takes it off."""

    def make(original: Any) -> Any:
        inner = original.__func__

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if watch.autocast:
                decorated = "autocast_mode" in cls.forward.__code__.co_filename
                watch.note_function(cls.__name__, decorated)
            watch.functions.append(cls.__name__)
            try:
                result = inner(cls, *args, **kwargs)
                watch.function_applied()
                return result
            finally:
                watch.functions.pop()

        return classmethod(apply)

    patches.replace(torch.autograd.Function, "apply", make)
