"""A script finds the world as Python shows it: paths, arguments, imports, processes, hooks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from tests.helpers.script_runner import OnDemand, Ran, Runner, quick, spec, write_script

LOADER = """
import sys, torch
from base import m, o
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    data = TensorDataset(torch.arange(32.0).reshape(8, 4))
    for x, in DataLoader(data, 4, num_workers=1, multiprocessing_context="spawn"):
        o.zero_grad(); m(x).mean().backward(); o.step(); print(x.sum().item())
"""


@dataclass(frozen=True)
class Case:
    """A script, what it prints (None: what plain Python does on this machine), and how many steps
    were seen."""

    name: str
    text: str
    prints: str | None
    steps: int = 1
    code: int = 0
    args: tuple[str, ...] = ()


CASES = (
    Case("argv", "import sys; from base import *; step(); print(sys.argv[1:], __name__)",
         "['--steps', '9', '--json', 'x', '--', '-m'] __main__\n",
         args=("--steps", "9", "--json", "x", "--", "-m")),
    Case("päth with space", "from base import *; step(); print(__file__.rpartition('/')[2])",
         "päth with space.py\n"),
    Case("chdir", "import os\nfrom base import *\nos.mkdir('a'); os.chdir('a')\n"
         "step(); os.chdir('..'); step(); open('a/x', 'w').write('r'); print(open('a/x').read())",
         "r\n", 2),
    Case("excepthook", "import sys\nfrom base import *\nstep()\n"
         "sys.excepthook = lambda t, v, b: print('mine', t.__name__, v, b.tb_lineno)\n1 / 0",
         "mine ZeroDivisionError division by zero 5\n", code=1),
    Case("bad_excepthook", "import sys\nfrom base import *\nstep()\n"
         "sys.excepthook = lambda t, v, b: 1 / 0\nraise KeyError('x')", "", code=1),
    Case("signals", "import signal, os\nfrom base import *\n"
         "signal.signal(signal.SIGTERM, lambda *a: print('term'))\n"
         "signal.signal(signal.SIGINT, lambda *a: print('int'))\n"
         "step(); os.kill(os.getpid(), 15); os.kill(os.getpid(), 2); step()", "term\nint\n", 2),
    Case("faulthandler", "import faulthandler\nfrom base import *\nfaulthandler.enable()\n"
         "faulthandler.dump_traceback_later(60); step()\n"
         "faulthandler.cancel_dump_traceback_later(); print('ok')", "ok\n"),
    Case("deletes_itself", "import os, inspect\nfrom base import *\nos.remove(__file__)\nstep()\n"
         "def f(): pass\nprint(inspect.getsource(f))", "def f(): pass\n\n"),
    Case("threads", "import threading\nfrom base import *\ndef run(): step(); print('thread')\n"
         "t = threading.Thread(target=run); t.start(); t.join(); step()", "thread\n", 2),
    Case("late_thread", "import threading, time, atexit\nfrom base import *\nstep()\n"
         "atexit.register(print, 'at exit')\n"
         "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()",
         "thread\nat exit\n"),
    Case("forks", "import os\nfrom base import *\npid = os.fork()\n"
         "if pid: os.waitpid(pid, 0)\nprint(bool(pid), step(), flush=True)\n"
         "if not pid: raise SystemExit(4)",
         None),  # processors differ in the last digits
    Case("fork_pool", "import multiprocessing as mp\nfrom base import *\nstep()\n"
         "def square(x): return x * x\n"
         "with mp.get_context('fork').Pool(2) as pool: print(pool.map(square, [1, 2, 3]))",
         "[1, 4, 9]\n"),
    Case("loader_spawn", LOADER, "120.0\n376.0\n", 2),
    Case("mp_spawn", "import torch.multiprocessing as mp\nfrom base import *\n"
         "def main(rank, word): print(rank, word, flush=True)\n"
         "if __name__ == '__main__':\n    mp.spawn(main, ('hi',), nprocs=1); step()", "0 hi\n"),
    Case("imports_ampscope", "import ampscope, torch\n"
         "from ampscope.numerics.formats import FORMATS\n"
         "from base import *\nstep(); print(len(FORMATS) > 3, ampscope.__name__)",
         "True ampscope\n"),
    Case("pickles", "import pickle, sys\nfrom base import *\nclass C: x = 3\n"
         "step(); print(pickle.loads(pickle.dumps(C())).x, sys.modules['__main__'].C is C)",
         "3 True\n"),
    Case("both_streams", "import sys\nfrom base import *\nstep()\nprint('out')\n"
         "print('err', file=sys.stderr)", "out\n"),
    Case("megabytes", "import sys\nfrom base import *\nfor i in range(3):\n    step()\n"
         "    print('x' * 2_000_000)\n    print('e' * 2_000_000, file=sys.stderr)",
         ("x" * 2_000_000 + "\n") * 3, 3),
    Case("raw_bytes", "import sys\nfrom base import *\nstep(); sys.stdout.write('ä€')\n",
         "ä€"),
)  # fmt: skip

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surroundings")
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("NAME = 'beside'\n")
    text = "import sys\nfrom . import beside\nfrom base import *\nprint(beside.NAME, sys.argv)\n"
    (package / "train.py").write_text(
        text + "print(step(), __package__, __spec__.name, sys.path[0])"
    )
    return folder


@pytest.fixture(scope="module")
def ended(folder: Path) -> Iterator[dict[str, Ran]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        paths = {c.name: write_script(folder, f"{c.name}.py", c.text) for c in CASES}
        with ScriptRuns(spec(), folder / "runs.db") as runs:
            run = Runner(runs)
            made = OnDemand(lambda name: run(paths[name], BY_NAME[name].args))
            made["-m"] = run("-m package.train", ("--steps", "3"))
            yield made


@pytest.mark.parametrize(
    "name",
    quick(BY_NAME, "argv", "chdir", "bad_excepthook", "signals", "deletes_itself", "threads",
          "both_streams", "megabytes", "imports_ampscope"),
)  # fmt: skip
def test_a_script_finds_what_python_gives_it(name: str, ended: dict[str, Ran]) -> None:
    case, ran = BY_NAME[name], ended[name]
    if case.name == "deletes_itself":  # each script can be run once, and this one was
        assert not Path(ran.run.info.spec.workload).exists()
    prints = case.prints
    if prints is None:
        path = Path(ran.run.info.spec.workload)
        plain = subprocess.run(
            [sys.executable, path], capture_output=True, text=True, cwd=path.parent
        )
        prints = plain.stdout
        assert "0.2394" in prints
    assert ran.out.decode() == prints, ran.err.decode()
    assert (ran.outcome.exit_code, len(ran.steps)) == (case.code, case.steps)
    assert ran.run.info.steps_done == case.steps


def test_an_excepthook_that_fails_hides_nothing(ended: dict[str, Ran]) -> None:
    shown = ended["bad_excepthook"].err.decode()
    assert "ZeroDivisionError" in shown
    assert "KeyError: 'x'" in shown


def test_the_streams_stay_apart(ended: dict[str, Ran]) -> None:
    assert ended["both_streams"].err == b"err\n"
    assert ended["megabytes"].err == (b"e" * 2_000_000 + b"\n") * 3


def test_a_module_is_run_as_python_runs_it(folder: Path, ended: dict[str, Ran]) -> None:
    plain = subprocess.run(
        [sys.executable, "-m", "package.train", "--steps", "3"],
        cwd=folder, capture_output=True, check=True,
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )  # fmt: skip
    assert ended["-m"].out == plain.stdout
    assert len(ended["-m"].steps) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("probe", "mlp", "--steps", "2"),
        ("run", "SCRIPT"),
        ("diagnose", "--no-verify", "SCRIPT"),
        ("compare", "SCRIPT", "--precision", "fp32,bf16", "--time-limit", "300"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_imported_from_where_the_user_stands(
    folder: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    """A folder of downloads may hold a random.py; ``python there/script.py`` does not see it."""
    trap = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\nraise SystemExit(9)\n"
    here = tmp_path / "downloads"
    here.mkdir()
    for name in ("ampscope", "torch", "numpy", "random", "json", "base"):
        (here / f"{name}.py").write_text(trap)
    script = write_script(
        folder, "several.py", "from base import step\nfor _ in range(12):\n    step()"
    )
    given = [str(script) if one == "SCRIPT" else one for one in arguments]
    command = [sys.executable, "-P", "-m", "ampscope.cli.main", *given]
    command[5:5] = ["--store", str(tmp_path / "runs.db")]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
