"""What surrounds a watched training: the recorder's thread, late numbers, the notebook's figure."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import random
import re
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks

import ampscope
from ampscope.capture.global_hooks import (
    FORWARD,
    FORWARD_ALWAYS,
    FORWARD_PRE,
    OPTIMIZER_POST,
    OPTIMIZER_PRE,
)
from ampscope.errors import StoreError
from ampscope.records import Role, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.watcher.alarms import AmpscopeWarning
from ampscope.watcher.gradient_norms import PendingNorms, start_norms
from ampscope.watcher.guard import Guard
from ampscope.watcher.step import StepNumbers
from tests.helpers import stores
from tests.helpers.trainers import assert_nothing_left
from tests.helpers.watched import Seen, recorded, small_net, train_bf16, train_fp16, watching


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm1d(8)])
def test_a_torchscript_model_is_watched_to_its_end(tmp_path: Path, norm: nn.Module) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1)))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ampscope.watch(model, optimizer, store=tmp_path / "runs.db", every=1):
        for _ in range(5):
            model(torch.ones(6, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with Reader(tmp_path / "runs.db") as reader:
        (run,) = reader.runs()
        assert (run.steps_done, run.state) == (5, State.FINISHED)


def test_a_parameter_that_stands_twice_in_a_group_is_no_unseen_one(tmp_path: Path) -> None:
    model = small_net()
    first, *rest = model.parameters()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([first, first, *rest], 0.1)
    with ampscope.watch(model, optimizer, store=tmp_path / "runs.db", every=1):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    with Reader(tmp_path / "runs.db") as reader:
        (run,) = reader.runs()
        assert not [e for e in reader.events(run.id) if "did not have" in e.message]


IMPORTS = """
import builtins, sys
import torch
from ampscope import watch
later = ("numba", "torch._inductor", "ampscope.capture.taps")
loaded = [name for name in sys.modules if name.startswith(later)]
def never(name, *args, **kwargs):
    if name.startswith((*later, "ampscope", "llvmlite")): raise AssertionError(name)
    return real(name, *args, **kwargs)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
