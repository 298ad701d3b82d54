"""Scripts that change the process that they run in: equal numbers, every step, no slower way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import Cadence, State
from tests.helpers.script_runner import OnDemand, Runner, quick, spec, write_script

CHANGES = {
    "print": """
import builtins
real_print = builtins.print
def print(*args, **kwargs): real_print(*args, **kwargs)
builtins.print = print
""",
    "open": """
import builtins
real_open = builtins.open
def open(*args, **kwargs): return real_open(*args, **kwargs)
builtins.open = open
""",
    "__import__": """
import builtins
real_import = builtins.__import__
def watching(name, *args, **kwargs):
    if name.partition(".")[0] in ("numba", "llvmlite", "ampscope"): raise ImportError(name)
    return real_import(name, *args, **kwargs)
builtins.__import__ = watching
""",
    "stdout": """
import io, sys
kept = sys.stdout
class Quiet(io.StringIO):
    def write(self, text): return kept.write(text)
    def flush(self): raise RuntimeError("no")
sys.stdout = Quiet()
""",
    "excepthook": "import sys\nsys.excepthook = lambda *args: 1 / 0\n",
    "warnings are errors": "import warnings\nwarnings.simplefilter('error')\n",
    "NumPy raises": "import numpy\nnumpy.seterr(all='raise')\n",
    "fp64 by default": "torch.set_default_dtype(torch.float64)\n",
    "a default device": "torch.set_default_device('meta')\nDEVICE = 'cpu'\n",
    "one thread": "torch.set_num_threads(1)\n",
    "elsewhere": "import os, tempfile\nos.chdir(tempfile.mkdtemp())\n",
    "no environment": "import os\nos.environ.clear()\n",
    "no path": "import torch._dynamo\nimport sys\nsys.path[:] = []\n",
    "signals": """
import signal
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM):
    signal.signal(one, lambda *args: None)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
""",
    "settrace": "import sys\nsys.settrace(lambda *args: None)\n",
    "atexit": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "few files": """
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (96, hard))
""",
    "patched torch": """
call, backward = torch.nn.Module.__call__, torch.Tensor.backward
torch.nn.Module.__call__ = lambda self, *args, **kwargs: call(self, *args, **kwargs)
torch.Tensor.backward = lambda self, *args, **kwargs: backward(self, *args, **kwargs)
""",
    "modules are gone": """
import sys
for name in [n for n in sys.modules if n.startswith("ampscope")]: del sys.modules[name]
""",
    "no collection": "import gc\ngc.disable(); gc.freeze()\n",
    "little recursion": "import sys\nsys.setrecursionlimit(400)\n",
}
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
def plain(folder: Path) -> OnDemand[list[str]]:
    """What a change's script prints without ampscope, run alone."""

    def run(change: str) -> list[str]:
        path = write_script(
            folder, f"plain {change}.py", f"import torch\n{CHANGES[change]}{_TRAIN}"
        )
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        assert _weights(done.stdout), done.stderr
        return _weights(done.stdout)

    return OnDemand(run)


@pytest.mark.parametrize("change", quick(CHANGES, *QUICK))
def test_a_script_owns_its_process(
    change: str, runner: Runner, plain: OnDemand[list[str]], folder: Path
) -> None:
    path = write_script(folder, f"{change}.py", f"import torch\n{CHANGES[change]}{_TRAIN}")
    ran = runner(path, cadence=Cadence(1, 1, 1))
    info = ran.run.info
    said = (info.message, info.traceback, ran.outcome.notes, ran.err.decode()[-3000:])
    assert info.state is State.FINISHED, said
    assert _weights(ran.out.decode()) == plain[change], said
    assert ran.outcome.steps == 5, said
    # Neither a fact that is missing nor the slow counter.
    lost = [n for n in ran.outcome.notes if "Not recorded" in n or "plain torch operations" in n]
    assert not lost, lost
