"""Scripts that want a CUDA device, on a machine that has none: what leads to a rehearsal, how
early, and the hint where nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ampscope.analysis.precision_use import wants_cuda
from ampscope.analysis.run_view import RunView
from ampscope.cli.main import main
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.observations import Outcome
from ampscope.records import RunSpec, State
from ampscope.script_ends import ending
from tests.helpers.script_runner import Ran, Runner, spec, write_script

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")

SAID = (
    # torch
    "AssertionError: Torch not compiled with CUDA enabled",
    "RuntimeError: Found no NVIDIA driver on your system.",
    "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() "
    "is False.",
    "RuntimeError: Cannot access accelerator device when none is available.",
    "RuntimeError: CUDA error: no CUDA-capable device is detected",
    # Lightning, its Fabric, Accelerate, Transformers, DeepSpeed, Megatron
    "lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend "
    "found!",
    "MisconfigurationException: `CUDAAccelerator` can not run on your system since the accelerator "
    "is not available.",
    "MisconfigurationException: You requested gpu: [0]\n But your machine only has: []",
    "ValueError: fp16 mixed precision requires a GPU (not 'cpu').",
    "ValueError: FP16 Mixed precision training with AMP or APEX (`--fp16`) can only be used on CUDA"
    " devices.",
    "ValueError: Your setup doesn't support bf16/gpu.",
    "RuntimeError: No GPU found. A GPU is needed for quantization.",
    "AssertionError: Megatron requires CUDA.",
    "RuntimeError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
    # a wrapper that prints the error of what it calls, and scripts' own words
    "Error in call to target 'lightning.Trainer': MisconfigurationException('No supported gpu "
    "backend found!')\nfull_key: trainer",
    "    assert torch.cuda.is_available()\nAssertionError",
    "this script needs a GPU",
    "CUDA is unavailable, exiting.",
)
OTHER = (
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
    "FileNotFoundError: [Errno 2] No such file or directory: 'runs_cuda/x.csv', or not found",
    "ValueError: /data/cuda_v2/x.csv has no header",
    "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)",
    "GPU available: False, used: False\nKeyError: 'x'",
    "device: cpu\nValueError: num_heads must divide the width",
)


def _view(ended: str = "exception", steps: int = 0, text: str = "") -> RunView:
    outcome = Outcome(ended=ended, steps=steps, error_type="E", error_text=text)
    return RunView("as_is", "r", (outcome,))


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("ended", ["exception", "exit", "returned"])
def test_every_message_of_a_missing_device_leads_to_a_rehearsal(said: str, ended: str) -> None:
    assert wants_cuda(_view(ended), f"epoch 0\n{said}\n")


@pytest.mark.parametrize("said", OTHER)
def test_other_errors_do_not(said: str) -> None:
    assert not wants_cuda(_view(), said)


def test_what_a_training_prints_is_no_request() -> None:
    assert not wants_cuda(_view("returned", steps=5), "no GPU found, training on the CPU")
    assert not wants_cuda(_view("time"), "no GPU found, training on the CPU")


def test_code_that_is_compiled_for_cuda_cannot_be_rehearsed() -> None:
    lacks = "bitsandbytes library: CUDA is required, no GPU found"
    assert not wants_cuda(_view(text=lacks), lacks)


@pytest.mark.parametrize(
    ("policy", "has_cuda", "hinted"),
    [("native", False, True), ("auto", False, True), ("cuda", False, False),
     ("native", True, False)],
)  # fmt: skip
@pytest.mark.parametrize("ended", ["exception", "exit", "returned", "time"])
def test_an_end_before_the_first_step_has_the_hint(
    ended: str, policy: str, has_cuda: bool, hinted: bool
) -> None:
    asked = RunSpec("train.py", policy=policy)
    outcome = Outcome(ended=ended, error_type="ValueError", error_text="a bad day")
    assert ("--policy cuda" in ending(outcome, asked, has_cuda=has_cuda)[1]) is hinted
    in_fp32 = replace(asked, control="fp32")
    assert "--policy cuda" not in ending(outcome, in_fp32, has_cuda=has_cuda)[1]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ModuleNotFoundError", "No module named 'pyyaml_that_is_not_there'"),
        ("EOFError", "EOF when reading a line"),
        ("RuntimeError", "bitsandbytes library was compiled without CUDA"),
    ],
)
@pytest.mark.parametrize("ended", ["exception", "exit"])
def test_an_end_whose_reason_is_known_has_no_hint(ended: str, kind: str, text: str) -> None:
    """Also where the script catches it, says what to do and leaves."""
    outcome = Outcome(
        ended=ended, error_type=kind, error_text=text, error_line="t.py:3", exit_code=1
    )
    state, said = ending(outcome, RunSpec("train.py", policy="auto"), has_cuda=False)
    assert state is State.FAILED
    assert "t.py:3" in said
    assert "--policy cuda" not in said


# Runs under the policy that is still open.
TRAIN = """
import sys, torch
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
m = torch.nn.Linear(4, 2).to(device)
o = torch.optim.SGD(m.parameters(), 0.1)
def train(scaler, autocast, **region):
    for i in range(9):
        o.zero_grad()
        with torch.autocast(autocast, **region):
            loss = m(torch.randn(8, 4, device=device)).square().mean()
        scaler.scale(loss).backward(); scaler.step(o); scaler.update()
    print("trained to the end")