real, builtins.__import__ = builtins.__import__, never
run = watch(model, optimizer, store=sys.argv[1], every=1, taps=True)
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
run.close()
print(loaded, builtins.__import__ is never)
"""


@pytest.mark.slow
def test_what_a_watch_loads_later_is_loaded_by_pythons_own_import(tmp_path: Path) -> None:
    """A script may have put a function of its own in the place of ``__import__``."""
    command = [sys.executable, "-c", IMPORTS, str(tmp_path / "runs.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[] True\n"), done.stderr
    with Reader(tmp_path / "runs.db") as reader:
        (run,) = reader.runs()
        assert run.steps_done == 3
        said = " ".join(event.text for event in reader.events(run.id))
    assert "No tap was heard" in said  # nothing was compiled, and taps were there
    assert "Error" not in said


def test_a_store_that_fails_ends_the_recording_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, others = small_net(), set(threading.enumerate())
    run = ampscope.watch(model, store=tmp_path / "runs.db", every=1)

    def full(self: RunWriter) -> None:
        raise StoreError("The disk is full.")

    monkeypatch.setattr(RunWriter, "flush", full)

    def train() -> list[float]:
        losses = train_bf16(20, model)
        run.close()
        return losses

    with pytest.warns(AmpscopeWarning, match="records no more: The disk is full"):
        losses = train()
    assert len(losses) == 20
    left = set(threading.enumerate()) - others
    assert not [t for t in left if t.name == "ampscope-recorder"]


def test_a_home_that_is_not_there_becomes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(AmpscopeWarning):
        ampscope.watch(small_net(), store="~no-such-user/runs/").close()
    assert not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_finished_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = []

    def refused(self: object, *_: object) -> None:
        raise StoreError("The disk is full.")

    def no_thread(self: object, *_: object) -> None:
        raise RuntimeError("can't start new thread")

    def close(self: RunWriter) -> None:
        closed.append(self)
        really(self)

    really = RunWriter.close
    monkeypatch.setattr(RunWriter, "wait_at_most", no_thread)
    monkeypatch.setattr(RunWriter, "finish", refused)
    monkeypatch.setattr(RunWriter, "close", close)
    with pytest.warns(AmpscopeWarning):
        ampscope.watch(small_net(), store=tmp_path / "runs.db").close()
    assert len(closed) == 1


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Another program writes to the store, and does not end."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if issubclass(w.category, AmpscopeWarning)]


@pytest.mark.slow
def test_a_store_that_is_held_delays_a_training_by_3_s_and_is_said_once(tmp_path: Path) -> None:
    path, model = tmp_path / "runs.db", small_net()
    stores.finished(path)
    ampscope.watch(small_net(), store=tmp_path / "first.db").close()  # loads and compiles
    with held(path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.monotonic()
        run = ampscope.watch(model, store=path)
        assert time.monotonic() - started < 4.0
        assert len(train_bf16(20, model)) == 20
        started = time.monotonic()
        run.close()
        assert time.monotonic() - started < 0.5
    (text,) = said(caught)
    assert "records no more" in text
    assert "held by another program" in text
    with Reader(path) as reader:
        assert len(reader.runs()) == 1


@pytest.mark.slow
def test_a_store_that_is_held_later_delays_the_end_by_3_s(tmp_path: Path) -> None:
    path, model = tmp_path / "runs.db", small_net()
    run = ampscope.watch(model, store=path)
    train_bf16(2, model)
    run._session.recorder.wait()
    with held(path), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_bf16(5, model)
        time.sleep(1.5)  # a flush waits for the lock
        started = time.monotonic()
        run.close()
        assert time.monotonic() - started < 4.0
    assert len(said(caught)) == 1


@pytest.mark.slow
def test_a_store_that_is_held_for_a_while_loses_no_step(tmp_path: Path) -> None:
    path, model = tmp_path / "runs.db", small_net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = ampscope.watch(model, store=path, every=1)
        train_bf16(3, model)
        run._session.recorder.wait()
        with held(path):
            train_bf16(5, model)
            time.sleep(4.0)
        train_bf16(2, model)
        run.close()
    with Reader(path) as reader:
        info = reader.run(run.id)
        assert (info.state, info.message, info.steps_done) == (State.FINISHED, "", 10)
        assert [step.step for step in reader.steps(run.id)] == list(range(10))


NO_NAMES = ["a" * 300 + ".db", "x\0.db", "~nosuchuser/x.db", "x\0/", "a" * 300 + "/"]


@pytest.mark.parametrize("name", NO_NAMES, ids=["long", "nul", "user", "nul/", "long/"])
@pytest.mark.parametrize("has_folder", [False, True])
def test_a_name_that_no_store_can_have_ends_no_training(
    name: str, has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = f"{tmp_path}/{name}" if has_folder and not name.startswith("~") else name
    unrecorded(store)
    assert not list(tmp_path.iterdir())


def unrecorded(store: str | None) -> None:
    """A training goes on as it was, with its alarms, an overflow and one warning."""
    model = small_net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ampscope.watch(model, store=store) as run:
            assert len(train_bf16(3, model)) == 3
            with torch.no_grad():
                next(model.parameters()).fill_(math.inf)
            train_bf16(2, model)
            assert repr(run)
        assert "<p>" in run._repr_html_()
    assert len([w for w in said(caught) if "records no more" in w]) == 1, said(caught)


def test_a_home_that_is_not_there_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AMPSCOPE_STORE", "~nosuchuser/x.db")
    unrecorded(None)
    assert not list(tmp_path.iterdir())


def test_a_training_that_can_start_no_thread_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's limit of processes (pids.max) is one of threads, too."""

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    model, path = small_net(), tmp_path / "runs.db"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ampscope.watch(model, store=path):
            assert len(train_bf16(3, model)) == 3
    assert len(said(caught)) == 1
    with Reader(path) as reader:
        (info,) = reader.runs()
    assert info.state is State.FAILED


