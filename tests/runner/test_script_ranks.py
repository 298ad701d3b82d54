"""Training in processes that a script starts is followed: mp.spawn, Process, and launchers."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path

import numpy
import pytest

from ampscope.diagnosis.result import DiagnosisResult
from ampscope.launcher.plan import run_diagnosis
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from ampscope.records import State
from ampscope.runner.private_files import FORCED, MIRROR
from ampscope.runner.script_ranks import group_of
from ampscope.runner.script_text import SEED
from ampscope.store.reader import Reader
from tests.helpers.script_diagnoses import diagnosed, spec, told

NET = """\
import os, sys
import torch
from torch import nn
import torch.multiprocessing as mp


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)
        with torch.no_grad():
            self.up.weight.mul_(300)

    def forward(self, x):
        h = self.up(torch.relu(self.inp(x)) * GAIN)
        return self.out(nn.functional.layer_norm(h.float(), (32,)))


def train(rank=0, steps=12):
    torch.manual_seed(0)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = torch.randn(32, 16), torch.randint(0, 4, (32,))
    for step in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()


def talk(queue):
    queue.put("no training here")
"""
SPAWN = NET + "\nif __name__ == '__main__':\n    mp.spawn(train, (12,), nprocs=RANKS)\n"
PROCESS = NET + (
    "\nif __name__ == '__main__':\n    p = mp.get_context('METHOD').Process(target=train)\n"
    "    p.start(); p.join(); sys.exit(p.exitcode)\n"
)
TORCHRUN = ("--nproc_per_node=1", "--standalone", "train.py")
PLAIN = NET + "\nassert 'LOCAL_RANK' in os.environ\ntrain()\n"


def written(folder: Path, text: str, gain: float) -> Path:
    path = folder / "train.py"
    path.write_text(text.replace("GAIN", str(gain)))
    return path


def through(module: str, *args: str, folder: Path, store: Path) -> DiagnosisResult:
    """The diagnosis of ``python -m module args``."""
    made = dataclasses.replace(spec(folder / "train.py"), workload=f"-m {module}", args=args)
    return run_diagnosis(made, store)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_fault_in_spawned_processes_is_told(ranks: int, tmp_path: Path) -> None:
    path = written(tmp_path, SPAWN.replace("RANKS", str(ranks)), 300.0)
    report = diagnosed(path, tmp_path / "runs.db")
    assert told(report) == ("activation_overflow", "up", True)
    with Reader(tmp_path / "runs.db") as reader:
        found = reader.group(group_of(report.runs["as_is"].id))
        assert sorted(r.spec.rank for r in found) == list(range(ranks))
        assert {r.spec.world for r in found} == {ranks}
        assert all(r.steps_done == 12 for r in found)


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_a_fault_in_a_process_is_told(method: str, tmp_path: Path) -> None:
    path = written(tmp_path, PROCESS.replace("METHOD", method), 300.0)
    assert told(diagnosed(path, tmp_path / "runs.db")) == ("activation_overflow", "up", True)


def test_a_healthy_spawned_training_has_no_fault(tmp_path: Path) -> None:
    path = written(tmp_path, SPAWN.replace("RANKS", "1"), 1.0)
    report = diagnosed(path, tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")
    assert any("Judged by rank 0 of 1" in note for note in report.notes)


def test_torchrun_with_one_process_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = "import random, numpy\nprint('drawn', random.random(), numpy.random.rand())\n"
    written(tmp_path, PLAIN.replace("assert", drawn + "assert"), 1.0)
    launched = dataclasses.replace(
        spec(tmp_path / "train.py"), workload="-m torch.distributed.run", args=TORCHRUN
    )
    with ScriptRuns(launched, tmp_path / "runs.db", private=True) as runs:
        run = runs.run("as_is")
    outcome = run.observations[-1]
    assert isinstance(outcome, Outcome)
    assert (run.info.state, outcome.attempts, outcome.exit_code) == (State.FINISHED, 12, 0)
    assert run.info.steps_done == 12
    expected = random.Random(SEED).random(), numpy.random.RandomState(SEED).rand()
    assert "drawn {} {}".format(*expected) in run.output  # each run of a rank draws the same


NODES = """\
import os, subprocess, sys
command = [sys.executable, "-u", "-m", "nodes.launch", *sys.argv[1:]]
sys.exit(subprocess.run(command).returncode)
"""
LAUNCH = """\
import os, subprocess, sys
assert "LOCAL_RANK" not in os.environ
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env=dict(os.environ, LOCAL_RANK=str(rank)))
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