"""
HOSTILE_TO_AN_END = """
import atexit, os, sys, tempfile, threading
folder = tempfile.TemporaryDirectory(prefix="kept", dir=os.path.dirname(__file__))
os._exit = lambda code: print("caught")
atexit.register(lambda: print("cleaned up"))
threading.Thread(target=threading.Event().wait).start()
"""
# steps that are made, whether a rehearsal follows
SCRIPTS = {
    "switched_off": (
        "try:\n  train(torch.amp.GradScaler('cuda'), 'cuda')\n"
        "except BaseException: print('caught')\nprint('went on')",
        0, True,
    ),
    "cleans_up": (f"{HOSTILE_TO_AN_END}train(torch.amp.GradScaler('cuda'), 'cuda')", 0, True),
    "fp32_for_want_of_a_device": (
        "on = device == 'cuda'\n"
        "train(torch.amp.GradScaler('cuda', enabled=on), device, enabled=on)",
        1, True,
    ),
    "bf16_by_default": ("train(torch.amp.GradScaler(device, enabled=False), device)", 1, True),
    "bf16_by_its_own_words": (
        "for i in range(9):\n  with torch.autocast(device, dtype=torch.bfloat16):\n"
        "    loss = m(torch.randn(8, 4)).square().mean()\n  loss.backward(); o.step()",
        9, False,
    ),
    "handled_and_left": (
        "try:\n  try: torch.zeros(1).cuda()\n"
        "  except Exception as e: raise KeyError('config') from e\n"
        "except KeyError: sys.exit(3)",
        0, True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Ran]]:
    folder = tmp_path_factory.mktemp("open")
    with ScriptRuns(spec(), folder / "runs.db") as served:
        run = Runner(served)
        paths = {n: write_script(folder, f"{n}.py", TRAIN + s[0]) for n, s in SCRIPTS.items()}
        control = run(paths["bf16_by_its_own_words"], control="fp32", policy="auto")
        yield {"control": control} | {n: run(path, policy="auto") for n, path in paths.items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_ends_as_soon_as_a_rehearsal_is_certain(name: str, runs: dict[str, Ran]) -> None:
    _, steps, rehearsed = SCRIPTS[name]
    ran = runs[name]
    said = f"{ran.out.decode()}{ran.err.decode()}{ran.run.info.traceback}"
    assert len(ran.steps) == steps, said
    assert ran.run.info.state is State.FINISHED or name == "handled_and_left"
    assert not {"caught", "went on", "trained to the end"} & set(said.splitlines())
    view = RunView("as_is", ran.run.info.id, ran.run.observations)
    assert wants_cuda(view, said) is rehearsed


def test_what_a_script_registered_is_cleaned_up(
    runs: dict[str, Ran], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Once, and without waiting for its threads."""
    ran = runs["cleans_up"]
    assert ran.out.decode().splitlines() == ["cleaned up"]
    assert not list(tmp_path_factory.getbasetemp().glob("open*/kept*"))


@pytest.mark.parametrize(("policy", "given"), [("auto", "native"), ("cuda", "cuda")])
def test_a_single_run_is_never_ended_for_a_rehearsal(
    policy: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def runs_of(made: RunSpec, store: Path) -> ScriptRuns:
        asked.append(made.policy)
        raise KeyboardInterrupt

    monkeypatch.setattr("ampscope.cli.diagnose.ScriptRuns", runs_of)
    script = write_script(tmp_path, "t.py", "")
    CliRunner().invoke(
        main, ["run", "--policy", policy, "--store", f"{tmp_path}/r.db", str(script)]
    )
    assert asked == [given]


def test_a_control_runs_on(runs: dict[str, Ran]) -> None:
    """That nothing ran in half says nothing there, and a short control acquits or blames none."""
    assert len(runs["control"].steps) == 9
