"""Scripts that go wrong: each run ends with one sentence, and keeps what was recorded."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import State
from tests.helpers.child_runs import cases_of_this_run
from tests.helpers.script_runner import Ran, Runner, spec, write_script

STEPS = "from base import *\nfor i in range(5): step()\n"


@dataclass(frozen=True)
class Case:
    """A script, how its run ends, and what was recorded before."""

    name: str
    text: str
    says: str
    state: State = State.FINISHED
    ended: str = "exception"
    steps: int = 5  # recorded
    code: int = 1
    limits: dict[str, Any] = field(default_factory=dict)


def failed(name: str, text: str, says: str, ended: str = "killed", **more: Any) -> Case:
    return Case(name, text, says, State.FAILED, ended, **more)


QUICK = {"time_limit_s": 3.0}  # five steps take less on any machine
CASES = (
    Case("raises_first", "raise KeyError('x')", "raised KeyError at raises_first.py:1 before its "
         "first optimizer step: 'x'", steps=0),
    Case("raises_with_a_rule", "raise OSError('\\n====\\ntrain.py FAILED\\n----')",
         "OSError at raises_with_a_rule.py:1 before its first optimizer step: train.py FAILED",
         steps=0),
    Case("raises_late", STEPS + "1 / 0", "ZeroDivisionError at raises_late.py:3 after 5 optimizer"),
    Case("imports_itself", "from imports_itself import x", "ImportError at imports_itself.py:1 "
         "before its first optimizer step: cannot import name 'x' from partially", steps=0),
    Case("compiles_not", "return 3", "SyntaxError before its first", steps=0),
    Case("never_backward", "print('hi')", "without calling backward", ended="returned", steps=0,
         code=0),
    Case("never_steps", "from base import *\nm(torch.ones(1, 4)).sum().backward()",
         "never called an optimizer's step", ended="returned", steps=0, code=0),
    Case("exits_first", "import sys; sys.exit(3)", "exit status 3 before its first", ended="exit",
         steps=0, code=3),
    Case("exits_0", STEPS + "import sys; sys.exit(0)", "", ended="exit", code=0),
    Case("exits_text", STEPS + "import sys; sys.exit('good bye')", "", ended="exit"),
    Case("os_exit", STEPS + "import os; os._exit(9)", "", ended="exit", code=9),
    Case("endless", "from base import *\nwhile True: step()", "", ended="time", steps=1, code=0,
         limits=QUICK | {"steps": 10**6}),
    Case("many_steps", "from base import *\nwhile True:\n  try: step()\n  except Exception: pass",
         "", ended="steps", steps=7, code=0, limits={"steps": 7}),
    Case("swallows", STEPS + "for i in range(9):\n  try: step()\n  except: pass", "", ended="steps",
         steps=14, code=0, limits={"steps": 6}),
    Case("interrupts", STEPS + "raise KeyboardInterrupt", "was interrupted at interrupts.py:3",
         State.CANCELLED),
    failed("asks", STEPS + "input('name? ')", "asks for input at asks.py:3", "exception"),
    failed("needs_package", "import no_such_package_xyz", "needs a package", "exception",
           steps=0),
    failed("memory", STEPS + "x = [torch.ones(1 << 26) for _ in range(99)]",
           "ran out of memory at memory.py:3 after 5 optimizer steps (limit 2000 MiB)", "exception",
           limits={"memory_limit_mib": 2000}),
    failed("memory_python", STEPS + "x = bytearray(1 << 34)", "ran out of memory", "exception",
           limits={"memory_limit_mib": 2000}),
    failed("hangs", STEPS + "import time; time.sleep(600)", "passed the time limit of 3 s after 5 "
           "optimizer steps", limits=QUICK),
    failed("hangs_in_c", STEPS + "sum(iter(int, 1))", "hung in native code", limits=QUICK),
    failed("floods", STEPS + "while True: print('x' * 9999999)", "printed more than 256 MiB"),
    failed("killed", STEPS + "import os; os.kill(os.getpid(), 9)", "was killed (SIGKILL)"),
    failed("terminated", STEPS + "import os; os.kill(os.getpid(), 15)", "was ended by SIGTERM"),
    failed("crashes", STEPS + "import ctypes; ctypes.string_at(0)", "in native code (SIGSEGV)"),
    # What multiprocessing starts is followed (test_script_ranks.py); a fork by the script is not.
    failed("forks", "import os, base\npid = os.fork()\nif not pid:\n  base.step(); os._exit(0)\n"
           "os.waitpid(pid, 0)",
           "started 1 other: training in a child process is not watched", "returned", steps=0,
           code=0),
)  # fmt: skip
SLOW = {"hangs", "hangs_in_c", "floods", "memory", "memory_python"}


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Ran]]:
    """The cases, two at a time: those that wait for a limit beside the others."""
    folder = tmp_path_factory.mktemp("bad")
    chosen = cases_of_this_run(request)
    cases = [case for case in CASES if case.name in chosen]
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        run = Runner(runs)
        paths = {c.name: write_script(folder, f"{c.name}.py", c.text) for c in cases}
        late = {c.name: run.start(paths[c.name], **c.limits) for c in cases if c.name in SLOW}
        found = {c.name: run(paths[c.name], **c.limits) for c in cases if c.name not in SLOW}
        yield found | {name: run.fetch(run_id) for name, run_id in late.items()}


@pytest.mark.quick("raises_late", "asks", "exits_text", "hangs", "crashes")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_script_ends_in_one_sentence(case: Case, ended: dict[str, Ran]) -> None:
    ran = ended[case.name]
    info, outcome = ran.run.info, ran.outcome
    assert (info.state, outcome.ended) == (case.state, case.ended), info.message
    assert case.says in info.message
    assert bool(case.says) == bool(info.message)
    assert "\n" not in info.message
    assert len(info.message) < 500
    assert outcome.exit_code == case.code or outcome.ended == "killed"
    assert [a.step for a in ran.steps][: case.steps] == list(range(case.steps))
    assert outcome.ended == "time" or len(ran.steps) == case.steps


@pytest.mark.quick("raises_late", "asks")
@pytest.mark.parametrize("name", ["raises_first", "raises_late", "memory", "asks"])
def test_a_script_s_own_traceback_is_shown_and_kept(name: str, ended: dict[str, Ran]) -> None:
    ran = ended[name]
    shown = ran.err.decode()
    assert shown.count("Traceback (most recent call last)") == 1
    assert f'{name}.py", line ' in shown
    assert "ampscope/" not in shown
    kept = [line for line in ran.run.info.traceback.splitlines() if "^" not in line]
    assert len(kept) >= 3  # Python's C and Python printers place their carets differently
    assert all(line in shown for line in kept)


def test_an_exit_with_a_text_prints_it(ended: dict[str, Ran]) -> None:
    assert ended["exits_text"].err == b"good bye\n"


def test_nothing_that_a_script_started_outlives_it(tmp_path: Path) -> None:
    text = """
