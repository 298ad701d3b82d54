"""``ampscope diagnose`` and ``ampscope run`` from outside: streams, JSON, exit status, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.diagnosis.findings import diagnose as judged_as
from ampscope.diagnosis.result import DiagnosisResult
from ampscope.errors import BadInput
from ampscope.records import RunSpec
from ampscope.store.reader import Reader
from tests.helpers.diagnosis_contract import EXIT_STATUS, checked
from tests.helpers.evidence_making import FLAT, HEALTHY_FP32, OVERFLOWED, evidence, run, steps
from tests.helpers.evidence_of_ops import ACTIVATION
from tests.helpers.script_runner import write_script

HEALTHY = """
import sys, warnings
from base import *
o.param_groups[0]["lr"] = 0.01
for i in range(6): step()
warnings.warn("careful"); print("script out"); print("script err", file=sys.stderr)
"""
OVERFLOWS = """
import torch
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
with torch.no_grad(): m[1].weight.mul_(3e5); m[2].weight.mul_(1e-5)
o = torch.optim.SGD(m.parameters(), 1e-9)
for i in range(6):
    o.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = m(torch.randn(16, 8)).float().mean()
    loss.backward(); o.step()
    print("script out", loss.item())
"""


def ampscope(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ampscope.cli.main", *map(str, arguments)]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=cwd, timeout=120
    )


def test_a_healthy_script(tmp_path: Path) -> None:
    script = write_script(tmp_path, "healthy.py", HEALTHY)
    out = tmp_path / "out.json"
    done = ampscope("diagnose", "--store", tmp_path / "r.db", "--json", out, script)
    document = checked(out.read_text())
    assert (document["verdict"], done.returncode) == ("no_fault", 0), done.stderr
    assert document["controls"]["fp32"]["ok"] is True
    assert "No fault found" in done.stdout
    assert "script" not in done.stdout.replace("The script trains", "")
    assert done.stderr.count("script out\n") == done.stderr.count("script err\n") == 1
    assert "careful" in done.stderr


def test_a_fault_as_json_on_standard_output(tmp_path: Path) -> None:
    script = write_script(tmp_path, "overflows.py", OVERFLOWS)
    done = ampscope("diagnose", "--store", tmp_path / "r.db", "--json", "-", "--no-verify", script)
    document = checked(done.stdout)  # nothing else is on that stream
    assert (document["verdict"], done.returncode) == ("fault", 1)
    assert document["findings"][0]["module"] == "1"
    assert document["findings"][0]["fix"]["verified"] is None
    assert "script out" in done.stderr
    assert "Root cause" in done.stderr
    assert not (tmp_path / "-").exists()


def test_a_script_that_cannot_be_judged(tmp_path: Path) -> None:
    script = write_script(tmp_path, "raises.py", "raise ValueError('no data here')")
    done = ampscope("diagnose", "--store", tmp_path / "r.db", "--json", "-", "--quiet", script)
    document = checked(done.stdout)
    assert (document["verdict"], done.returncode) == ("inconclusive", 2)
    assert "ValueError at raises.py:1 before its first optimizer step" in document["reason"]
    *progress, sentence = done.stderr.splitlines()
    assert sentence == f"ampscope: {document['reason']}"
    assert all(line.startswith("Running: ") for line in progress)


def test_what_follows_the_script_belongs_to_it(tmp_path: Path) -> None:
    script = write_script(
        tmp_path, "trän me.py", "import sys; from base import *\nfor i in range(9): step()\n"
        "print(sys.argv[1:])",
    )  # fmt: skip
    own = ("--steps", "9", "--json", "x", "--quiet", "-m")
    done = ampscope("run", "--store", "r.db", "--steps", "20", script.name, *own, cwd=tmp_path)
    assert done.stdout == f"{list(own)}\n"
    assert done.returncode == 0
    assert "9 optimizer steps." in done.stderr
    assert not (tmp_path / "x").exists()
    assert "--steps, --quiet goes to the script." in done.stderr  # run has no --json


def test_ctrl_c_is_no_verdict(tmp_path: Path) -> None:
    script = write_script(tmp_path, "long.py", "print('up', flush=True)\nwhile True: pass")
    command = [sys.executable, "-m", "ampscope.cli.main", "diagnose", "--store", "r.db"]
    out = tmp_path / "out.json"
    with subprocess.Popen(
        [*command, "--json", str(out), str(script)],
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "up" not in process.stderr.readline():
            assert process.poll() is None
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 2
    assert said.splitlines()[-1] == "ampscope: Cancelled. What was recorded is kept."
    assert json.loads(out.read_text())["verdict"] == "inconclusive"


def test_a_fault_of_ampscope_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr("ampscope.cli.diagnose.run_diagnosis", broken)
    script, out = write_script(tmp_path, "fine.py", "pass"), tmp_path / "out.json"
    result = CliRunner().invoke(main, ["diagnose", "--json", str(out), str(script)])
    assert result.exit_code == 2
    assert "ampscope itself failed, not the script: TypeError at test_diagnose.py:" in result.output
    assert "ampscope itself failed" in checked(out.read_text())["reason"]


@pytest.mark.parametrize("is_known", [True, False])
def test_the_time_of_a_diagnosis_ends_it_with_the_verdict_so_far(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: its time is up while a run is waited for."""
    broken = evidence(run(steps(FLAT, **OVERFLOWED), ACTIVATION), HEALTHY_FP32)
    found = DiagnosisResult("train.py", judged_as(broken), {}, (), 1.0)

    def waiting(*arguments: Any) -> None:
        if is_known:
            next(filter(callable, reversed(arguments)))(found)
        time.sleep(60)

    monkeypatch.setattr("ampscope.cli.diagnose.run_diagnosis", waiting)
    script, out = write_script(tmp_path, "fine.py", "pass"), tmp_path / "out.json"
    started, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    given = ["diagnose", "--time", "0.5", "--json", str(out), str(script)]
    result = CliRunner().invoke(main, given)
    assert time.monotonic() - started < 30
    assert signal.getsignal(signal.SIGALRM) is before
    document = json.loads(out.read_text())
    assert "ampscope: The time of --time is up." in result.output
    assert result.exit_code == (1 if is_known else 2), result.output
    assert document["verdict"] == ("fault" if is_known else "inconclusive")
    assert result.output.count(found.diagnosis.findings[0].verdict.reason[:40]) == 2 * is_known


