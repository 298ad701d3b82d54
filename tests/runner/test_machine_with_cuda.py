"""Scripts on a machine with GPUs: until a script itself starts CUDA, nothing else does.

A process that has asked CUDA for its devices has CUDA_VISIBLE_DEVICES read for good and can fork no
trainer that uses CUDA; one that has started it holds memory on a GPU (PyTorch's notes on
multiprocessing, "poison fork"; CUDA C Programming Guide, "CUDA Environment Variables").
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ampscope.hardware.gpu import GpuSurvey
from ampscope.launcher.launch import follow, launch
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import RunSpec, State
from ampscope.runner import device
from tests.helpers import recorded_cuda
from tests.helpers.script_runner import Runner, spec, write_script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")

SHOW = 'import torch; print("calls:", *torch.cuda.calls, flush=True)'
TRAIN = "from base import *\nfor _ in range(2): step()"
TARGET = f"""
import os, torch
import torch.multiprocessing as mp
def train(*_):
    {SHOW}
    from base import step
    for _ in range(2): step()
    {SHOW}
if __name__ == "__main__":
"""
STARTS = {
    "fork": "    p = mp.get_context('fork').Process(target=train); p.start(); p.join()",
    "spawn": "    mp.spawn(train, nprocs=1)",
    "torchrun": "    train()",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        recorded_cuda.in_children(folder / "site", patch)
        yield folder


@pytest.fixture(scope="module")
def runner(site: Path) -> Iterator[Runner]:
    with ScriptRuns(spec(), site / "runs.db") as runs:
        yield Runner(runs)


PLACED = """class Placed(torch.nn.Parameter):
    device = property(lambda tensor: torch.device("cuda", 0))
"""


def calls(out: bytes) -> list[str]:
    """What each print of :data:`SHOW` listed."""
    lines = out.decode().splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith("calls:")]


@pytest.mark.parametrize("policy", ["native", "cuda"])
@pytest.mark.parametrize(
    "control", ["as_is", "fp32", "fp32_modules:m", "op_lists:softmax=half", "compiled"]
)
def test_a_script_on_the_cpu_is_one_where_there_are_gpus_too(
    runner: Runner, tmp_path: Path, control: str, policy: str
) -> None:
    """Nothing of CUDA is called before its first line or after; its device, its policy, its price
    and its memory are those of the CPU."""
    path = write_script(tmp_path, "train.py", f"{SHOW}\n{TRAIN}\n{SHOW}\n")
    ran = runner(path, control=control, policy=policy)
    assert calls(ran.out) == ["", ""], (ran.err, ran.run.info.message, ran.run.info.traceback)
    machine, outcome = ran.run.info.machine, ran.outcome
    assert machine is not None
    assert (machine.device, machine.policy, outcome.steps) == ("cpu", "native", 2)
    assert "NVIDIA" not in machine.device_name
    assert outcome.peak_bytes > 2**20
    assert outcome.step_cpu_s > 0 or control == "compiled"


def test_a_script_that_starts_cuda_and_trains_on_the_cpu_was_on_the_cpu(
    runner: Runner, tmp_path: Path
) -> None:
    path = write_script(tmp_path, "train.py", f"{SHOW}\ntorch.cuda.init()\n{TRAIN}")
    ran = runner(path)
    assert calls(ran.out) == [""], ran.err
    assert ran.run.info.machine is not None
    assert (ran.run.info.machine.device, ran.run.info.machine.policy) == ("cpu", "native")
    assert ran.outcome.peak_bytes > 2**20


def test_a_script_that_fails_before_a_step_was_on_the_device_that_it_had_chosen(
    runner: Runner, tmp_path: Path
) -> None:
    text = f"{SHOW}\ntorch.cuda.init()\nraise ValueError\n"
    ran = runner(write_script(tmp_path, "train.py", text))
    assert calls(ran.out) == [""], ran.err
    machine = ran.run.info.machine
    assert machine is not None
    assert (machine.device, machine.device_name) == ("cuda:1", "H100 number 1")
    assert (machine.policy, machine.capability) == ("cuda", "9.0")


def test_a_memory_limit_bounds_the_gpus_once_the_script_starts_cuda(
    runner: Runner, tmp_path: Path
) -> None:
    """A limit on the process's private memory is one under which CUDA does not start."""
    limit = "import resource; print(resource.getrlimit(resource.RLIMIT_DATA)[0])"
    text = f"{SHOW}\n{limit}\ntorch.cuda.init()\n{SHOW}\nprint('on', torch.cuda.current_device())"
    ran = runner(write_script(tmp_path, "train.py", text), memory_limit_mib=16 * 1024)
    before, after = calls(ran.out)
    assert before == ""
    assert [f"_cuda_setMemoryFraction(0.25, {n})" in after for n in (0, 1)] == [True, True]
    assert "\n-1\n" in ran.out.decode()  # RLIM_INFINITY
    assert "on 1" in ran.out.decode()  # as without the limit


