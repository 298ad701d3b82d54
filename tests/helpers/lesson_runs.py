"""Lessons measured for tests, and stored as runs: once per session and setting, by whichever
process of pytest comes first; a measurement of bf16 takes a minute where bf16 is emulated.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import pickle
from functools import cache
from pathlib import Path

import torch

from ampscope.ext.lessons.catalog import lesson_spec
from ampscope.records import Curve, Machine, Reading, Result, State
from ampscope.runner.probe import arithmetic
from ampscope.store.writer import RunWriter

CPU = torch.device("cpu")


def measured(lesson: str, **asked: str) -> tuple[Result, ...]:
    """What the child process would write."""
    return _measured(lesson, tuple(sorted(asked.items())))


@cache
def _measured(lesson: str, asked: tuple[tuple[str, str], ...]) -> tuple[Result, ...]:
    folder = Path(os.environ["AMPSCOPE_TESTS_SHARED"])  # set by conftest
    name = "-".join([lesson, *(f"{key}={value}" for key, value in asked)]).replace("/", "_")
    kept = folder / f"lesson-{name}.pickle"
    with (folder / f"{kept.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            made = pickle.dumps(_measure(lesson, asked))
            kept.write_bytes(made)
        found: tuple[Result, ...] = pickle.loads(kept.read_bytes())
    return found


def _measure(lesson: str, asked: tuple[tuple[str, str], ...]) -> tuple[Result, ...]:
    spec = lesson_spec(lesson, **dict(asked))
    module = importlib.import_module(f"ampscope.ext.lessons.{lesson}")
    torch.manual_seed(spec.seed)
    rules = contextlib.nullcontext() if spec.policy == "native" else arithmetic("rehearsal")
    with rules:
        return tuple(module.measure(dict(spec.settings), CPU))


def stored(store: Path, lesson: str, **asked: str) -> str:
    """A finished run of it, as the page finds it."""
    return keep(store, lesson, measured(lesson, **asked), **asked)


def keep(
    store: Path, lesson: str, results: tuple[Result, ...], state: State = State.FINISHED,
    message: str = "", **asked: str,
) -> str:  # fmt: skip
    """A run with these results."""
    writer = RunWriter.create(store, lesson_spec(lesson, **asked))
    writer.start(Machine("cpu", "Test CPU", "rehearsal", torch=torch.__version__))
    for result in results:
        writer.add_result(result)
    if state.is_active:
        writer.flush()
    else:
        writer.finish(state, message)
    writer.close()
    return writer.run_id


def reading(results: tuple[Result, ...], name: str, series: str) -> float:
    (found,) = [
        r for r in results if isinstance(r, Reading) and (r.name, r.series) == (name, series)
    ]
    return found.value


def curve(results: tuple[Result, ...], name: str, series: str) -> Curve:
    (found,) = [r for r in results if isinstance(r, Curve) and (r.name, r.series) == (name, series)]
    return found
