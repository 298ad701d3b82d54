"""What a script that trains with torch finds at its start; see ``script_text`` for its text."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ampscope.capture.script.patches import Patches
from ampscope.run.script_text import SEED, folder_of, module_of


@dataclass(slots=True)
class Stage:
    """What the script did with its surroundings."""

    compiles: bool = False  # it called torch.compile


@contextlib.contextmanager
def stage(workload: str, args: tuple[str, ...]) -> Iterator[Stage]:
    """What a script finds at its start: arguments, import path, seeds; all put back on exit.

    The seeds of torch, NumPy and ``random`` are set so that a script without seeds repeats itself
    from run to run. ``torch.compile`` gives back the module as it is, because a compiled graph
    hides its ops.
    """
    found = Stage()
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    disabled = torch._dynamo.config.disable
    patches = Patches()
    patches.replace(torch, "compile", lambda original: _noted(original, found))
    torch._dynamo.config.disable = True
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    sys.argv = [module_of(workload) or workload, *args]
    if not sys.flags.safe_path:
        sys.path[0] = folder_of(workload)  # in place of what this process was started with
    try:
        yield found
    finally:
        patches.undo()
        sys.argv, sys.path[:], sys.modules["__main__"] = before
        torch._dynamo.config.disable = disabled


def _noted(original: Any, found: Stage) -> Any:
    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found.compiles = True
        return original(*args, **kwargs)

    return wrapper
