"""Run a user's script as ``__main__``, untouched, under a control, and record what happened.

The script keeps its arguments, its working directory and its way of importing the files beside it.
``torch.compile`` is switched off, because a compiled graph hides the ops; the seeds of torch, NumPy
and ``random`` are set before it starts, so that a script without seeds repeats itself.
"""

from __future__ import annotations

import os
import random
import runpy
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampscope.capture.source_lines import SourceLines, line_name
from ampscope.observations import Observation
from ampscope.records import RunSpec
from ampscope.run.controls import applied
from ampscope.run.probe import arithmetic
from ampscope.run.script_recorder import ScriptRecorder

SEED = 20240229
MAX_ERROR_TEXT = 2_000


class _Enough(BaseException):
    """Ends the script at the step limit; no Exception, so ``except Exception`` lets it by."""


@dataclass(frozen=True, slots=True)
class ScriptResult:
    """What is left of a script's run."""

    observations: list[Observation]
    traceback: str


def run_script(
    spec: RunSpec,
    policy: str,
    on_attempt: Callable[[int], None],
    on_result: Callable[[ScriptResult], None],
) -> ScriptResult:
    """Run ``spec.workload`` (a file, or ``-m package.module``) under ``spec.control``.

    ``on_result`` is called with what was recorded so far when the script ends the process itself.
    """
    module = spec.workload.removeprefix("-m ").strip() if spec.workload.startswith("-m ") else ""
    folder = str(Path.cwd()) if module else str(Path(spec.workload).resolve().parent)
    deadline = time.monotonic() + spec.time_limit_s
    recorder: ScriptRecorder

    def attempt(count: int) -> None:
        on_attempt(count)
        if count >= spec.steps:
            raise _Enough("steps")
        if time.monotonic() > deadline:
            raise _Enough("time")

    recorder = ScriptRecorder(folder, attempt)
    _prepare(spec, folder, module)
    original_exit = os._exit

    def exit_now(code: int) -> None:
        on_result(_result(recorder, "exit", "", exit_code=code))
        original_exit(code)

    os._exit = exit_now  # type: ignore[assignment]
    try:
        with applied(spec.control, folder), arithmetic(policy), recorder.watching():
            return _execute(recorder, spec, module)
    finally:
        os._exit = original_exit


def _execute(recorder: ScriptRecorder, spec: RunSpec, module: str) -> ScriptResult:
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(spec.workload, run_name="__main__")
    except _Enough as enough:
        return _result(recorder, str(enough), "")
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        return _result(recorder, "exit", "", exit_code=code)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(recorder, error)
    return _result(recorder, "returned", "")


def _failed(recorder: ScriptRecorder, error: BaseException) -> ScriptResult:
    place, function = _where(error, recorder.lines)
    return _result(
        recorder,
        "exception",
        "".join(traceback.format_exception(error)),
        exit_code=1,
        error_type=type(error).__name__,
        error_text=str(error)[:MAX_ERROR_TEXT],
        error_line=line_name(place),
        error_in_function=function,
    )


def _result(recorder: ScriptRecorder, ended: str, text: str, **facts: Any) -> ScriptResult:
    recorder.watch.enabled = False
    return ScriptResult(recorder.observations(recorder.outcome(ended, **facts)), text)


def _where(error: BaseException, lines: SourceLines) -> tuple[tuple[str, int], str]:
    """The user's innermost line in the traceback, and its function's name."""
    found: tuple[tuple[str, int], str] = (("", 0), "")
    for frame, number in traceback.walk_tb(error.__traceback__):
        if lines.is_user(frame.f_code):
            found = ((frame.f_code.co_filename, number), frame.f_code.co_name)
    return found


def _prepare(spec: RunSpec, folder: str, module: str) -> None:
    torch._dynamo.config.disable = True  # torch.compile becomes the identity
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    sys.argv = [module or spec.workload, *spec.args]
    sys.path.insert(0, folder)