@pytest.mark.parametrize("arguments", [None, [], [None], [3, "x"]])
def test_a_program_without_arguments_is_watched(
    arguments: list[object] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments is None:
        monkeypatch.delattr(sys, "argv")
    else:
        monkeypatch.setattr(sys, "argv", arguments)
    model, path = small_net(), tmp_path / "runs.db"
    with ampscope.watch(model, store=path):
        train_bf16(3, model)
    monkeypatch.undo()
    with Reader(path) as reader:
        (info,) = reader.runs()
    assert (info.state, info.steps_done) == (State.FINISHED, 3)


@pytest.mark.parametrize("where", ["text", "nowhere", "read-only", "folder/"])
def test_a_store_that_cannot_be_written_ends_no_training(where: str, tmp_path: Path) -> None:
    path: Path | str = tmp_path / "runs.db"
    if where == "text":
        Path(path).write_text("no store " * 100)
    elif where == "nowhere":
        path = "/proc/nowhere/runs.db"
    elif where == "folder/":
        path = "/proc/nowhere/runs/"
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        stores.finished(Path(path))
        Path(path).chmod(0o400)
    model = small_net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ampscope.watch(model, store=path) as run:
            assert len(train_bf16(5, model)) == 5
            assert run.id
        assert "<p>" in run._repr_html_()
    assert len(said(caught)) == 1
    with warnings.catch_warnings():  # where warnings are errors it is no end either
        warnings.simplefilter("error")
        ampscope.watch(small_net(), store=path).close()


def test_a_store_that_is_deleted_is_missed(tmp_path: Path) -> None:
    model = small_net()
    run = ampscope.watch(model, store=tmp_path / "runs.db")
    train_bf16(2, model)
    run._session.recorder.wait()
    (tmp_path / "runs.db").unlink()

    def train() -> None:
        train_bf16(2, model)
        time.sleep(1.2)
        run.close()

    with pytest.warns(AmpscopeWarning, match="was deleted"):
        train()


def test_steps_can_be_read_soon_after_they_were_made(tmp_path: Path) -> None:
    """The dashboard's delay of 2 s has room for a flush every 0.5 s."""
    model = small_net()
    with ampscope.watch(model, store=tmp_path / "runs.db") as run:
        train_bf16(3, model)
        deadline = time.monotonic() + 1.5
        with Reader(run.store) as reader:
            while time.monotonic() < deadline and len(reader.steps(run.id)) < 3:
                time.sleep(0.02)
            assert len(reader.steps(run.id)) == 3


def test_numbers_that_come_late_lose_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA without a scaler: a step is finished while the next one runs."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ampscope.watch(model, optimizer, store=tmp_path / "runs.db", policy="ignore")
    monkeypatch.setattr(PendingNorms, "is_immediate", property(lambda self: False))
    losses, norms = [], []
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 8)).square().mean() * (float("inf") if step == 4 else 1.0)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())))
        if step == 4:
            for p in model.parameters():
                p.grad = torch.full_like(p, float("nan"))
            # As if the step had been left out: the next ones are finite.
            kept = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            with torch.no_grad():
                for p, old in zip(model.parameters(), kept, strict=True):
                    p.copy_(old)
        else:
            optimizer.step()
    run.close()
    found = recorded(run.store, run.id)
    assert [s.step for s in found.steps] == list(range(6))
    np.testing.assert_array_equal([s.loss for s in found.steps], losses)
    good = [0, 1, 2, 3, 5]
    np.testing.assert_allclose(
        [found.steps[i].grad_norm for i in good], [norms[i] for i in good], rtol=1e-5
    )
    assert [(e.step, e.name) for e in found.of("nonfinite")] == [(4, "loss")]
    (capsule,) = found.of("capsule")
    assert "the step was over" in capsule.text


def test_norms_against_fp64_also_where_fp32_overflows() -> None:
    gradients = {
        0: torch.full((4,), 3e30),
        1: torch.tensor([3.0, 4.0], dtype=torch.float16),
        2: torch.tensor([float("inf"), 1.0]),
        3: torch.sparse_coo_tensor(
            torch.tensor([[0, 0]]), torch.tensor([3.0, 4.0]), (5,), check_invariants=True
        ),
    }
    norms = start_norms(gradients, None)
    norms.check(gradients)
    assert norms.suspects == (2,)
    np.testing.assert_allclose(norms.values[[0, 1]], [6e30, 5.0], rtol=1e-6)
    assert norms.values[3] == 7.0  # the same place twice: it adds up
    assert StepNumbers((start_norms({}, None),)).norm == 0.0


