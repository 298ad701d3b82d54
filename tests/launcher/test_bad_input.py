"""What people get wrong ends in one clear sentence, and what was flushed before stays readable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.errors import BadInput
from ampscope.launcher.launch import checked, launch
from ampscope.records import Cadence, RunInfo, RunSpec, ScalerSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import request_cancel
from tests.helpers.child_runs import (
    HEAD,
    TAIL,
    cases_of_this_run,
    wait_until,
    workload_file,
)

GPT = RunSpec("gpt")


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (RunSpec("gtp"), "Did you mean gpt"),
        (RunSpec(""), "Name a workload"),
        (RunSpec("no/such/file.py:build"), "does not exist"),
        (RunSpec("/tmp.py:build"), "does not exist"),
        (RunSpec("<script>alert(1)</script>"), "no workload"),
        (replace(GPT, steps=-3), "Steps must be from 1"),
        (replace(GPT, steps=0), "Steps must be from 1"),
        (replace(GPT, steps=10**9), "Steps must be from 1"),
        (replace(GPT, seed=-1), "seed must be from 0"),
        (replace(GPT, precision="fp8"), "no precision called 'fp8'"),
        (replace(GPT, precision="tf32", device="cpu"), "tf32 needs a CUDA device"),
        (replace(GPT, size="huge"), "no size called 'huge'"),
        (replace(GPT, policy="rocm"), "no policy called 'rocm'"),
        (replace(GPT, device="tpu"), "no device called 'tpu'"),
        (replace(GPT, device="cuda:x"), "no device called 'cuda:x'"),
        (replace(GPT, time_limit_s=0.0), "time limit must be more than 0"),
        (replace(GPT, time_limit_s=float("nan")), "time limit must be more than 0"),
        (replace(GPT, memory_limit_mib=-1), "memory limit must be"),
        (replace(GPT, loss_factor=0.0), "loss factor must be a positive"),
        (replace(GPT, loss_factor=float("inf")), "loss factor must be a positive"),
        (replace(GPT, cadence=Cadence(-1)), "cadence is a number of steps"),
        (replace(GPT, scaler=ScalerSpec(0.0)), "initial loss scale must be positive"),
        (replace(GPT, scaler=ScalerSpec(float("nan"))), "initial loss scale must be positive"),
        (replace(GPT, scaler=ScalerSpec(growth_factor=1.0)), "growth factor must be above 1"),
        (replace(GPT, scaler=ScalerSpec(growth_factor=float("inf"))), "growth factor must be"),
        (replace(GPT, scaler=ScalerSpec(backoff_factor=1.0)), "backoff factor must lie between"),
        (replace(GPT, scaler=ScalerSpec(growth_interval=0)), "growth interval must be at least 1"),
    ],
)
def test_a_spec_that_cannot_work_is_refused_before_a_process_starts(
    spec: RunSpec, what: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=what):
        launch(spec, tmp_path / "runs.db")
    assert not (tmp_path / "runs.db").exists()


def test_a_measurement_whose_extension_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampscope.launcher.launch.KINDS", {})
    with pytest.raises(BadInput, match="The extension that measures 'compare' is not here"):
        checked(RunSpec("gpt", kind="compare", precision="fp32,bf16"))


def test_a_good_spec_is_let_through(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    for name in ("gpt", "lab.models:build_vit", "lab.models", "vit:build", str(file), f"{file}:b"):
        assert checked(RunSpec(name)).workload == name


THIRTY = RunSpec("", steps=30, cadence=Cadence(1, 1, 5))
KILLS = "time.sleep(0.2) or (calls > 9 and __import__('signal').raise_signal(9))"
GENERATOR = TAIL.replace("[torch.ones(2, 4)]", "(torch.ones(2, 4) for _ in range(6))")


@dataclass(frozen=True)
class Case:
    """A workload file that ends badly, and what its run says."""

    name: str
    what: str
    in_loss: str = ""
    source: str = ""
    state: State = State.FAILED
    spec: RunSpec = THIRTY
    steps: int = 0  # that are kept at least
    has_traceback: bool = True


def broken(name: str, what: str, source: str) -> Case:
    return Case(name, what, source=source)


def late(name: str, what: str, in_loss: str, **more: Any) -> Case:
    """It goes wrong in the ninth step or so."""
    return Case(name, what, in_loss, steps=3, **more)


CASES = (
    broken("no_build", "has no function 'build'", "x = 1\n"),
    broken("syntax", "SyntaxError at line 1", "def build(:\n"),
    broken("build_raises", "ZeroDivisionError at line 2", "def build(seed):\n    1 / 0\n"),
    broken("build_exits", "ended the program", "def build(seed):\n    raise SystemExit(3)\n"),
    broken("returns_none", "but it returned None", "def build(seed):\n    pass\n"),
    broken("no_parameters", "ValueError", HEAD + TAIL.replace("nn.Linear(4, 2)", "nn.ReLU()")),
    broken("no_batches", "ended after 6 batches", f"{HEAD}{GENERATOR}"),
    Case("no_loss", "returned None. It must return a scalar", "return None"),
    Case("no_scalar", "shape (2, 2). Reduce it to one number", "return model(batch)"),
    Case("detached", "not depend on any trainable parameter", "return value.detach()"),
    Case("tf32", "tf32 needs a CUDA device", spec=RunSpec("", precision="tf32")),
    late("raises", "KeyError: 'oh <b>no</b>'", "if calls > 9: raise KeyError('oh <b>no</b>')"),
    late("exits", "called sys.exit(7)", "if calls > 9: raise SystemExit(7)"),
    late(
        "hangs",
        "Stopped at the time limit of 5 s",
        "if calls > 9: time.sleep(600)",
        spec=replace(THIRTY, time_limit_s=5.0),
    ),
    late(
        "too_large",
        "Out of memory (limit 4000 MiB)",
        "if calls > 9: torch.zeros(1 << 33)",
        spec=replace(THIRTY, memory_limit_mib=4000),
    ),
    late("killed", "without reporting an error", KILLS, state=State.LOST, has_traceback=False),
)


@pytest.fixture(scope="module")
def ended(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], RunInfo]]:
    """The cases run side by side: what takes time is that each imports torch."""
    folder = tmp_path_factory.mktemp("bad")
    store = folder / "runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        ids = {}
        chosen = cases_of_this_run(request)
        for case in (case for case in CASES if case.name in chosen):
            name = workload_file(folder, case.name, case.in_loss or "pass")
            if case.source:
                (folder / f"{case.name}.py").write_text(case.source)
            ids[case.name] = launch(replace(case.spec, workload=name, label=case.name), store)
        yield lambda name: wait_until(store, ids[name])
        for run_id in ids.values():
            request_cancel(store, run_id)


@pytest.mark.quick("build_raises", "exits", "killed")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_workload_that_ends_badly_says_why(
    case: Case, ended: Callable[[str], RunInfo], tmp_path_factory: pytest.TempPathFactory
) -> None:
    info = ended(case.name)
    assert info.state is case.state
    assert case.what in info.message
    assert "\n" not in info.message
    assert len(info.message) < 600
    assert ("most recent call last" in info.traceback) == case.has_traceback
    assert info.steps_done >= case.steps
    folder = next(tmp_path_factory.getbasetemp().glob("bad*"))
    with Reader(folder / "runs.db") as reader:
        assert len(reader.steps(info.id)) == info.steps_done