import os, subprocess, sys, time
from base import *
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if not os.fork():
    time.sleep(600)
step()
print(child.pid)
"""
    with ScriptRuns(spec(), tmp_path / "runs.db") as runs:
        ran = Runner(runs)(write_script(tmp_path, "starts.py", text))
    assert ran.run.info.state is State.FINISHED
    assert not _is_running(int(ran.out), within_s=5.0)


def test_a_run_that_is_left_is_cancelled(tmp_path: Path) -> None:
    """Ctrl-C leaves the block while the script is at work."""
    script = write_script(tmp_path, "long.py", STEPS + "print('x', flush=True)\nwhile True: step()")
    with ScriptRuns(spec(), tmp_path / "runs.db") as runs:
        run_id = Runner(runs).start(script, steps=10**6)
        while not (Path(runs.folder.name) / f"{run_id}.out").exists():
            time.sleep(0.02)
    from ampscope.store.reader import Reader

    with Reader(tmp_path / "runs.db") as reader:
        assert reader.run(run_id).state is State.CANCELLED


def test_a_process_that_starts_the_runs_and_dies_is_told(tmp_path: Path) -> None:
    script = write_script(tmp_path, "long.py", STEPS)
    with ScriptRuns(spec(), tmp_path / "runs.db") as runs:
        assert runs._process is not None
        runs._process.send_signal(signal.SIGKILL)
        runs._process.wait()
        ran = Runner(runs)(script)
    assert ran.run.info.state is State.FAILED
    assert "ended early" in ran.run.info.message


def _is_running(pid: int, within_s: float) -> bool:
    """Whether a process is still there when the time is over; a zombie is not."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.05)
    return True