def test_a_run_that_nobody_closes_is_lost_and_keeps_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal, sys, time
            sys.path.insert(0, {str(Path(__file__).parents[2])!r})
            from tests.helpers.watched import small_net, train_bf16
            import ampscope
            model = small_net()
            run = ampscope.watch(model, store={str(tmp_path / "runs.db")!r})
            train_bf16(5, model)
            if sys.argv[1] == "killed":
                time.sleep(1.2)
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[1] == "raised":
                raise OSError("no more data")
            """
        )
    )
    for way, state in (("killed", "lost"), ("left", "finished"), ("raised", "failed")):
        command = [sys.executable, str(script), way]
        subprocess.run(command, check=False, timeout=120, capture_output=True)
        with Reader(tmp_path / "runs.db") as reader:
            run = reader.runs()[0]
            assert (run.state, run.steps_done) == (state, 5)
            assert (way == "raised") == ("no more data" in run.message)


def test_a_fork_of_the_training_records_nothing(tmp_path: Path) -> None:
    """DataLoader workers are forks: they have the hooks and no thread."""
    model = small_net()
    with ampscope.watch(model, store=tmp_path / "runs.db") as run:
        loader = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=16, num_workers=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs in loader:
            model(inputs).square().mean().backward()
            optimizer.step()
    assert len(recorded(run.store, run.id).steps) == 2


def test_the_notebook_shows_a_figure_and_escapes_the_name(tmp_path: Path) -> None:
    watched, _ = watching(tmp_path / "runs.db", name="<script>alert(1)</script>")
    kept: list[ampscope.Watch] = []

    def opened(*arguments: object) -> ampscope.Watch:
        kept.append(watched(*arguments))
        assert "no step so far" in kept[0]._repr_html_()
        return kept[0]

    train_fp16(6, opened, bad_at=(3,))
    page = kept[0]._repr_html_()
    assert "plotly" in page
    assert "step 5" in page
    assert "<script>alert" not in page
    assert f"run={kept[0].id}" in page


def test_models_of_many_kinds_of_input(tmp_path: Path) -> None:
    """Outputs in dicts, keyword arguments, no floating-point output at all in between."""

    class Dicts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, *, batch: dict[str, torch.Tensor]) -> dict[str, object]:
            return {"out": self.layer(batch["x"]), "names": ["a"], "count": torch.tensor(3)}

    model = Dicts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ampscope.watch(model, store=tmp_path / "runs.db", policy="ignore") as run:
        out = model(batch={"x": torch.full((3, 4), 3e38)})["out"]
        (out * 10).sum().backward()
        optimizer.step()
    result = run.replay()
    assert result.first is not None  # 10 * 3 * 3e38 in the weight's gradient
    assert (result.where, result.first.module, result.first.dtype) == ("backward", "layer", "fp32")
    assert recorded(run.store, run.id).at(Role.ACTIVATION) == [0]


def test_memory_stays_where_it_is(tmp_path: Path) -> None:
    """A tenth of what benchmarks/watch_memory.py runs: growth of a step's leak would show."""
    import tracemalloc

    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.ones(1, 2)

    def steps(count: int) -> None:
        for _ in range(count):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    # Without histograms: their thinning keeps about 512 numbers a role, which fills up slowly.
    with ampscope.watch(model, optimizer, store=tmp_path / "runs.db", every=0) as run:
        steps(3000)
        tracemalloc.start()
        readings = []
        for _ in range(8):
            steps(500)
            run._session.recorder.wait()
            gc.collect()  # empties Python's lists of free tuples as well
            readings.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert min(readings[4:]) - min(readings[:4]) < 2000 * 8, "more than 8 bytes per step"
    assert os.path.getsize(run.store) > 0


def _trained(seed: int, store: Path | None) -> list[torch.Tensor]:
    """200 steps of a model of this thread's own; with a ``store`` watches come and go meanwhile."""
    numbers, chance = torch.Generator().manual_seed(seed), random.Random(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=numbers) * 0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    runs: list[ampscope.Watch] = []
    losses = []
    for step in range(200):
        if store is not None and step % 40 == 5 * (seed % 8):
            runs.append(ampscope.watch(model, optimizer, store=store, every=3, policy="ignore"))
        if store is not None and runs and chance.random() < 0.02:
            runs.pop(chance.randrange(len(runs))).close()
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8, generator=numbers)).square().mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    for run in runs:
        run.close()
        assert {s.loss for s in recorded(run.store, run.id).steps} <= set(losses), "its own losses"
    return [p.detach().clone() for p in model.parameters()]


