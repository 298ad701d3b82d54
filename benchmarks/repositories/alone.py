"""Run a script without recording it, from the seeds that a recorded run starts from.

python alone.py native train.py ARGUMENTS…     # as Python does
python alone.py rehearsal train.py ARGUMENTS…  # on the device that a rehearsal stands in for

Processes that the script spawns rehearse as well: ``probe/sitecustomize.py`` sees to it.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

SEED = 20240229  # ampscope.runner.script_text.SEED


class _Silent:
    """What stands in the recorder's place where CUDA is redirected."""

    def add(self, *said: object) -> None:
        """Nothing is noted."""


def rehearsal(folder: str) -> AbstractContextManager[Any]:
    """The surroundings of a rehearsed run, without instruments."""
    from ampscope.ext.rehearsal.simulated_device import simulated_cuda
    from ampscope.policy.device_profiles import PROFILES, USUAL
    from ampscope.runner.probe import arithmetic
    from ampscope.runner.script_device import CudaRequests
    from ampscope.runner.script_main import without_compiling
    from ampscope.source_lines import SourceLines

    stack = ExitStack()
    stack.enter_context(without_compiling())
    stack.enter_context(CudaRequests(SourceLines(folder), True, _Silent()).watching())
    stack.enter_context(simulated_cuda(PROFILES[USUAL]))
    stack.enter_context(arithmetic("rehearsal"))
    return stack


def main() -> None:
    """The command."""
    import numpy
    import torch

    how, script, *arguments = sys.argv[1:]
    is_module = script == "-m"
    if is_module:
        script, *arguments = arguments
    folder = str(Path.cwd() if is_module else Path(script).resolve().parent)
    sys.argv, sys.path[0] = [script, *arguments], folder
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)
    if how == "rehearsal":
        os.environ["REHEARSED_FOLDER"] = folder
    with rehearsal(folder) if how == "rehearsal" else nullcontext():
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
