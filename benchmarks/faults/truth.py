"""What a script does, seen by plain runs; and what counts as damage.

Nothing here knows ampscope. ``measure`` runs scripts in children forked from this process, which has
imported torch once, and records by hooks on optimizers and GradScaler what ``damage`` compares. An
*exact* run computes in fp32: autocast and scalers are switched off and torch's half dtypes are fp32.
Runs are deterministic, so they are kept by the hash of their text (``Runs``).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import math
import os
import pickle
import re
import select
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VERSION = 3  # of what a run records; another one forgets the kept runs
LIMIT_S = 60.0
COMPARED_STEPS = 3  # gradients of the first steps are kept
COMPARED_ENTRIES = 1024  # of each parameter, evenly spread
MAIN = "train.py"
HEAVY = ("transformers.trainer", "accelerate", "lightning.pytorch")  # seconds to import
Source = Mapping[str, str]  # texts by file name; MAIN is run, the others lie beside it
HIGH = ("accuracy", "recall", "precision", "auc", "f1", "hit rate")  # better when high
LOW = ("rmse", "mae", "error", "perplexity")
RESULT = re.compile(
    rf"(?P<words>[^\d\n;,|]*?\b(?P<name>{'|'.join(HIGH + LOW)}))\b[^\w\-+]{{0,4}}"
    r"(?P<value>[-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?))",
    re.IGNORECASE,
)  # fmt: skip
LOSS = re.compile(r"loss[^\w\-+]{0,4}([-+]?(?:nan|inf|\d+\.?\d*(?:e[-+]?\d+)?))", re.IGNORECASE)


@dataclass(slots=True)
class Run:
    """One run of a script."""

    error: str = ""  # last line of the traceback
    losses: list[float] = field(default_factory=list)  # printed, the last on held-out data
    skipped: list[bool] = field(default_factory=list)  # of each attempt to step
    finite_weights: bool = True
    finite_buffers: bool = True
    moved: float = 0.0  # share of the weights that differ from those after the first step
    still: float = 0.0  # share of second moments that a gradient did not change
    gradients: dict[tuple[int, int], list[np.ndarray[Any, Any]]] = field(default_factory=dict)
    modules: dict[str, list[str]] = field(default_factory=dict)  # class: paths
    seconds: float = 0.0  # of CPU
    output: str = ""


# ---- what counts as damage -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """A run against a reference that is healthy. Each is 0 without damage."""

    error: bool  # an exception, and none in the reference
    nonfinite: bool  # weights or buffers at the end
    lost_progress: float  # share of the reference's fall of the loss; 1: learnt nothing
    late_skips: float  # share of the steps of the second half
    frozen: float  # share of the weights that the reference moved and this run did not
    lost_gradients: float  # share of entries that are 0 here and not in fp32, beyond the reference
    wrong_gradients: float  # relative error against fp32, beyond the reference
    still_state: float  # share of second moments that stand still, beyond the reference
    worse_results: float = 0.0  # share lost of the held-out metrics printed at the end, the worst

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is damaged. The thresholds are wide of the spread between two healthy precisions."""
        limits = {
            "error": self.error,
            "nonfinite": self.nonfinite,
            "loss": self.lost_progress >= 0.15,
            "skips": self.late_skips >= 0.25,
            "frozen": self.frozen >= 0.3,
            "lost gradients": self.lost_gradients >= 0.25,
            "wrong gradients": self.wrong_gradients >= 0.5,
            "still state": self.still_state >= 0.5,
            "results": self.worse_results >= 0.25,
        }
        return tuple(kind for kind, is_so in limits.items() if is_so)

    @property
    def is_harmed(self) -> bool:
        """The training is worse now; otherwise what is lost may have done no harm so far."""
        return bool({"error", "nonfinite", "loss", "skips", "frozen", "results"} & set(self.kinds))

    @property
    def is_harmless(self) -> bool:
        """Nothing of it even nearly; between this and ``kinds`` a pair is not used at all."""
        return not (self.error or self.nonfinite) and all(
            (
                self.lost_progress <= 0.06,
                self.late_skips <= 0.1,
                self.frozen <= 0.05,
                self.lost_gradients <= 0.1,
                self.still_state <= 0.2,
                self.worse_results <= 0.1,
            )
        )