def test_threads_that_watch_do_not_meet(tmp_path: Path) -> None:
    """Eight trainings; watches come and leave in any order, in the middle of the others' steps."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            bare = list(pool.map(_trained, range(8), [None] * 8))
            stores = [tmp_path / f"{seed}.db" for seed in range(8)]
            seen = list(pool.map(_trained, range(8), stores))
    finally:
        sys.setswitchinterval(interval)
    for one, other in zip(bare, seen, strict=True):
        assert all(map(torch.equal, one, other))
    dispatchers = (FORWARD, FORWARD_PRE, FORWARD_ALWAYS, OPTIMIZER_PRE, OPTIMIZER_POST)
    assert not any(dispatcher.subscribers for dispatcher in dispatchers)
    with ampscope.watch(nn.Linear(2, 2), store=tmp_path / "last.db"):
        assert module_hooks._global_forward_hooks
    assert not module_hooks._global_forward_hooks, "later calls would take torch's slower path"


def test_a_watch_that_is_closed_by_its_own_alarm_breaks_no_step(tmp_path: Path) -> None:
    """From inside the optimizer's hooks, while torch walks them."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    options = {"every": 1, "policy": "ignore"}
    run = ampscope.watch(
        model, optimizer, store=tmp_path / "a.db", on_alarm=lambda _: run.close(), **options
    )
    around = nn.Sequential(model)  # another model of the same weights
    other = ampscope.watch(around, optimizer, store=tmp_path / "b.db", **options)
    for _ in range(6):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    other.close()
    assert len(recorded(run.store, run.id).steps) == 3
    assert len(recorded(other.store, other.id).steps) == 6


def _hooked(name: str, moment: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """A training with skips, whose watch raises in the hook ``name`` the second time it runs."""
    calls = []

    def call(
        self: Guard, function: Callable[..., object], *args: object, **facts: object
    ) -> object:
        inner = getattr(function, "func", function)
        if inner.__qualname__ != name:
            return plain_call(self, function, *args, **facts)

        def failing() -> object:
            calls.append(name)
            if len(calls) == 2 and moment == "before":
                raise ZeroDivisionError(name)
            result = function(*args, **facts)
            if len(calls) == 2:
                raise ZeroDivisionError(name)
            return result

        return plain_call(self, failing)

    plain_call = Guard.call
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "call", call)
        options: dict[str, object] = {"every": 1, "policy": "ignore"}
        _, seen = train_fp16(10, watching(store, **options)[0], bad_at=(3, 7), penalized=True)
    assert len(calls) >= 2, f"{name} runs in this training"
    return seen


def _hook_names(store: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: dict[str, int] = {}

    def call(
        self: Guard, function: Callable[..., object], *args: object, **facts: object
    ) -> object:
        name = getattr(function, "func", function).__qualname__
        names[name] = names.get(name, 0) + 1
        return plain_call(self, function, *args, **facts)

    plain_call = Guard.call
    with monkeypatch.context() as patch:
        patch.setattr(Guard, "call", call)
        watched, _ = watching(store, every=1, policy="ignore")
        train_fp16(10, watched, bad_at=(3, 7), penalized=True)
    return [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_error_in_any_hook_ends_the_watch_and_not_the_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    moment: str,
) -> None:
    """One hook after the other raises, before its work and after: weights, losses and scales are
    those of the training alone, and one line says what happened."""
    _, bare = train_fp16(10, bad_at=(3, 7), penalized=True)
    names = _hook_names(tmp_path / "names.db", monkeypatch)
    assert len(names) >= 12, names
    assert {"TrainingEvents._note_gradients", "WatchedClips._note"} <= set(names)
    for number, name in enumerate(names):
        capsys.readouterr()
        seen = _hooked(name, moment, tmp_path / f"{number}.db", monkeypatch)
        said = capsys.readouterr().err
        assert said == f"ampscope stopped watching: ZeroDivisionError: {name}\n", name
        assert all(map(torch.equal, bare.weights, seen.weights)), name
        np.testing.assert_array_equal(bare.losses, seen.losses)
        assert bare.scales == seen.scales, name
        assert_nothing_left()


def test_every_hook_of_a_watch_passes_the_guard() -> None:
    """What torch is given is made by the guard: nothing else may raise into a training."""
    folder = Path(ampscope.__file__).parent / "watcher"
    for path in folder.glob("*.py"):
        for line in path.read_text().splitlines():
            if "register_hook(" in line or ".subscribe(" in line:
                assert "guard.hook(" in line, f"{path.name}: {line.strip()}"


def test_process_wide_hooks_and_patches_are_made_in_two_modules() -> None:
    """Others ask these two, which let instruments leave in any order and from any thread. A script
    of the zoo is a user's, and torch's settings are no functions."""
    folder = Path(ampscope.__file__).parent
    hook = re.compile(r"\b(register_(module|optimizer)_\w+|register_multi_grad_hook)\b")
    patch = re.compile(r"^\s*torch\.(?!_dynamo\.config|backends)[\w.]+ = |setattr\(torch")
    found = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if path.parent.name != "scripts"
        for line in path.read_text().splitlines()
        if hook.search(line) or patch.search(line)
    }
    assert found == {"capture/global_hooks.py"}
