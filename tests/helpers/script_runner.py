"""Runs of many small scripts from one process that has imported torch, as in a diagnosis."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import OptimizerStep, Outcome
from ampscope.records import RunSpec

BASE = """\
import torch
torch.manual_seed(0)
m = torch.nn.Linear(4, 2)
o = torch.optim.SGD(m.parameters(), 0.1)
def step():
    o.zero_grad()
    loss = m(torch.randn(8, 4)).square().mean()
    loss.backward()
    o.step()
    return loss.item()
"""


T = TypeVar("T")


class OnDemand(dict[str, T]):
    """Makes a value when it is first asked for: a test waits for the runs that it reads, and a
    test that is left out costs nothing."""

    def __init__(self, make: Callable[[str], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> T:
        self[name] = value = self._make(name)
        return value


def quick(names: Iterable[str], *kept: str) -> list[Any]:
    """Parameters of a test: those ``kept`` run in the quick suite, the others are slow."""
    found = list(names)
    assert set(kept) <= set(found)
    return [n if n in kept else pytest.param(n, marks=pytest.mark.slow) for n in found]


@dataclass(frozen=True)
class Ran:
    """What is left of one script's run."""

    run: ScriptRun
    out: bytes
    err: bytes

    @property
    def outcome(self) -> Outcome:
        return next(o for o in reversed(self.run.observations) if isinstance(o, Outcome))

    @property
    def steps(self) -> list[OptimizerStep]:
        return [o for o in self.run.observations if isinstance(o, OptimizerStep)]


class Runner:
    """Start any number of scripts, then fetch each."""

    def __init__(self, runs: ScriptRuns) -> None:
        self._runs = runs

    def start(
        self,
        workload: Path | str,
        args: Sequence[str] = (),
        control: str = "as_is",
        **spec: object,
    ) -> str:
        """Start a script (a path, or ``-m module``) and return its run's id."""
        changed = replace(self._runs.spec, workload=str(workload), args=tuple(args), **spec)  # type: ignore[arg-type]  # fields by name
        before, self._runs.spec = self._runs.spec, changed
        try:
            return self._runs.start(control, merged=False)
        finally:
            self._runs.spec = before

    def fetch(self, run_id: str) -> Ran:
        """Wait for a run's end."""
        out, err = io.BytesIO(), io.BytesIO()
        run = self._runs.pass_through(run_id, out, err)
        return Ran(run, out.getvalue(), err.getvalue())

    def __call__(
        self,
        workload: Path | str,
        args: Sequence[str] = (),
        control: str = "as_is",
        **spec: object,
    ) -> Ran:
        return self.fetch(self.start(workload, args, control, **spec))


def spec(workload: str = "none.py") -> RunSpec:
    """The spec that :class:`Runner` changes."""
    return RunSpec(workload, kind="script", steps=50, policy="native", time_limit_s=60.0)


def write_script(folder: Path, name: str, text: str) -> Path:
    """A script of its own beside ``base.py``."""
    (folder / "base.py").write_text(BASE)
    path = folder / name
    path.write_text(text)
    return path
