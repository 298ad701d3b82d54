"""Training in processes that a script starts is followed: mp.spawn, Process, and launchers."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import numpy
import psutil
import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.launcher.plan import run_diagnosis
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import Outcome
from ampscope.records import RunInfo, State
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
command = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", *sys.argv[1:]]
sys.exit(subprocess.run(command).returncode)
"""
LAUNCH = """\
import os, subprocess, sys
assert "LOCAL_RANK" not in os.environ
ranks = [
    subprocess.Popen([sys.executable, *sys.argv[1:]], env=dict(os.environ, LOCAL_RANK=str(rank)))
    for rank in range(2)
]
if "kill" in sys.argv:
    os.kill(os.getpid(), 9)
sys.exit(max(rank.wait() for rank in ranks))
"""
SPAWNS = """\
import torch.multiprocessing as mp
import train
if __name__ == "__main__":
    mp.spawn(train.train, (12,), nprocs=2)
"""


def deepspeed_like(folder: Path, launch: str = LAUNCH) -> None:
    """DeepSpeed's runner starts one launcher per node, and that one the ranks."""
    (folder / "deepspeed" / "launcher").mkdir(parents=True)
    for name, text in (("runner", NODES), ("launch", launch), ("__init__", "")):
        (folder / "deepspeed" / "launcher" / f"{name}.py").write_text(text)
    (folder / "deepspeed" / "__init__.py").write_text("")


def recorded(folder: Path, workload: str, *args: str) -> tuple[ScriptRun, list[RunInfo]]:
    """The baseline run alone, and the ranks that it recorded."""
    made = dataclasses.replace(spec(folder / "train.py"), workload=workload, args=args)
    with ScriptRuns(made, folder / "runs.db", private=True) as runs:
        run = runs.run("as_is")
    with Reader(folder / "runs.db") as reader:
        return run, reader.group(group_of(run.info.id))


@pytest.mark.slow
def test_what_a_launcher_of_launchers_starts_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN, 300.0)
    deepspeed_like(tmp_path)
    out = tmp_path / "out.json"
    command = ["diagnose", "--quiet", "--no-verify", "--store", str(tmp_path / "runs.db")]
    command += ["--time-limit", "60", "--json", str(out), "deepspeed", "train.py"]
    assert CliRunner().invoke(main, command).exit_code == 1
    found = json.loads(out.read_text())
    assert (found["findings"][0]["cause"], found["findings"][0]["module"]) == (
        "activation_overflow", "up"
    )  # fmt: skip
    with Reader(tmp_path / "runs.db") as reader:
        ranks = reader.group(group_of(found["runs"]["as_is"]))
        assert [r.steps_done for r in ranks] == [12, 12]


@pytest.mark.slow
def test_what_a_launcher_of_launchers_spawns_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is pickled for a spawned process is not of the launcher's ``__main__``."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, NET, 1.0)
    deepspeed_like(tmp_path, SPAWNS)
    run, ranks = recorded(tmp_path, "-m deepspeed.launcher.runner")
    assert sorted((r.spec.rank, r.spec.world, r.steps_done) for r in ranks) == [
        (0, 2, 12), (1, 2, 12)
    ]  # fmt: skip
    assert run.info.state is State.FINISHED


@pytest.mark.slow
def test_the_exit_status_of_a_rank_is_the_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, PLAIN + "sys.exit(3 * int(os.environ['LOCAL_RANK']))\n", 1.0)
    deepspeed_like(tmp_path)
    run, ranks = recorded(tmp_path, "-m deepspeed.launcher.runner", "train.py")
    outcome = run.observations[-1]
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.exit_code, len(ranks)) == ("exit", 3, 2)


@pytest.mark.slow
def test_no_rank_outlives_a_launcher_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = PLAIN + "print('pid', os.getpid(), flush=True)\nimport time; time.sleep(600)\n"
    written(tmp_path, text, 1.0)
    deepspeed_like(
        tmp_path, LAUNCH.replace('if "kill" in sys.argv:', "import time; time.sleep(20)\nif True:")
    )
    run, _ = recorded(tmp_path, "-m deepspeed.launcher.runner", "train.py")
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", run.output)]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


HELPED = """\
import subprocess, sys, threading
from train import train

def serve():
    global server
    server = subprocess.Popen([sys.executable, "-m", "pkg.serve"], stdin=subprocess.PIPE)

starting = threading.Thread(target=serve)
starting.start()
starting.join()
train()
server.stdin.close()
assert server.wait() == 5
"""
SERVE = "import sys\nsys.stdin.read()\nsys.exit(5)\n"


@pytest.mark.slow
def test_a_helper_of_a_package_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trains nothing, was started by a thread that has ended, and runs to its own end."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, NET, 1.0)
    (tmp_path / "pkg").mkdir()
    for name, text in (("__init__", ""), ("work", HELPED), ("serve", SERVE)):
        (tmp_path / "pkg" / f"{name}.py").write_text(text)
    run, ranks = recorded(tmp_path, "-m pkg.work")
    outcome = run.observations[-1]
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.attempts, ranks) == ("returned", 12, [])


@pytest.mark.slow
def test_a_module_of_the_users_that_trains_is_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, NET, 1.0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.py").write_text("from train import train\ntrain()\n")
    starts = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'mine.work'], check=True)\n"
    )
    (tmp_path / "start.py").write_text(starts)
    run, ranks = recorded(tmp_path, str(path.with_name("start.py")))
    assert [r.steps_done for r in ranks] == [12]
    assert isinstance(run.observations[-1], Outcome)
    assert run.observations[-1].attempts == 12


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
