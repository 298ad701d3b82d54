"""A child that runs a script with nothing but a clock on its optimizer steps.

    python -m ampscope.runner.step_clock STEPS OUT SCRIPT [ARGS…]

The diagnosis' own runs carry instruments, which take several times a small model's step; a ratio of
step times needs a run without them. A global hook of torch notes the time after each step that an
optimizer took. The script ends after STEPS of them. OUT gets the seconds between steps as JSON,
without the first interval, in which memory is allocated and kernels are chosen.
"""

from __future__ import annotations

import itertools
import json
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch

from ampscope.capture.global_hooks import OPTIMIZER_POST
from ampscope.capture.user_objects import parameters_of


class _EnoughError(BaseException):
    """Ends the script; no ``except Exception`` of its own stops it."""


def main(steps: int, out: Path, script: str) -> None:
    """Run ``script`` as ``__main__`` with ``sys.argv`` as it is set. Whatever ends the script, the
    intervals so far are written."""
    times: list[float] = []
    first: list[int] = []

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first[:] = first or [id(optimizer)]
        if id(optimizer) != first[0]:
            return  # of several optimizers the first one's steps are the iterations
        place = next((p.device for p in parameters_of(optimizer)), None)
        if place is not None and place.type == "cuda":  # it may be none of the first GPU's
            torch.cuda.synchronize(place)
        times.append(time.perf_counter())
        if len(times) > steps + 1:
            raise _EnoughError

    OPTIMIZER_POST.subscribe(stepped)
    sys.path[0] = str(Path(script).absolute().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except _EnoughError:
        pass
    finally:
        intervals = [after - before for before, after in itertools.pairwise(times)]
        out.write_text(json.dumps(intervals[1:]))


if __name__ == "__main__":
    count, place, *command = sys.argv[1:]
    sys.argv = command
    main(int(count), Path(place), command[0])
