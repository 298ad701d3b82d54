"""Scripts that change the process that they run in: equal numbers, every step, no slower way."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.late_imports import real_builtins
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from ampscope.records import Cadence, State
from ampscope.runner.script_ranks import group_of
from ampscope.store.reader import Reader
from tests.helpers.process_changes import CHANGES
from tests.helpers.script_runner import Ran, Runner, quick, spec, write_script

QUICK = ("print", "__import__", "warnings are errors", "NumPy raises")
_TRAIN = """
device = globals().get("DEVICE", None)
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
m = m.to(torch.float32)
if device: m = m.to_empty(device=device)
with torch.no_grad():
    for p in m.parameters():
        numbers = torch.arange(p.numel(), dtype=torch.float32, device="cpu")
        p.copy_(numbers.reshape(p.shape).sin() * 0.1)
o = torch.optim.SGD(m.parameters(), 0.05)
for step in range(5):
    x = torch.arange(128.0, dtype=torch.float32, device="cpu").add(step).sin().reshape(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x)
    loss = y.float().square().mean()
    o.zero_grad(); loss.backward(); o.step()
print("weights", float(sum(p.detach().double().abs().sum() for p in m.parameters())), flush=True)
if "END" in globals(): __import__("os")._exit(3)
"""
# One process for each change, as a script starts its workers.
_FORKS = f"""import torch, torch._dynamo
import torch.multiprocessing as mp
CHANGES, TRAIN = {CHANGES!r}, {_TRAIN!r}
def train(change):
    exec(compile(CHANGES[change], __file__, "exec"), globals())
    exec(compile(TRAIN, __file__, "exec"), globals())
for change in CHANGES:
    print("change:", change, flush=True)
    process = mp.get_context("fork").Process(target=train, args=(change,))
    process.start(); process.join(); print("left with", process.exitcode, flush=True)
"""
# Those that one script can make together.
_NOT_TOGETHER = ("stdout", "little recursion", "a timer", "little memory", "ends at once")
_TOGETHER = [name for name in CHANGES if name not in _NOT_TOGETHER]
# A spawned process is unpickled by what it has put in the place of __import__ by then.
_INSIDE = ("__import__", "modules are gone")
_SPAWNS = """import torch
import torch.multiprocessing as mp
if __name__ != "__main__": exec({before!r}, globals())
def train(rank): exec({inside!r}, globals())
if __name__ == "__main__": mp.spawn(train, nprocs=1)
"""


def _weights(out: str) -> list[str]:
    return [line for line in out.splitlines() if line.startswith("weights")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("owners")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[Runner]:
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        yield Runner(runs)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, str]:
    """What each change's script prints without ampscope, and the status that it leaves with."""
    path = write_script(folder, "plain.py", _FORKS)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    return _by_change(done.stdout)


def _by_change(out: str) -> dict[str, str]:
    return dict(re.findall(r"change: (.+)\n((?:weights .+\n)?left with .+)", out))


def _nothing_is_lost(outcome: Outcome) -> None:
    """Neither a fact that is missing nor the slow counter."""
    lost = [n for n in outcome.notes if "Not recorded" in n or "plain torch operations" in n]
    assert not lost, lost


def _ranks(ran: Ran, folder: Path) -> list[Outcome]:
    """What the processes that it started recorded, in their order."""
    with Reader(folder / "runs.db") as reader:
        found = sorted(reader.group(group_of(ran.run.info.id)), key=lambda rank: rank.spec.rank)
        last = [list(reader.observations(rank.id))[-1] for rank in found]
    return [outcome for outcome in last if isinstance(outcome, Outcome)]


@pytest.mark.parametrize("change", quick(CHANGES, *QUICK))
def test_a_script_owns_its_process(
    change: str, runner: Runner, plain: dict[str, str], folder: Path
) -> None:
    path = write_script(folder, f"{change}.py", f"import torch\n{CHANGES[change]}{_TRAIN}")
    ran = runner(path, cadence=Cadence(1, 1, 1))
    info = ran.run.info
    said = (info.message, info.traceback, ran.outcome.notes, ran.err.decode()[-3000:])
    assert info.state is State.FINISHED, said
    assert _weights(ran.out.decode()) == _weights(plain[change]), said
    assert ran.outcome.steps == 5, said
    _nothing_is_lost(ran.outcome)


def test_its_forked_processes_own_theirs(
    runner: Runner, plain: dict[str, str], folder: Path
) -> None:
    ran = runner(write_script(folder, "forks.py", _FORKS), cadence=Cadence(1, 1, 1))
    assert list(plain) == list(CHANGES)
    assert _by_change(ran.out.decode()) == plain, ran.err.decode()[-3000:]
    ranks = _ranks(ran, folder)
    assert [rank.steps for rank in ranks] == [5] * len(CHANGES)
    for rank in ranks:
        _nothing_is_lost(rank)


@pytest.mark.parametrize("way", ["torchrun", "spawn"])
def test_a_process_that_it_starts_owns_itself(way: str, runner: Runner, folder: Path) -> None:
    """All changes at once."""
    if way == "torchrun":
        text = "import torch\n" + "".join(CHANGES[name] for name in _TOGETHER) + _TRAIN
        path = write_script(folder, "torchrun.py", text)
        launch = ("--nproc_per_node=1", "--standalone", str(path))
        ran = runner("-m torch.distributed.run", launch, cadence=Cadence(1, 1, 1))
    else:
        before = "".join(CHANGES[name] for name in _TOGETHER if name not in _INSIDE)
        inside = "".join(CHANGES[name] for name in _INSIDE) + _TRAIN
        text = _SPAWNS.format(before=before, inside=inside)
        ran = runner(write_script(folder, "spawn.py", text), cadence=Cadence(1, 1, 1))
    said = ran.err.decode()[-3000:]
    assert _weights(ran.out.decode()), said
    (rank,) = _ranks(ran, folder)
    assert (rank.steps, ran.outcome.steps, ran.outcome.exit_code) == (5, 5, 0), said
    _nothing_is_lost(ran.outcome)


def test_pythons_own_functions_stay_while_any_thread_needs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def own(*args: object) -> None:
        raise AssertionError("the script's own print was called")

    real = builtins.print
    monkeypatch.setattr(builtins, "print", own)
    is_inside, leaves = threading.Event(), threading.Event()

    def other() -> None:
        with real_builtins():
            is_inside.set()
            leaves.wait(60)

    thread = threading.Thread(target=other)
    with real_builtins():
        thread.start()
        assert is_inside.wait(60)
    still = builtins.print
    leaves.set()
    thread.join()
    assert (still, builtins.print) == (real, own)
