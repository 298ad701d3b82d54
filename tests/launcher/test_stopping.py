"""A signal at any moment ends the command line with one sentence, and no child is left."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ampscope.diagnosis.load import load_diagnosis
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import RunSpec, State
from ampscope.render.contract import document as to_document
from ampscope.store.reader import Reader
from tests.helpers import browser
from tests.helpers.diagnosis_contract import checked

SCRIPT = """
import torch
w = torch.nn.Linear(2, 1)
o = torch.optim.SGD(w.parameters(), 0.1)
for _ in range(30):
    o.zero_grad(); w(torch.ones(4, 2)).mean().backward(); o.step()
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
START_S = 60.0
LONGEST_S = {"diagnose": 14.0, "probe": 10.0}
GONE_S = 20.0


def command(what: str, folder: Path) -> list[str]:
    (folder / "train.py").write_text(SCRIPT)
    store = ["--store", str(folder / "runs.db")]
    given = {
        "diagnose": ["diagnose", "--quiet", *store, str(folder / "train.py")],
        "probe": ["probe", "gpt", "--steps", "200", *store],
    }[what]
    return [sys.executable, "-m", "ampscope.cli.main", *given]


def children_of(folder: Path) -> list[str]:
    """Command lines of the processes that name the folder."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if os.fsencode(folder) in line:
                found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found


def stopped(what: str, number: signal.Signals, after_s: float, folder: Path) -> None:
    process = subprocess.Popen(
        command(what, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(after_s)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    if "stopping\n" in said or "cli/main.py" not in said:  # while Python itself was starting
        said = re.sub(r"Traceback(.*\n)*KeyboardInterrupt\n", "", said)
    assert "Traceback" not in out + said, said
    assert "Exception ignored" not in said, said
    if process.returncode in (130, 2):
        assert said.count("What was recorded is kept") == 1, said
    else:  # before Python itself had begun to listen, or after the end
        assert process.returncode in (0, 1, -number), (process.returncode, said)
    deadline = time.monotonic() + GONE_S
    while (left := children_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


@pytest.mark.parametrize("what", LONGEST_S)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_some_moment(what: str, number: signal.Signals, tmp_path: Path) -> None:
    moment = random.Random(f"{what}{number}").uniform(0.2, LONGEST_S[what])
    stopped(what, number, moment, tmp_path)


OVERFLOWS = """
import torch
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
with torch.no_grad(): m[0].weight.mul_(3e5); m[1].weight.mul_(3e5); m[2].weight.mul_(1e-9)
o = torch.optim.SGD(m.parameters(), 1e-9)
for i in range(6):
    o.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = m(torch.randn(16, 8)).float().mean()
    loss.backward(); o.step()