def test_a_script_is_on_the_gpu_that_its_parameters_are_on(runner: Runner, tmp_path: Path) -> None:
    """Of two; the current device is not asked. ``Placed`` says so of parameters on the CPU."""
    text = f"""
{SHOW}
{PLACED}
torch.cuda.init()
w = Placed(torch.ones(4))
o = torch.optim.SGD([w], 0.1, foreach=False)
for _ in range(2):
    o.zero_grad(); w.square().sum().backward(); o.step()
"""
    ran = runner(write_script(tmp_path, "train.py", text))
    assert calls(ran.out) == [""], ran.err
    machine = ran.run.info.machine
    assert machine is not None, ran.run.info.message
    assert (machine.device, machine.device_name) == ("cuda:0", "H100 number 0")
    assert (ran.outcome.steps, ran.outcome.step_cpu_s) == (2, 0.0), ran.run.info.message


def test_a_script_chooses_its_gpus_itself(runner: Runner, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES is read when CUDA is first asked: the script's choice comes in time."""
    text = f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'\n{SHOW}\n{TRAIN}"
    ran = runner(write_script(tmp_path, "train.py", text))
    assert calls(ran.out) == [""]


@pytest.mark.parametrize("start", STARTS)
def test_nothing_of_cuda_is_called_in_processes_that_a_script_starts(
    runner: Runner, site: Path, tmp_path: Path, start: str
) -> None:
    path = write_script(tmp_path, "train.py", f"{TARGET}{STARTS[start]}\n    {SHOW}\n")
    if start == "torchrun":
        module = "-m torch.distributed.run"
        ran = runner(module, ["--standalone", "--nproc-per-node=1", str(path)])
    else:
        ran = runner(path)
    assert calls(ran.out) == ["", "", ""], (ran.out, ran.err)
    assert (ran.outcome.steps, ran.outcome.ranks) == (2, 1)
    assert ran.run.info.machine is not None
    assert (ran.run.info.machine.device, ran.run.info.machine.policy) == ("cpu", "native")


def test_a_watch_calls_nothing_of_cuda(site: Path, tmp_path: Path) -> None:
    """Before the user's own first call; the model is on the CPU."""
    text = f"""
import torch, ampscope
m = torch.nn.Linear(4, 2)
o = torch.optim.SGD(m.parameters(), 0.1)
with ampscope.watch(m, o, every=1, store={str(tmp_path / "runs.db")!r}):
    for _ in range(3):
        o.zero_grad(); m(torch.randn(8, 4)).square().mean().backward(); o.step()
{SHOW}
"""
    path = write_script(tmp_path, "watched.py", text)
    ran = subprocess.run([sys.executable, path], capture_output=True, check=False)
    assert calls(ran.stdout) == [""], ran.stderr


WORKLOAD = """
import torch
from ampscope import Workload
def build(seed):
    with open({out!r}, "w") as out:
        print(*torch.cuda.calls, file=out)
    model = torch.nn.Linear(4, 2)
    return Workload(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        batches=[torch.randn(8, 4)],
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
"""


def test_a_probe_on_the_cpu_calls_nothing_of_cuda(site: Path, tmp_path: Path) -> None:
    out = tmp_path / "calls.txt"
    path = write_script(tmp_path, "workload.py", WORKLOAD.format(out=str(out)))
    store = tmp_path / "runs.db"
    run_id = launch(RunSpec(str(path), precision="bf16", device="cpu", steps=2), store)
    *_, info = follow(store, run_id)
    assert info.state is State.FINISHED, info.message
    assert out.read_text() == "\n"


def test_processes_that_wait_for_a_run_call_nothing_of_cuda(site: Path) -> None:
    """The one that forks a script's runs, the one that waits for a measurement."""
    text = f"""
{SHOW}
import ampscope.runner.script, ampscope.runner.fork_server, ampscope.runner.__main__
import importlib
from ampscope.measurements import KINDS
for kind in KINDS.values():
    importlib.import_module(kind.measure.partition(":")[0])
from ampscope.runner.probe import preload
torch.manual_seed(0)
preload(torch.device("cpu"))
{SHOW}
"""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, check=False)
    assert calls(ran.stdout) == ["", ""], ran.stderr