def damage(run: Run, reference: Run, exact: Run) -> Damage:
    """``run`` against ``reference``; gradients against ``exact``, the reference computed in fp32."""
    return Damage(
        error=bool(run.error) and not reference.error,
        nonfinite=not (run.finite_weights and run.finite_buffers),
        lost_progress=_lost_progress(run, reference),
        late_skips=max(0.0, _late_skips(run) - _late_skips(reference)),
        frozen=max(0.0, 1 - run.moved / reference.moved) if reference.moved else 0.0,
        lost_gradients=max(0.0, _lost(run, exact) - _lost(reference, exact)),
        wrong_gradients=max(0.0, _wrong(run, exact) - _wrong(reference, exact)),
        still_state=max(0.0, run.still - reference.still),
        worse_results=_worse_results(run, reference),
    )


def is_healthy(run: Run, exact: Run) -> bool:
    """Whether half precision trains as fp32 does, and trains at all."""
    if run.error or exact.error or len(exact.losses) < 2 or not _learns(exact):
        return False
    seen = damage(run, exact, exact)
    return seen.is_harmless and seen.wrong_gradients < 0.35


def _learns(run: Run) -> bool:
    return math.isfinite(run.losses[-1]) and run.losses[-1] < run.losses[0] - 1e-4


def _lost_progress(run: Run, reference: Run) -> float:
    if not reference.losses:
        return 0.0
    if not run.losses or not math.isfinite(run.losses[-1]):
        return 1.0
    fell = reference.losses[0] - reference.losses[-1]
    return (run.losses[-1] - reference.losses[-1]) / fell if fell > 0 else 0.0


def results(output: str) -> dict[tuple[str, bool], float]:
    """The last value of each metric that a script prints: (words, whether high is better): value."""
    found = {}
    for line in output.splitlines():
        for match in RESULT.finditer(line):
            words = " ".join(match["words"].lower().split())
            found[words, match["name"].lower() in HIGH] = float(match["value"])
    return found


def _worse_results(run: Run, reference: Run) -> float:
    """1 − result / reference where high is better, 1 − reference / result where low is; 1 for a
    result that is not finite, and for one that is missing."""
    mine, worst = results(run.output), 0.0
    for what, wanted in results(reference.output).items():
        value = mine.get(what, math.nan)
        if not math.isfinite(wanted) or wanted <= 0:
            continue
        if not math.isfinite(value):
            return 1.0
        _, is_high = what
        worst = max(worst, 1 - value / wanted if is_high else 1 - wanted / max(value, 1e-30))
    return min(worst, 1.0)