"""


@pytest.mark.parametrize(
    ("number", "sent_at", "says"),
    [
        (signal.SIGINT, "trying fixes, 1 of at most", "Verdict so far: no fix was run."),
        (signal.SIGTERM, "trying fixes, 2 of at most", "Verdict so far: 1 of at most"),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_behind_the_cause_ends_with_the_verdict_so_far(
    number: signal.Signals, sent_at: str, says: str, tmp_path: Path
) -> None:
    """The cause is printed before any fix is run; the JSON, the status and the page are its."""
    script = tmp_path / "train.py"
    script.write_text(OVERFLOWS)
    store, out = tmp_path / "runs.db", tmp_path / "out.json"
    given = ["diagnose", "--quiet", "--json", str(out), "--store", str(store), str(script)]
    with subprocess.Popen(
        [sys.executable, "-m", "ampscope.cli.main", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while sent_at not in said and (line := process.stderr.readline()):
            said += line
        process.send_signal(number)
        printed, rest = process.communicate(timeout=60)
    document = checked(out.read_text())
    assert process.returncode == 1, said + rest
    assert said.index("Root cause so far: ") < said.index("trying fixes, 1 of at most")
    assert rest.splitlines()[-1] == "ampscope: Cancelled. What was recorded is kept."
    assert document["findings"][0]["cause"] == "activation_overflow"
    assert document["findings"][0]["fix"]["verified"] is (None if "no fix" in says else False)
    assert [note for note in document["notes"] if note.startswith(says)]
    assert says in " ".join(printed.split())
    with Reader(store) as reader:
        shown = load_diagnosis(reader, document["runs"]["as_is"])
    assert to_document(shown) == document
    assert not children_of(tmp_path)


@pytest.mark.slow
def test_a_signal_before_the_cause_ends_with_what_is_wrong(tmp_path: Path) -> None:
    """Every step is skipped at 2^60, and what a scale of 1 shows has not been run yet."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nm = torch.nn.Linear(8, 1); o = torch.optim.SGD(m.parameters(), 0.1)\n"
        "s = torch.amp.GradScaler('cpu', init_scale=2.0**60)\nfor i in range(6):\n"
        "    o.zero_grad()\n    with torch.autocast('cpu', torch.float16):\n"
        "        loss = m(torch.randn(16, 8)).float().mean()\n"
        "    s.scale(loss).backward(); s.step(o); s.update()\n"
    )
    out = tmp_path / "out.json"
    given = ["diagnose", "--quiet", "--json", str(out), "--store", str(tmp_path / "r.db")]
    with subprocess.Popen(
        [sys.executable, "-m", "ampscope.cli.main", *given, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while "scale:1" not in said and (line := process.stderr.readline()):
            said += line
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=60)
    document = checked(out.read_text())
    assert (process.returncode, document["findings"]) == (2, []), said
    assert "no cause was found yet" in " ".join(printed.split())


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_dashboard_and_its_server(number: signal.Signals, tmp_path: Path) -> None:
    """To the command alone, as `kill` sends it: nothing else tells the server to end."""
    port = browser._free_port()
    command = [sys.executable, "-m", "ampscope.cli.main", "dashboard", "--headless"]
    command += ["--port", str(port), "--store", str(tmp_path / "runs.db")]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        deadline = time.monotonic() + START_S
        while not answers(port) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        try:
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()  # the end of "with" would wait for one that does not end
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert not answers(port)
    assert not list(tmp_path.glob("ampscope-*-*-*"))


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@pytest.mark.thorough
@pytest.mark.timeout(5400)  # 100 commands, each up to some seconds
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_at_a_hundred_moments(number: signal.Signals, tmp_path: Path) -> None:
    moments = random.Random(f"{number} 100")
    for trial in range(100):
        folder = tmp_path / str(trial)
        folder.mkdir()
        what = ("diagnose", "probe")[trial % 2]
        stopped(what, number, moments.uniform(0.0, LONGEST_S[what]), folder)


# A run whose process ends at once, and leaves one behind that takes SECONDS to die of SIGKILL, as
# what has memory of a GPU may.
LEAVES_ONE_BEHIND = """
import os, sys, threading, time
from ampscope.runner import run_server

kill, seconds, run_server.GONE_WITHIN_S = run_server._kill, float(sys.argv[1]), 3.0
run_server._kill = lambda pid: threading.Timer(seconds, kill, [pid]).start()

def start(run_id, out, err, view):
    if pid := os.fork():
        return pid
    os.setsid()
    if left := os.fork():
        out.write_text(str(left))
        os._exit(7)
    time.sleep(60)

run_server.adopt_orphans()
run_server.serve(start)
"""


@pytest.mark.parametrize(("dies_after_s", "is_gone"), [(1.0, True), (6.0, False)])
def test_a_run_has_ended_when_all_that_it_started_has(
    dies_after_s: float, is_gone: bool, tmp_path: Path
) -> None:
    """The next run may need the GPU's memory; but it does not wait for ever."""
    out, err = tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-c", LEAVES_ONE_BEHIND, str(dies_after_s)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"run\t{out}\t{err}\t100\t\n")
        server.stdin.flush()
        assert server.stdout.readline() == "run\t7\n"
        assert Path(f"/proc/{out.read_text()}").exists() is not is_gone
        server.stdin.close()


TRAINS_ON = SCRIPT.replace("range(30)", "range(10**6)").replace(
    "o.step()", "o.step(); time.sleep(0.02)"
)
KILLED = {  # the command, and how many processes below it there are when it is killed
    "probe": (["probe", "gpt", "--steps", "100000"], 1),
    "loading": (["diagnose", "--quiet", "--steps", "100000", "train.py"], 1),
    "diagnose": (["diagnose", "--quiet", "--steps", "100000", "train.py"], 2),
    "run": (["run", "train.py"], 2),
    "ranks": (
        ["run", "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "train.py"], 4
    ),
}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
@pytest.mark.slow
@pytest.mark.parametrize("what", KILLED)
def test_a_command_that_is_killed_leaves_no_process(what: str, tmp_path: Path) -> None:
    arguments, count = KILLED[what]
    (tmp_path / "train.py").write_text("import time\n" + TRAINS_ON)
    run = [sys.executable, "-m", "ampscope.cli.main", arguments[0], "--store", "runs.db"]
    with (tmp_path / "said.txt").open("wb") as said:
        process = subprocess.Popen([*run, *arguments[1:]], cwd=tmp_path, stdout=said, stderr=said)
    own, below = psutil.Process(process.pid), []
    deadline = time.monotonic() + 2 * START_S
    while len(below) < count and time.monotonic() < deadline and process.poll() is None:
        below = [p for p in own.children(recursive=True) if "telemetry" not in "".join(_line(p))]
        time.sleep(0.1)
    assert len(below) >= count, (tmp_path / "said.txt").read_text()
    below = own.children(recursive=True)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(below, 3.0)
    lines = [_line(p) for p in left if p.status() != psutil.STATUS_ZOMBIE]
    for one in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    assert not lines


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


TWO_ENDS = """
import pathlib, sys, time, torch
pathlib.Path("written").write_text(sys.argv[1])
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.slow
def test_runs_of_the_same_script_begin_again_in_the_process_that_has_loaded_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was under way has been ended, and left nothing."""
    monkeypatch.chdir(tmp_path)
    script, store = tmp_path / "train.py", tmp_path / "runs.db"
    script.write_text(TWO_ENDS)
    spec = RunSpec(str(script), kind="script", args=("60",), time_limit_s=90.0, control="as_is")
    with ScriptRuns(spec, store, private=True) as runs:
        server = runs._process
        first = runs.start("as_is")
        with Reader(store) as reader:
            while reader.run(first).steps_done < 3:
                time.sleep(0.05)
        began = time.monotonic()
        assert runs.begin_again(replace(spec, args=("0",))) is runs
        second = runs.run("as_is")
        assert time.monotonic() - began < 30
        assert runs._process is server
        assert second.info.state is State.FINISHED
        assert second.info.spec.args == ("0",)
    with Reader(store) as reader:
        assert reader.run(first).state is State.CANCELLED
    assert not (tmp_path / "written").exists()
