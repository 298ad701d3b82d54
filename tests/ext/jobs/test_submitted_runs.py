"""A diagnosis whose runs are jobs, of submitit's local executor and of a Ray cluster with two
workers; what is refused before a job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.errors import BadInput
from ampscope.ext.jobs.submitted_runs import VARIABLE, SubmittedRuns
from ampscope.records import RunSpec
from ampscope.store.reader import Reader
from tests.helpers.diagnosis_contract import checked

OVERFLOWS = """
import torch
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
with torch.no_grad(): m[0].weight.mul_(3e5); m[1].weight.mul_(1e-5)
o = torch.optim.SGD(m.parameters(), 1e-9)
for i in range(6):
    o.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = m(torch.randn(16, 8)).float().mean()
    loss.backward(); o.step()
"""


def entered(tmp_path: Path, engine: str) -> None:
    spec = RunSpec("train.py", kind="script", time_limit_s=10.0)
    with SubmittedRuns(spec, tmp_path / "runs.db", engine):
        pass


def test_an_engine_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with monkeypatch.context() as without:
        for engine, library in (("slurm", "submitit"), ("ray", "ray")):
            without.setitem(sys.modules, library, None)
            with pytest.raises(BadInput, match=rf"pip install 'ampscope\[{engine}\]'"):
                entered(tmp_path, engine)
    pytest.importorskip("submitit")
    with pytest.raises(BadInput, match="no sbatch"):
        entered(tmp_path, "slurm")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("asked", ["gpu", "no_such_parameter=3"])
@pytest.mark.parametrize(("engine", "library"), [("local", "submitit"), ("ray", "ray")])
def test_a_parameter_that_there_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, library: str, asked: str
) -> None:
    pytest.importorskip(library)
    monkeypatch.setenv(VARIABLE, asked)
    with pytest.raises(BadInput, match=VARIABLE):
        entered(tmp_path, engine)
    assert not list(tmp_path.glob("*.jobs/*"))


def test_a_ray_cluster_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "no address")
    with pytest.raises(BadInput, match="No Ray cluster can be used"):
        entered(tmp_path, "ray")


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An engine that can take jobs."""
    if request.param == "local":
        pytest.importorskip("submitit")
        yield "local"
        return
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield "ray"
    ray.shutdown()


def test_the_jobs_give_the_verdict_and_their_runs_are_merged(engine: str, tmp_path: Path) -> None:
    script, out, store = tmp_path / "train.py", tmp_path / "o.json", tmp_path / "runs.db"
    script.write_text(OVERFLOWS)
    arguments = ["diagnose", "--on", engine, "--no-verify", "--quiet", "--store", store]
    done = CliRunner().invoke(main, [*map(str, arguments), "--json", str(out), str(script)])
    document = checked(out.read_text())
    assert done.exit_code == 1, json.dumps(document)
    assert document["findings"][0]["cause"] == "activation_overflow"
    assert document["findings"][0]["module"] == "0"
    with Reader(store) as reader:
        runs = {info.spec.control: info for info in reader.runs()}
    assert runs.keys() == {"as_is", "fp32"}
    assert runs["fp32"].spec.parent == runs["as_is"].id
    assert len({info.spec.group for info in runs.values()}) == 1
    assert not list(tmp_path.glob("*.jobs"))


FOREVER = """
import time, torch
w = torch.nn.Linear(2, 1)
o = torch.optim.SGD(w.parameters(), 0.1)
for _ in range(100_000):
    o.zero_grad(); w(torch.ones(4, 2)).mean().backward(); o.step(); time.sleep(0.01)
"""
LONGEST_S = 60.0


def started(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A diagnosis by jobs of this machine."""
    script = folder / "train.py"
    script.write_text(FOREVER)
    given = ["diagnose", "--on", "local", "--quiet", "--steps", "100000"]
    command = [sys.executable, "-m", "ampscope.cli.main", *given, "--store", "runs.db"]
    return subprocess.Popen(
        [*command, str(script), *more],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def below(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes of a command, once a job has a run's process."""
    own, deadline = psutil.Process(process.pid), time.monotonic() + LONGEST_S
    while time.monotonic() < deadline and process.poll() is None:
        found = own.children(recursive=True)
        lines = [" ".join(line(one)) for one in found]
        if sum("fork_server" in one for one in lines) >= 4:  # of two jobs, each with its run
            return found
        time.sleep(0.1)
    raise AssertionError(process.communicate(timeout=LONGEST_S)[0])


def line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def gone(processes: list[psutil.Process], within_s: float) -> list[list[str]]:
    """Command lines of those that are still there then; they are ended."""
    _, left = psutil.wait_procs(processes, within_s)
    lines = [line(one) for one in left if one.status() != psutil.STATUS_ZOMBIE]
    for one in left:
        with contextlib.suppress(psutil.Error):
            one.kill()
    return lines


@pytest.mark.slow
def test_jobs_of_this_machine_end_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """And what it left beside the store, the script's arguments among it, goes with the next."""
    pytest.importorskip("submitit")
    with started(tmp_path, "--word", "of-the-user") as process:
        processes = below(process)
        process.kill()
        process.wait()
    assert not gone(processes, 8.0)
    assert [path for path in tmp_path.glob("*.jobs/*/**/*") if path.suffix == ".pkl"]
    (tmp_path / "other.py").write_text("print('no training')")
    arguments = ["diagnose", "--quiet", "--store", str(tmp_path / "runs.db")]
    CliRunner().invoke(main, [*arguments, str(tmp_path / "other.py")])
    assert not list(tmp_path.glob("*.jobs"))


@pytest.mark.slow
@pytest.mark.parametrize("to_all", [True, False], ids=["by the terminal", "by kill"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_ends_jobs_of_this_machine_with_one_sentence(
    number: signal.Signals, to_all: bool, tmp_path: Path
) -> None:
    pytest.importorskip("submitit")
    with started(tmp_path) as process:
        processes = below(process)
        if to_all:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        said, _ = process.communicate(timeout=LONGEST_S)
    assert "Traceback" not in said, said
    assert said.count("What was recorded is kept.") == 1, said
    assert not gone(processes, 3.0)
    assert not list(tmp_path.glob("*.jobs"))