def _late_skips(run: Run) -> float:
    late = run.skipped[len(run.skipped) // 2 :]
    return sum(late) / len(late) if late else 0.0


def _pairs(run: Run, exact: Run) -> Iterable[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    for key in run.gradients.keys() & exact.gradients.keys():
        for mine, true in zip(run.gradients[key], exact.gradients[key], strict=False):
            if mine.shape == true.shape:
                yield mine, true


def _lost(run: Run, exact: Run) -> float:
    lost = there = 0
    for mine, true in _pairs(run, exact):
        lost += int(((mine == 0) & (true != 0)).sum())
        there += int((true != 0).sum())
    return lost / there if there else 0.0


def _wrong(run: Run, exact: Run) -> float:
    error = size = 0.0
    for mine, true in _pairs(run, exact):
        finite = np.nan_to_num(mine.astype(np.float64), posinf=1e30, neginf=-1e30)
        error += float(np.square(finite - true).sum())
        size += float(np.square(true.astype(np.float64)).sum())
    return math.sqrt(error / size) if size else 0.0


# ---- runs ------------------------------------------------------------------------------------------


class Runs:
    """Runs of scripts, kept in a file by the hash of what was run."""

    def __init__(self, file: Path | None, jobs: int = 1) -> None:
        self.jobs = jobs
        self._memory: dict[str, Run] = {}
        self._file = sqlite3.connect(file, timeout=60) if file else None
        if self._file:
            self._file.execute("CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, data BLOB)")

    def get(self, wanted: Sequence[tuple[Source, bool]]) -> list[Run]:
        """The runs of (source, exact), made where they are not known."""
        keys = [_key(*w) for w in wanted]
        missing = {k: w for k, w in zip(keys, wanted, strict=True) if self._known(k) is None}
        for key, run in zip(missing, measure(list(missing.values()), self.jobs), strict=True):
            self._memory[key] = run
            if self._file:
                data = zlib.compress(pickle.dumps(run))
                with self._file:
                    self._file.execute("INSERT OR REPLACE INTO run VALUES (?, ?)", (key, data))
        return [self._memory[k] for k in keys]

    def _known(self, key: str) -> Run | None:
        if key not in self._memory and self._file:
            row = self._file.execute("SELECT data FROM run WHERE key = ?", (key,)).fetchone()
            if row:
                self._memory[key] = pickle.loads(zlib.decompress(row[0]))
        return self._memory.get(key)


def _key(source: Source, exact: bool) -> str:
    beside = "".join(f"\n--- {name}\n{text}" for name, text in source.items() if name != MAIN)
    return hashlib.sha256(f"{VERSION} {exact}\n{source[MAIN]}{beside}".encode()).hexdigest()


def measure(
    wanted: Sequence[tuple[Source, bool]], jobs: int = 1, limit_s: float = LIMIT_S
) -> list[Run]:
    """Run each (source, exact) in a child of its own, ``jobs`` at a time."""
    import torch

    torch.set_num_threads(1)  # before the fork: no thread of torch's may run then
    import torch._dynamo  # imported by the first optimizer; once here

    texts = [text for source, _ in wanted for text in source.values()]
    for name in HEAVY:  # once here too, where a script wants it
        if any(
            f"import {name.split('.')[0]}" in t or f"from {name.split('.')[0]}" in t for t in texts
        ):
            importlib.import_module(name)

    done: dict[int, Run] = {}
    waiting = list(enumerate(wanted))
    running: dict[int, tuple[int, int, float]] = {}  # pipe: (index, process, deadline)
    while waiting or running:
        while waiting and len(running) < jobs:
            index, (source, exact) = waiting.pop(0)
            read, write = os.pipe()
            process = os.fork()
            if process == 0:
                os.close(read)
                _child(source, exact, write)
            os.close(write)
            running[read] = (index, process, time.monotonic() + limit_s)
        ready, _, _ = select.select(list(running), [], [], 1.0)
        late = [r for r, (_, _, deadline) in running.items() if time.monotonic() > deadline]
        for read in {*ready, *late}:
            index, process, _ = running.pop(read)
            if read not in ready:
                os.kill(process, signal.SIGKILL)
            with open(read, "rb") as pipe:
                data = pipe.read() if read in ready else b""
            os.waitpid(process, 0)
            done[index] = pickle.loads(data) if data else Run(error="died or took too long")
    return [done[n] for n in range(len(wanted))]


def _child(source: Source, exact: bool, pipe: int) -> None:
    """Run the script, send its Run, and never return."""
    place = tempfile.mkdtemp()
    try:
        os.chdir(place)
        out = os.open("stdout.txt", os.O_RDWR | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        recorder = _Recorder()
        started = time.process_time()
        error = _execute(source, exact, recorder)
        sys.stdout.flush()
        run = recorder.result()
        run.error, run.seconds = error, time.process_time() - started
        run.output = Path("stdout.txt").read_text(errors="replace")[-20_000:]
        run.losses = [float(x) for x in LOSS.findall(run.output)]
        with open(pipe, "wb") as to:
            to.write(pickle.dumps(run))
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os._exit(0)


def _execute(source: Source, exact: bool, recorder: _Recorder) -> str:
    for name, text in source.items():
        Path(name).write_text(text)
    sys.argv, sys.path[0] = [MAIN], os.getcwd()
    names = {"__name__": "__main__", "__file__": MAIN}
    try:
        with warnings.catch_warnings(), recorder, _fp32() if exact else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            exec(compile(source[MAIN], MAIN, "exec"), names)
    except SystemExit as end:
        return "" if end.code in (None, 0) else f"SystemExit: {end.code}"
    except BaseException as raised:
        traceback.print_exc()
        return f"{type(raised).__name__}: {raised}".splitlines()[0][:300]
    return ""


@contextlib.contextmanager
def _fp32() -> Any:
    """Everything that asks for half precision gets fp32. For a child that ends afterwards."""
    import torch
    from torch import nn

    made, scaler = torch.autocast.__init__, torch.amp.GradScaler.__init__

    def no_autocast(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(self, device_type, enabled=False)

    def no_scaler(self: Any, *args: Any, **kwargs: Any) -> None:
        scaler(self, kwargs.get("device", args[0] if args else "cpu"), enabled=False)

    torch.autocast.__init__ = no_autocast  # type: ignore[method-assign]
    torch.amp.GradScaler.__init__ = no_scaler  # type: ignore[method-assign]
    for kind in (torch.Tensor, nn.Module):
        kind.half = kind.bfloat16 = kind.float  # type: ignore[method-assign]
    np.float16 = np.half = np.float32  # type: ignore[assignment,misc]
    halves = {name: getattr(torch, name) for name in ("float16", "half", "bfloat16")}

    def named(dtypes: dict[str, torch.dtype]) -> None:
        for name, dtype in dtypes.items():
            setattr(torch, name, dtype)

    def with_true_names(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            named(halves)
            try:
                return function(*args, **kwargs)
            finally:
                named(dict.fromkeys(halves, torch.float32))

        return called

    torch.save, torch.load = with_true_names(torch.save), with_true_names(torch.load)
    named(dict.fromkeys(halves, torch.float32))
    yield


class _Recorder:
    """Hooks on optimizers and scalers of the one script that this process runs."""

    def __init__(self) -> None:
        self.run = Run()
        self.optimizers: list[Any] = []
        self.first: dict[Any, Any] = {}
        self._attempts: dict[int, int] = {}
        self._in_scaler = False
        self._depth = 0
        self._roots: list[Any] = []
        self._before: dict[Any, Any] = {}
        self._still = self._counted = 0

    def __enter__(self) -> None:
        import torch
        from torch.nn.modules.module import (
            register_module_forward_hook,
            register_module_forward_pre_hook,
        )
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        self.handles = [
            register_optimizer_step_pre_hook(self._stepping),
            register_optimizer_step_post_hook(self._stepped),
            register_module_forward_pre_hook(self._entering),
            register_module_forward_hook(self._left, always_call=True),
        ]
        step = torch.amp.GradScaler.step

        def scaled_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._attempt(optimizer)
            self.run.skipped.append(True)
            self._in_scaler = True
            try:
                return step(scaler, optimizer, *args, **kwargs)
            finally:
                self._in_scaler = False

        torch.amp.GradScaler.step = scaled_step  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _attempt(self, optimizer: Any) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # of a framework's wrapper
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)
        index = self.optimizers.index(optimizer)
        self._attempts[index] = self._attempts.get(index, -1) + 1
        for p in _parameters(optimizer):
            if p not in self.first or self._attempts[index] == 1:  # once it lies on its grid
                self.first[p] = p.detach().clone()

    def _stepping(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._in_scaler:
            self.run.skipped[-1] = False
        else:
            self._attempt(optimizer)
            self.run.skipped.append(False)
        index = self.optimizers.index(optimizer)
        attempt = self._attempts[index]
        if attempt < COMPARED_STEPS:
            self.run.gradients[index, attempt] = [
                _sample(p.grad, p) for p in _parameters(optimizer)
            ]
        for p in _parameters(optimizer):
            for name in ("exp_avg_sq", "square_avg"):
                moment = optimizer.state.get(p, {}).get(name)
                if moment is not None:
                    self._before[p] = (name, moment.detach().clone())

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for p in _parameters(optimizer):
            if p in self._before and p.grad is not None and not p.grad.is_sparse:
                name, before = self._before.pop(p)
                fed = p.grad != 0
                self._counted += int(fed.sum())
                self._still += int(((optimizer.state[p][name] == before) & fed).sum())

    def _entering(self, module: Any, inputs: Any) -> None:
        if self._depth == 0 and all(module is not r for r in self._roots):
            self._roots.append(module)
        self._depth += 1

    def _left(self, module: Any, inputs: Any, output: Any) -> None:
        self._depth -= 1

    def result(self) -> Run:
        import torch

        run = self.run
        moved = total = 0
        for p, first in self.first.items():
            now = p.detach()
            run.finite_weights &= bool(torch.isfinite(now).all())
            if now.shape == first.shape:
                moved += int((now.to(first.dtype) != first).sum())
                total += first.numel()
        run.moved = moved / total if total else 0.0
        run.still = self._still / self._counted if self._counted else 0.0
        for root in [*self._roots, *_holders(self._roots)]:
            for path, module in root.named_modules():
                run.modules.setdefault(type(module).__name__, []).append(path)
        for root in self._roots:
            for buffer in root.buffers():
                if buffer.is_floating_point() and ("running" in _names(root, buffer)):
                    run.finite_buffers &= bool(torch.isfinite(buffer).all())
        return run


def _holders(roots: list[Any]) -> list[Any]:
    """Modules that are never called and hold one that is, as a LightningModule does: a path may
    begin at them as well."""
    from torch import nn

    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    called = {id(root) for root in roots}
    return [m for m in modules if id(m) not in called and called & {id(n) for n in m.modules()}]


def _names(root: Any, wanted: Any) -> str:
    return " ".join(n for n, b in root.named_buffers() if b is wanted)


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sample(gradient: Any, parameter: Any) -> np.ndarray[Any, Any]:
    import torch

    if gradient is None:
        gradient = torch.zeros_like(parameter)
    flat = (
        gradient.detach().to_dense().float().flatten()
        if gradient.is_sparse
        else (gradient.detach().float().flatten())
    )
    stride = max(1, flat.numel() // COMPARED_ENTRIES)
    return flat[::stride].numpy().copy()
