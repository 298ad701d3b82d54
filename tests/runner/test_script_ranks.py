"""Training in processes that a script starts is followed: mp.spawn, Process, and launchers."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import psutil
import pytest
import torch
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.diagnosis.load import load_diagnosis
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.launcher.plan import run_diagnosis
from ampscope.launcher.script_runs import ScriptRun, ScriptRuns
from ampscope.observations import Outcome
from ampscope.records import RunInfo, State
from ampscope.render.contract import document
from ampscope.runner.private_files import FORCED
from ampscope.runner.script_ranks import Ticket, _Record, follow, group_of
from ampscope.runner.script_text import SEED
from ampscope.store.reader import Reader
from tests.helpers.private_modes import MODES
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
    assert (run.info.state, outcome.steps, outcome.exit_code) == (State.FINISHED, 12, 0)
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


def runs_still(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status for a parent to read."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    text = PLAIN + "print('pid', os.getpid(), flush=True)\nos.write(int(os.environ['UP']), b'.')\n"
    written(tmp_path, f"{text}import time; time.sleep(600)\n", 1.0)
    launch = LAUNCH.replace(
        "ranks = [", "came, up = os.pipe()\nos.set_inheritable(up, True)\nranks = ["
    )
    launch = launch.replace("=str(rank))", "=str(rank), UP=str(up)), close_fds=False")
    both_are_up = "os.close(up)\nos.read(came, 1) and os.read(came, 1)"
    deepspeed_like(tmp_path, launch.replace('if "kill" in sys.argv:', f"{both_are_up}\nif True:"))
    run, _ = recorded(tmp_path, "-m deepspeed.launcher.runner", "train.py")
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", run.output)]
    assert 1 <= len(pids) <= 2  # what a rank prints as it is killed may be lost
    assert not any(map(runs_still, pids))


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
    assert (outcome.ended, outcome.steps, ranks) == ("returned", 12, [])


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
    assert run.observations[-1].steps == 12


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


# Ranks that train together, by gloo. A fault of one rank is in the gradients of all.

TOGETHER = """\
import os, sys, time
import torch
from torch import nn
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        h = self.up(torch.relu(self.inp(x)))
        return self.out(nn.functional.layer_norm(h.float(), (32,)))