REFUSED = {
    "missing.py": "There is no file missing.py.",
    "--nope": "There is no option --nope. --help lists those that there are.",
    "folder": "folder is a folder. Name the script in it, or use -m for a package.",
    "binary.py": "binary.py is not Python: it is a binary file.",
    "text.py": "text.py is not Python: invalid syntax at line 1.",
    "open.py": "open.py is not Python: '(' was never closed at line 2.",
    "latin.py": "latin.py is not Python: (unicode error) 'utf-8' codec can't decode byte 0xe4",
    "huge.py": "huge.py is too large for a script: 104,857,600 bytes",
    "pipe.py": "pipe.py is not a file.",
    "returns.py": "returns.py is not Python: 'return' outside function at line 1.",
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("command", ["run", "diagnose"])
def test_what_is_no_script_is_refused_at_once(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("binary.py").write_bytes(b"\x7fELF\0\xff\xfe")
    Path("text.py").write_text("Dear reader, hello.\n")
    Path("open.py").write_text("import torch\nx = (\n")
    Path("latin.py").write_bytes(b"x = '\xe4'\n")
    Path("returns.py").write_text("return 3\n")
    with Path("huge.py").open("wb") as file:
        file.truncate(100 * 2**20)
    os.mkfifo("pipe.py")
    json_out = ["--json", "out.json"] if command == "diagnose" else []
    result = CliRunner().invoke(main, [command, "--store", "r.db", *json_out, name])
    assert result.exit_code == 2
    assert result.output.startswith(f"ampscope: {REFUSED[name]}"), result.output
    assert result.output.count("\n") == 1
    assert not Path("r.db").exists()
    if json_out:
        document = checked(Path("out.json").read_text())
        assert document["reason"] in result.output
        assert EXIT_STATUS[document["verdict"]] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--json", "no/such/out.json"], "there is no folder no/such"),
        (["--json", "."], "it is a folder"),
        (["--steps", "0"], "must be positive"),
        (["--time-limit", "nan"], "must be positive"),
        (["--time", "nan"], "positive number of seconds"),
        (["--time", "0"], "positive number of seconds"),
        (["--time-limit", "-1"], "must be positive"),
        (["--memory-limit", "-1"], "0 or more"),
        (["--store", "fine.py/runs.db"], "fine.py"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_once(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fine.py").write_text("print('never run')\n")
    result = CliRunner().invoke(main, ["diagnose", "--store", "r.db", *arguments, "fine.py"])
    assert result.exit_code == 2
    assert says in result.output
    assert "Traceback" not in result.output
    assert not Path("r.db").exists()


def test_a_folder_that_may_not_be_written_is_refused_before_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the system, as root may write anywhere."""
    monkeypatch.chdir(tmp_path)
    Path("fine.py").write_text("print('never run')\n")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    command = ["diagnose", "--store", "r.db", "--json", "out.json", "fine.py"]
    result = CliRunner().invoke(main, command)
    assert (result.exit_code, result.output) == (
        2, "ampscope: Cannot write out.json: permission denied.\n",
    )  # fmt: skip
    assert not Path("r.db").exists()


@pytest.mark.parametrize(
    ("fix", "says"),
    [
        ("scale:0", "scale needs a positive number, such as scale:1024; not '0'."),
        ("lr:abc", "lr needs a positive number"),
        ("scale:nan", "scale needs a positive number"),
        ("fp32_modules", "fp32_modules needs a value, such as fp32_modules:encoder.0,head."),
        ("", "There is no intervention ''. Use one of: as_is, repeat, fp32"),
        ("bf16;nonsense", "There is no intervention 'nonsense'."),
    ],
)
def test_a_fix_that_is_none_is_refused_at_once(fix: str, says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('ran')")
    store = tmp_path / "runs.db"
    result = CliRunner().invoke(main, ["run", "--fix", fix, "--store", str(store), str(script)])
    assert result.exit_code == 2
    assert says in result.output
    assert not store.exists()


def test_a_script_that_is_stopped_early_is_judged_by_its_first_steps(tmp_path: Path) -> None:
    """What was not watched may fail later, and the verdict says so."""
    script = write_script(tmp_path, "long.py", HEALTHY.replace("range(6)", "range(60)"))
    out = tmp_path / "out.json"
    done = ampscope("diagnose", "--store", tmp_path / "r.db", "--steps", 12, "--json", out, script)
    document = checked(out.read_text())
    assert (document["verdict"], done.returncode) == ("no_fault", 0), done.stderr
    assert document["scope"]["steps"] == 12
    assert document["scope"]["stopped_by"] == "steps"
    said = " ".join(done.stdout.replace("\u2502", " ").split())
    assert "No fault in the first 12 of the script's steps" in said
    assert "--steps 48" in said
    assert "No fault found" not in said


def test_a_script_that_ends_by_itself_is_judged_as_a_whole(tmp_path: Path) -> None:
    script = write_script(tmp_path, "short.py", HEALTHY)
    out = tmp_path / "out.json"
    ampscope("diagnose", "--store", tmp_path / "r.db", "--json", out, script)
    scope = checked(out.read_text())["scope"]
    assert scope == {"steps": 6, "whole_script": True, "stopped_by": None, "sentence": ""}


LOSES_GRADIENTS = """
import torch
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.randn(64, 8) * 0.1)
gains = torch.logspace(0, -7, 64).unsqueeze(1)  # of features; the last ones' gradients underflow
optimizer = torch.optim.SGD([weight], lr=2e-2)
target = torch.randn(64, 8)
for step in range(40):
    x = torch.randn(32, 64)
    with torch.autocast("cpu", dtype=torch.float16):
        out = (x * gains.T) @ weight
    loss = (out.float() - x[:, :8]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_loss_of_numbers_without_harm_is_latent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOSES_GRADIENTS)
    lines = ["diagnose", "--store", tmp_path / "r.db", "--json", tmp_path / "d.json"]
    usual = ampscope(*lines, tmp_path / "train.py", cwd=tmp_path)
    found = checked((tmp_path / "d.json").read_text())
    assert (usual.returncode, found["verdict"], found["findings"]) == (0, "no_fault", [])
    assert [f["code"] for f in found["latent"]] == ["AMP012"]
    assert "Latent: Gradients underflowed to zero (AMP012" in usual.stdout
    strict = ampscope(*lines, "--strict", tmp_path / "train.py", cwd=tmp_path)
    assert strict.returncode == 1


GPU_ONLY = OVERFLOWS.replace(
    "m = torch.nn.Sequential(", 'assert torch.cuda.is_bf16_supported()\nm = torch.nn.Sequential('
).replace("o = torch.optim", "m = m.cuda()\no = torch.optim").replace(
    'torch.autocast("cpu", torch.float16)', 'torch.autocast("cuda")'
).replace("torch.randn(16, 8)", 'torch.randn(16, 8, device="cuda")')  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="the script runs on the device itself")
def test_a_script_that_needs_cuda_is_rehearsed(tmp_path: Path) -> None:
    script = write_script(tmp_path, "train.py", GPU_ONLY)
    given = ("--store", tmp_path / "r.db", "--json", "-", "--no-verify")
    done = ampscope("diagnose", *given, script)
    found = checked(done.stdout)
    assert (found["verdict"], found["policy"]) == ("fault", "rehearsal"), done.stderr
    assert (found["findings"][0]["cause"], found["findings"][0]["module"]) == (
        "activation_overflow",
        "1",
    )
    assert (
        "the script again, on a simulated CUDA device (a100): it asks for CUDA, and this machine "
        "has none"
    ) in done.stderr
    assert "Traceback" not in done.stderr
    with Reader(tmp_path / "r.db") as reader:  # it is kept with the run
        first = next(r for r in reversed(reader.runs()) if r.spec.control == "as_is")
    assert first.spec.policy == "auto"
    assert "assert torch.cuda.is_bf16_supported()" in first.traceback
    native = ampscope("diagnose", *given, "--policy", "native", script)
    assert native.returncode == 2
    assert "Traceback" in native.stderr


@pytest.mark.parametrize(
    ("command", "runs"),
    [
        ("torchrun --nproc-per-node 2 t.py --lr 1", "-m torch.distributed.run"),
        ("accelerate launch t.py", "-m accelerate.commands.launch"),
        ("python -m package.train --lr 1", "-m package.train"),
        ("python3.11 t.py --lr 1", "t.py"),
        ("t.py --lr 1", "t.py"),
    ],
)
def test_a_launchers_command_line_is_taken_as_it_is(
    command: str, runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[RunSpec] = []

    def diagnosed(spec: RunSpec, *rest: object) -> None:
        asked.append(spec)
        raise BadInput("seen")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").write_text("")
    monkeypatch.setattr("ampscope.cli.diagnose.run_diagnosis", diagnosed)
    CliRunner().invoke(main, ["diagnose", "--store", "r.db", "--", *command.split()])
    (spec,) = asked
    assert spec.workload.endswith(runs)
    words = command.split()
    behind = words[words.index("t.py" if "t.py" in words else "package.train") :]
    assert list(spec.args)[-len(behind) + 1 :] == behind[1:] or len(behind) == 1
