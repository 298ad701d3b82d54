"""A watched script computes what it computes without ampscope, to the last bit.

The oracle is Python itself: ``runpy`` in a process that has never heard of ampscope.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from tests.helpers.fidelity_scripts import HEAD, SCRIPTS
from tests.helpers.script_runner import OnDemand, Ran, Runner, quick, spec

# A fork for each script keeps them apart, and torch is imported once.
PLAIN = """
import os, runpy, sys, torch, torch._dynamo
torch._dynamo.config.disable = True
sys.path[0] = os.path.dirname(sys.argv[1])
for path in sys.argv[1:]:
    pid = os.fork()
    if not pid:
        os.dup2(os.open(path + ".out", os.O_WRONLY | os.O_CREAT, 0o600), 1)
        sys.argv = [path]
        try:
            runpy.run_path(path, run_name="__main__"); code = 0
        except SystemExit as leaving:
            code = leaving.code
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    open(path + ".code", "w").write(str(code))
"""
pytestmark = pytest.mark.slow  # twelve scripts run first, plainly and watched
ENV = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts, each run plainly."""
    folder = tmp_path_factory.mktemp("fidelity")
    paths = [folder / f"{name}.py" for name in SCRIPTS]
    for path in paths:
        path.write_text(HEAD + SCRIPTS[path.stem])
    subprocess.run([sys.executable, "-c", PLAIN, *map(str, paths)], check=True, env=ENV)
    return folder


@pytest.fixture(scope="module")
def watched(folder: Path) -> Iterator[dict[str, Ran]]:
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        run = Runner(runs)
        yield OnDemand(lambda name: run(folder / f"{name}.py"))


@pytest.mark.parametrize(
    "name",
    quick(SCRIPTS, "fp16_scaler", "bf16", "half_model", "lbfgs", "autograd_grad", "gan",
          "accumulation", "compiled", "evaluation", "nan_with_dropout", "func_transforms",
          "sharded"),
)  # fmt: skip
def test_output_and_status_are_those_of_plain_python(
    name: str, folder: Path, watched: dict[str, Ran]
) -> None:
    plain = (folder / f"{name}.py.out").read_bytes()
    assert plain.count(b"\n") >= 3
    assert watched[name].out == plain, watched[name].err.decode()
    assert watched[name].outcome.exit_code == int((folder / f"{name}.py.code").read_text())


def test_what_was_watched_is_what_ran(watched: dict[str, Ran]) -> None:
    """Bit-equal output would be no feat for a tool that had not looked."""
    assert [a.skipped for a in watched["fp16_scaler"].steps].count(True) >= 3
    assert {a.scaler for a in watched["gan"].steps} == {"scaler0", "scaler1"}
    assert {a.backwards for a in watched["accumulation"].steps} == {4}
    assert watched["half_model"].outcome.uses_half_model == "fp16"
    assert watched["autograd_grad"].steps == []
    assert len(watched["lbfgs"].steps) == 3
    assert watched["nan_with_dropout"].outcome.traced_ops > 50
    assert watched["evaluation"].outcome.exit_code == 7


def test_a_compiled_script_is_told_so(watched: dict[str, Ran]) -> None:
    (note,) = watched["compiled"].outcome.notes
    assert note.startswith("torch.compile was switched off: compiled code was judged as the eager")
    assert watched["bf16"].outcome.notes == ()


def test_the_command_passes_output_and_status_on(folder: Path) -> None:
    """The same once more through the command line, against ``python script.py``."""
    script = str(folder / "evaluation.py")
    plain = subprocess.run([sys.executable, script], capture_output=True, check=False, env=ENV)
    command = [sys.executable, "-m", "ampscope.cli.main", "run", "--store", str(folder / "cli.db")]
    watched = subprocess.run([*command, script], capture_output=True, check=False, env=ENV)
    assert (watched.stdout, watched.returncode) == (plain.stdout, plain.returncode)
    assert plain.returncode == 7


def test_nothing_is_left_behind(folder: Path) -> None:
    """Run inside one process: every attribute of torch that was patched is the original again."""
    check = f"""
import os, sys, torch, torch._dynamo, subprocess, multiprocessing.process, weakref
from ampscope.records import RunSpec
from ampscope.runner.script import RunCallbacks, run_script
from torch.nn.modules import module
from torch.optim import optimizer
owners = [torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.amp, os,
    torch.optim.Optimizer, torch.amp.GradScaler, torch.cuda.amp.GradScaler,
    torch.autograd, torch.autograd.Function,
    torch.amp.autocast_mode, torch.amp.autocast_mode.autocast, torch.nn.utils,
    torch.nn.utils.clip_grad, multiprocessing.process.BaseProcess, torch.utils.checkpoint]
def seen():
    attributes = {{(str(o), k): id(v) for o in owners for k, v in vars(o).items()
                  if callable(v) or isinstance(v, (classmethod, staticmethod))}}
    hooks = [len(getattr(module, n)) for n in vars(module) if n.startswith("_global_")
             and hasattr(getattr(module, n), "__len__")]
    for n in vars(optimizer):  # dispatchers of ours stay, and hand nothing on
        if n.startswith("_global_"):
            table = getattr(optimizer, n).values()
            hooks.append(sum(getattr(hook, "subscribers", None) != () for hook in table))
    modes = torch.utils._python_dispatch._len_torch_dispatch_stack()
    return attributes, hooks, modes, sys.argv[:], sys.path[:], sys.modules["__main__"]
before = seen()
for policy, control in (("native", "as_is"), ("rehearsal", "fp32"), ("native", "scale:8;lr:0.1")):
    spec = RunSpec({str(folder / "fp16_scaler.py")!r}, kind="script", steps=3, control=control,
                   time_limit_s=60.0)
    result = run_script(spec, policy, RunCallbacks())
    assert result.outcome.ended == "steps", result
after = seen()
changed = {{k for k in before[0].keys() | after[0].keys() if before[0].get(k) != after[0].get(k)}}
assert not changed, changed
assert before[1:] == after[1:], (before[1:], after[1:])
"""
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=False, env=ENV
    )
    assert done.returncode == 0, done.stderr