ENVIRONMENT = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("count", "driver", "built", "found"),
    [
        (2, "13.0", "13.0", True),
        (0, "13.0", "13.0", False),  # CUDA_VISIBLE_DEVICES leaves none
        (1, "12.4", "13.0", False),  # the driver is too old for this torch
        (1, "13.2", "12.6", True),
        (1, "12.2", "12.8", True),  # minor versions are compatible (CUDA Compatibility, NVIDIA)
        (1, None, "13.0", True),
    ],
)
def test_whether_there_is_cuda_follows_nvml(
    monkeypatch: pytest.MonkeyPatch, count: int, driver: str | None, built: str, found: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(device, "_survey", lambda: GpuSurvey(cuda_driver=driver))
    assert device._is_visible.__wrapped__(None) is found


def test_a_variable_that_is_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 2)
    monkeypatch.setattr(device, "_survey", GpuSurvey)
    device._is_visible.cache_clear()
    found = {}
    for listed in ("0", "", "-1", "5", "1,0"):
        monkeypatch.setenv(ENVIRONMENT, listed)
        found[listed] = device.has_cuda()
    device._is_visible.cache_clear()
    assert found == {"0": True, "": False, "-1": False, "5": False, "1,0": True}


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize(
    ("count", "version", "found"), [(1, 13000, True), (0, 13000, False), (1, 12080, False)]
)
def test_without_nvml_the_driver_answers_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, version: int, found: bool
) -> None:
    """As for a MIG slice in CUDA_VISIBLE_DEVICES, and in a container without NVML."""
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv(ENVIRONMENT, "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f")
    device._is_visible.cache_clear()
    assert not device.has_cuda()  # there is no driver at all
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: None)  # the linker's path is fixed here
    source = tmp_path / "driver.c"
    source.write_text(
        "int cuInit(unsigned flags) { return 0; }\n"
        f"int cuDeviceGetCount(int *count) {{ *count = {count}; return 0; }}\n"
        f"int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n"
    )
    command = ["cc", "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1"]
    subprocess.run(command, check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    device._is_visible.cache_clear()
    assert device.has_cuda() is found
    device._is_visible.cache_clear()


def test_an_allocator_that_knows_no_limit_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error in what is done as CUDA starts would be the script's."""

    def refuses(*args: object) -> None:
        raise RuntimeError("CUDAPluggableAllocator does not yet support setMemoryFraction")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=8)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuses)
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: call())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    device.limit_memory(1, "cuda")
    assert "CUDAPluggable" in capsys.readouterr().err


@pytest.mark.parametrize("made", ["torch.nn.Parameter", "Placed"])
def test_the_clock_of_a_script_waits_for_the_gpu_of_its_parameters(
    tmp_path: Path, made: str
) -> None:
    """A script on the CPU waits for none: to wait starts CUDA."""
    script = f"""
import torch
{PLACED}
w = {made}(torch.ones(4))
o = torch.optim.SGD([w], 0.1, foreach=False)
for _ in range(9):
    o.zero_grad(); w.square().sum().backward(); o.step()
"""
    path, out = write_script(tmp_path, "train.py", script), tmp_path / "out"
    text = f"""
import torch
from pathlib import Path
from ampscope.runner import step_clock
torch.cuda.is_available = lambda: True
torch.cuda.synchronize = lambda *device: print("waits for", *device)
step_clock.main(3, Path({str(out)!r}), {str(path)!r})
"""
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, check=True)
    assert len(json.loads(out.read_text())) == 3
    waits = ran.stdout.decode().splitlines()
    assert set(waits) == ({"waits for cuda:0"} if made == "Placed" else set())
