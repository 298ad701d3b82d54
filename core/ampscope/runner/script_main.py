"""What a script that trains with torch finds at its start; see ``script_text`` for its text."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch._dynamo as dynamo
import torch.export
from torch.utils._python_dispatch import _disable_current_modes

from ampscope.capture.global_hooks import no_own_module_hooks
from ampscope.capture.script.half_sites import unheard
from ampscope.patches import Patches, unpatched
from ampscope.runner.script_text import SEED, module_of, put_folder_first


@dataclass(slots=True)
class Stage:
    """What the script did with its surroundings."""

    compiles: bool = False  # it called torch.compile, or a library that it uses did


def arguments(workload: str, args: Sequence[str]) -> list[str]:
    """``sys.argv`` of a script."""
    return [module_of(workload) or workload, *args]


def seed_all() -> None:
    """Seed torch, NumPy and ``random``, so that a script without seeds repeats itself from run to
    run; also the same script as a rank, in a process that a launcher starts."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)


@contextlib.contextmanager
def stage(workload: str, args: tuple[str, ...], *, compiles: bool = False) -> Iterator[Stage]:
    """What a script finds at its start: arguments, import path, seeds; all put back on exit.

    Seeds are set (:func:`seed_all`). Unless the run ``compiles``, what the script compiles runs as
    the eager function, because a compiled graph hides its ops.
    """
    found = Stage()
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    eager: AbstractContextManager[None] = contextlib.nullcontext() if compiles else _eager(found)
    seed_all()
    sys.argv = arguments(workload, args)
    put_folder_first(workload)
    try:
        with eager:
            yield found
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


@contextlib.contextmanager
def _eager(found: Stage) -> Iterator[None]:
    """What is compiled runs as the function that it was made from, and ``found`` hears of it."""
    with torch.compiler.set_stance("force_eager"), Patches() as patches:
        for owner, name in ((torch, "compile"), (dynamo, "optimize"), (dynamo, "optimize_assert")):
            patches.wrap(owner, name, partial(_noted, found))
        # The stance is this run's own: on "default", fullgraph=True raises when nothing compiled.
        patches.replace(dynamo.decorators, "_set_stance", _kept_stance)
        for owner, name in ((dynamo, "export"), (torch.export, "export")):
            patches.replace(owner, name, _really_traced)
        yield


@contextlib.contextmanager
def without_compiling() -> Iterator[Stage]:
    """For a child of a script, which finds its surroundings as the script has made them: only
    ``torch.compile`` gives back the module unchanged."""
    found = Stage()
    disabled = dynamo.config.disable
    with Patches() as patches:
        patches.wrap(torch, "compile", partial(_noted, found))
        dynamo.config.disable = True
        try:
            yield found
        finally:
            dynamo.config.disable = disabled


def _noted(found: Stage, original: Any, *args: Any, **kwargs: Any) -> Any:
    found.compiles = True
    return original(*args, **kwargs)


def _kept_stance(original: Any) -> Any:
    """``torch.compiler.set_stance`` of the script is accepted and changes nothing."""

    def wrapper(stance: Any) -> Any:
        return dynamo.eval_frame._stance

    return wrapper


def _really_traced(original: Any) -> Any:
    """An export needs dynamo's tracer, and no instrument may become a part of its graph.
    ``torch._dynamo.export(f)`` gives a function that traces when it is called."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before, default = dynamo.eval_frame._stance, dynamo.eval_frame.DynamoStance()
        dynamo.eval_frame._set_stance(default)
        try:
            with (
                _disable_current_modes(),
                unpatched(torch.nn.Module, "__call__"),
                no_own_module_hooks(),
                unheard(),
            ):
                result = original(*args, **kwargs)
            return _really_traced(result) if inspect.isfunction(result) else result
        finally:
            dynamo.eval_frame._set_stance(before)

    return wrapper