def test_what_a_launcher_of_launchers_starts_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's runner starts one launcher per node, and that one the ranks."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN, 300.0)
    package = tmp_path / "nodes"
    package.mkdir()
    for name, text in (("__init__", ""), ("runner", NODES), ("launch", LAUNCH)):
        (package / f"{name}.py").write_text(text)
    report = through("nodes.runner", "train.py", folder=tmp_path, store=tmp_path / "runs.db")
    assert told(report) == ("activation_overflow", "up", True)
    with Reader(tmp_path / "runs.db") as reader:
        found = reader.group(group_of(report.runs["as_is"].id))
        assert [r.steps_done for r in found] == [12, 12]


@pytest.mark.thorough
def test_a_fault_under_torchrun_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN, 300.0)
    report = through(
        "torch.distributed.run", *TORCHRUN, folder=tmp_path, store=tmp_path / "runs.db"
    )
    assert told(report) == ("activation_overflow", "up", True)


@pytest.mark.thorough
def test_accelerate_launch_with_one_process_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    written(tmp_path, PLAIN.replace("'LOCAL_RANK' in os.environ", "True"), 300.0)
    report = through(
        "accelerate.commands.launch", "--cpu", "--num_processes=1", "train.py",
        folder=tmp_path, store=tmp_path / "runs.db",
    )  # fmt: skip
    assert told(report) == ("activation_overflow", "up", True)


def test_a_child_that_trains_nothing_is_no_rank(tmp_path: Path) -> None:
    text = NET + (
        "\nif __name__ == '__main__':\n    context = mp.get_context('fork')\n"
        "    queue = context.Queue()\n    p = context.Process(target=talk, args=(queue,))\n"
        "    p.start(); print(queue.get()); p.join()\n    train()\n"
    )
    report = diagnosed(written(tmp_path, text, 1.0), tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")
    with Reader(tmp_path / "runs.db") as reader:
        assert reader.group(group_of(report.runs["as_is"].id)) == []


@pytest.mark.slow
def test_the_error_of_a_rank_is_told_and_not_its_launchers(tmp_path: Path) -> None:
    text = PROCESS.replace("METHOD", "fork").replace("target=train", "target=fails")
    text = text.replace("def talk", "def fails():\n    raise KeyError('no data')\n\n\ndef talk")
    path = written(tmp_path, text, 1.0)
    report = diagnosed(path, tmp_path / "runs.db")
    line = 1 + path.read_text().splitlines().index("    raise KeyError('no data')")
    assert f"raised KeyError at train.py:{line} before its first optimizer step" in report.undecided


def test_other_programs_are_started_as_they_are(tmp_path: Path) -> None:
    text = NET + (
        "\nimport subprocess\n"
        "assert subprocess.check_output([sys.executable, '-c', 'print(1)']) == b'1\\n'\n"
        "assert subprocess.check_output(['echo', 'x']) == b'x\\n'\n"
        "assert subprocess.check_output('echo y', shell=True) == b'y\\n'\ntrain()\n"
    )
    report = diagnosed(written(tmp_path, text, 1.0), tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")
    assert sys.executable


@pytest.mark.thorough
def test_a_spawned_process_writes_into_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, MIRROR)
    monkeypatch.chdir(tmp_path)
    text = SPAWN.replace("RANKS", "1").replace(
        "    torch.manual_seed(0)\n",
        f"    torch.manual_seed(0)\n    open('{tmp_path}/made.txt', 'w').write('x')\n",
    )
    report = diagnosed(written(tmp_path, text, 1.0), tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")
    assert not (tmp_path / "made.txt").exists()