def train(rank=0, world=2, steps=14):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        place = "file://" + os.path.abspath(f"rendezvous{os.getppid()}")
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    torch.manual_seed(0)
    net = DDP(Net())
    opt = torch.optim.SGD(net.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        opt.zero_grad()
        for part in range(PARTS):
            x = torch.randn(32, 16, generator=draw)
            y = torch.randint(0, 4, (32,), generator=draw)
            if rank == BAD and step >= 4:
                AT_FAULT
            net.require_backward_grad_sync = part == PARTS - 1  # what no_sync sets
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(net(x), y) / PARTS
            scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        mp.spawn(train, (2,), nprocs=2)
"""
OVERFLOWS = "x = x * 3e4"


def together(folder: Path, bad: int = 7, fault: str = OVERFLOWS, parts: int = 1) -> Path:
    """A script of two ranks; ``fault`` is what rank ``bad`` does with its batch from step 4 on."""
    path = folder / "train.py"
    text = TOGETHER.replace("AT_FAULT", fault).replace("BAD", str(bad))
    path.write_text(text.replace("PARTS", str(parts)))
    return path


def named_rank(report: DiagnosisResult) -> tuple[str, int, int]:
    """Cause, rank and step of the first finding, as the JSON has them."""
    assert not report.could_not_run, report.could_not_run
    found = document(report)["findings"]
    assert found, report.undecided or report.notes
    return found[0]["cause"], found[0]["rank"], found[0]["step"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_fault_of_one_rank_alone_is_its_own(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``parts`` of a batch, gradients are summed over the ranks in the last of them."""
    monkeypatch.chdir(tmp_path)
    report = diagnosed(together(tmp_path, 1, parts=parts), tmp_path / "runs.db")
    assert named_rank(report) == ("activation_overflow", 1, 4)
    assert told(report)[2] is True
    assert any("the skip at step 4 came from rank 1." in note for note in report.notes)
    with Reader(tmp_path / "runs.db") as reader:
        again = load_diagnosis(reader, report.runs["as_is"].id, again=True)
        assert named_rank(again) == ("activation_overflow", 1, 4)
        for control, info in report.runs.items():  # what a control changes, it changes on all
            ranks = reader.group(group_of(info.id))
            assert {(r.spec.rank, r.spec.control) for r in ranks} == {(0, control), (1, control)}
            losses = [s.loss for s in reader.steps(info.id)]
            assert losses == [s.loss for s in reader.steps(ranks[ranks[1].spec.rank == 1].id)]


@pytest.mark.slow
def test_a_fault_of_the_second_rank_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    together(tmp_path, 1)
    report = through(
        "torch.distributed.run", "--nproc_per_node=2", "--standalone", "train.py",
        folder=tmp_path, store=tmp_path / "runs.db",
    )  # fmt: skip
    assert named_rank(report) == ("activation_overflow", 1, 4)


@pytest.mark.slow
def test_ranks_that_train_well_together_have_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = diagnosed(together(tmp_path, parts=2), tmp_path / "runs.db")
    assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")
    assert any("Judged by rank 0 of 2" in note for note in report.notes)
    assert not any("one at a time" in note for note in report.notes)


@pytest.mark.slow
def test_an_error_of_the_second_rank_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's is that the other has closed its connection."""
    monkeypatch.chdir(tmp_path)
    path = together(tmp_path, 1, "raise KeyError('no data')")
    run, _ = recorded(tmp_path, str(path))
    outcome = run.observations[-1]
    assert isinstance(outcome, Outcome)
    assert (outcome.ended, outcome.error_type, outcome.rank) == ("exception", "KeyError", 1)
    assert "raised KeyError" in run.info.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("os.kill(os.getpid(), 9)", "process 1 terminated with signal SIGKILL"),
        ("time.sleep(600)", "passed the time limit of 25 s after [34] optimizer steps"),
    ],
)
def test_a_rank_that_dies_or_hangs_leaves_no_other_behind(
    end: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    path = together(tmp_path, 1, end)
    text = path.read_text().replace(
        "    torch.manual_seed(0)",
        # In a cache, which all runs share: what a rank prints as it is killed may be lost.
        f"    open('{cache}/' + str(os.getpid()), 'w').close()\n    torch.manual_seed(0)",
    )
    path.write_text(text)
    started = time.monotonic()
    report = diagnosed(path, tmp_path / "runs.db", time_limit_s=25.0)
    assert time.monotonic() - started < 120
    assert report.could_not_run or report.undecided
    assert re.search(expected, " ".join((report.could_not_run, *report.notes)))
    pids = [int(found.name) for found in cache.iterdir() if found.name.isdigit()]
    assert len(pids) >= 2  # of each run
    assert not any(map(runs_still, pids))


SHARDED = """\
import os, sys
import torch
from torch import nn
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def train(rank, world=2, steps=40):
    place = "file://" + os.path.abspath(f"rendezvous{os.getppid()}")
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for part in (net[0], net):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    draw = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(64, 16, generator=draw)
        y = x[:, :4].argmax(1)
        if rank == BAD and step >= 4:
            x = x * 6e4
        opt.zero_grad()
        loss = nn.functional.cross_entropy(net(x).float(), y)
        loss.backward()
        opt.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, nprocs=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, 7])
def test_a_sharded_training_with_a_policy(
    bad: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 casts to the dtypes of its policy, and so do the controls."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SHARDED.replace("BAD", str(bad)))
    report = diagnosed(path, tmp_path / "runs.db")
    with Reader(tmp_path / "runs.db") as reader:
        fp32 = reader.observations(report.runs["fp32"].id)[-1]
    assert isinstance(fp32, Outcome)
    assert (fp32.steps, fp32.flop_dtypes) == (40, ("fp32",))
    if bad == 1:
        assert named_rank(report) == ("activation_overflow", 1, 4)
        assert told(report)[2] is True
    else:
        assert (report.diagnosis.verdict, report.undecided) == ("no_fault", "")


LIGHTNING = """\
import sys
import torch
from torch import nn
from lightning import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(16, 32), nn.Linear(32, 4)

    def training_step(self, batch, index):
        x, y = batch
        if self.global_rank == 1 and index >= 4:
            x = x * 3e4
        with torch.autocast("cpu", torch.float16):
            h = nn.functional.layer_norm(self.inp(x).float(), (32,))
            return nn.functional.cross_entropy(self.out(h), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


if __name__ == "__main__":
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(640, 16), torch.randint(0, 4, (640,)))
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer = Trainer(accelerator="cpu", devices=2, strategy=sys.argv[1], max_steps=12, **quiet)
    trainer.fit(Net(), DataLoader(data, batch_size=16))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp_spawn", marks=pytest.mark.thorough)])
def test_the_ranks_that_lightning_starts_are_followed(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under ``ddp`` the script's own process is rank 0, and starts the others as it was started."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(LIGHTNING)
    report = diagnosed(path, tmp_path / "runs.db", verify=False, args=(strategy,))
    assert named_rank(report) == ("activation_overflow", 1, 4)
    with Reader(tmp_path / "runs.db") as reader:
        for info in report.runs.values():
            outcome = reader.observations(info.id)[-1]
            assert isinstance(outcome, Outcome)
            assert (outcome.rank, outcome.ranks, outcome.steps) == (1, 2, 12)


def test_a_rank_that_cannot_be_recorded_trains_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    store = str(tmp_path / "file" / "runs.db")
    ticket = Ticket(store, "none", "native", "train.py", 0, 1, bound=False)
    said = "ampscope: this rank is not recorded"
    assert follow(ticket, None, lambda: "trained") == "trained"  # type: ignore[arg-type]  # not called
    assert capfd.readouterr().err.count(said) == 1
    record = _Record(ticket, spec(tmp_path / "train.py"), None, None)
    step = SimpleNamespace(device=torch.device("cpu"))
    record.step(step)  # type: ignore[arg-type]  # the store fails before more of it is asked
    record.step(step)  # type: ignore[arg-type]  # as above
    assert capfd.readouterr().err.count(said) == 1


_WRITES = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp
def write(name): open(f"{os.path.dirname(os.path.abspath(__file__))}/{name}.txt", "w").write("x")
def train(rank=0, name="spawned"):
    write(name)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
if __name__ != "__main__": write("imported")
elif len(sys.argv) > 1: train(name="alone")
else:
    os.environ.clear()
    write("first")
    mp.spawn(train, nprocs=1)
    subprocess.run([sys.executable, __file__, "alone"], check=True)
"""


@pytest.mark.parametrize("kind", MODES)
def test_processes_started_without_an_environment_have_the_same_files(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCED, kind)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(_WRITES)
    with ScriptRuns(spec(path), tmp_path / "runs.db", private=True) as runs:
        run = runs.run("as_is")
        with Reader(tmp_path / "runs.db") as reader:
            assert [r.steps_done for r in reader.group(group_of(run.info.id))] == [2, 2]
    assert run.info.state is State.FINISHED, run.info.message
    assert [made.name for made in tmp_path.glob("*.txt")] == []
