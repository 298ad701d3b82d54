"""What people get wrong ends in one clear sentence, and what was flushed before stays readable."""

from __future__ import annotations

import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ampscope.errors import BadInput, StoreError
from ampscope.experiments.launch import launch
from ampscope.experiments.validate import checked
from ampscope.records import Cadence, RunInfo, RunSpec, ScalerSpec, State, StepRecord
from ampscope.store import db
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, request_cancel
from tests.child_runs import (
    HEAD,
    TAIL,
    assert_one_sentence,
    run_command,
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


def test_a_good_spec_is_let_through(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("")
    for name in ("gpt", "lab.models:build_vit", "lab.models", "vit:build", str(file), f"{file}:b"):
        assert checked(RunSpec(name)).workload == name


@dataclass(frozen=True)
class Case:
    """A workload file that ends badly, and what its run says."""

    name: str
    in_loss: str = ""
    source: str = ""
    what: str = ""
    state: State = State.FAILED
    spec: RunSpec = RunSpec("", steps=30, cadence=Cadence(1, 1, 5))
    steps: int = 0  # that are kept at least
    has_traceback: bool = True


CASES = (
    Case("no_build", source="x = 1\n", what="has no function 'build'"),
    Case("syntax", source="def build(:\n", what="SyntaxError at line 1"),
    Case(
        "build_raises", source="def build(seed):\n    1 / 0\n", what="ZeroDivisionError at line 2"
    ),
    Case("build_exits", source="import sys\ndef build(seed):\n    sys.exit(3)\n", what="ended the"),
    Case("returns_none", source="def build(seed):\n    pass\n", what="but it returned None"),
    Case("no_loss", "return None", what="returned None. It must return a scalar"),
    Case("no_scalar", "return model(batch)", what=r"shape (2, 2). Reduce it to one number"),
    Case("detached", "return value.detach()", what="not depend on any trainable parameter"),
    Case("later", "if calls > 9: raise KeyError('oh <b>no</b>')", what="KeyError", steps=3),
    Case("exits", "if calls > 9: raise SystemExit(7)", what="called sys.exit(7)", steps=3),
    Case(
        "no_batches",
        source=HEAD + TAIL.replace("[torch.ones(2, 4)]", "(torch.ones(2, 4) for _ in range(6))"),
        what="ended after 6 batches",
        steps=6,
    ),
    Case(
        "no_parameters",
        source=HEAD + TAIL.replace("nn.Linear(4, 2)", "nn.ReLU()"),
        what="`optimizer` raised ValueError",
    ),
    Case(
        "hangs",
        "if calls > 9: time.sleep(600)",
        what="Stopped at the time limit of 5 s",
        spec=RunSpec("", steps=30, time_limit_s=5.0, cadence=Cadence(1, 1, 5)),
        steps=3,
    ),
    Case(
        "too_large",
        "if calls > 9: torch.zeros(1 << 33)",
        what="Out of memory (limit 4000 MiB)",
        spec=RunSpec("", steps=30, memory_limit_mib=4000, cadence=Cadence(1, 1, 5)),
        steps=3,
    ),
    Case("tf32", what="tf32 needs a CUDA device", spec=RunSpec("", precision="tf32")),
    Case(
        "kills_itself",
        "if calls > 9: time.sleep(1) or __import__('os').kill(__import__('os').getpid(), 9)",
        what="without a word",
        state=State.LOST,
        has_traceback=False,
    ),
)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RunInfo]]:
    """All cases run side by side: what takes time is that each imports torch."""
    folder = tmp_path_factory.mktemp("bad")
    store = folder / "runs.db"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        ids = {}
        for case in CASES:
            name = workload_file(folder, case.name, case.in_loss or "pass")
            if case.source:
                (folder / f"{case.name}.py").write_text(case.source)
            ids[case.name] = launch(replace(case.spec, workload=name, label=case.name), store)
        yield lambda name: wait_until(store, ids[name])
        for run_id in ids.values():
            request_cancel(store, run_id)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_workload_that_ends_badly_says_why(
    case: Case, ended: Callable[[str], RunInfo], tmp_path_factory: pytest.TempPathFactory
) -> None:
    info = ended(case.name)
    assert info.state is case.state
    assert case.what in info.message
    assert info.message.endswith((".", ")"))
    assert "\n" not in info.message
    assert len(info.message) < 600
    assert ("most recent call last" in info.traceback) == case.has_traceback
    assert info.steps_done >= case.steps
    folder = next(tmp_path_factory.getbasetemp().glob("bad*"))
    with Reader(folder / "runs.db") as reader:
        assert len(reader.steps(info.id)) == info.steps_done


def another_version(path: Path) -> None:
    RunWriter.create(path, GPT).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {db.SCHEMA_VERSION + 1}")
    connection.close()


def another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.execute(f"PRAGMA user_version = {db.SCHEMA_VERSION}")
    connection.commit()
    connection.close()


def truncated(path: Path) -> None:
    writer = RunWriter.create(path, GPT)
    writer.add_step(StepRecord(0))
    writer.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])


STORES = {
    "another version": (another_version, "has schema version"),
    "another program's": (another_program, "a database of another program"),
    "not SQLite": (lambda path: path.write_text("no database at all\n" * 99), "(not SQLite)"),
    "a folder": (lambda path: path.mkdir(), "a folder"),
    "below a file": (lambda path: path.parent.rmdir() or path.parent.write_text(""), "Cannot use"),
    "damaged": (truncated, "Choose another file with --store"),
}


@pytest.mark.parametrize("make", STORES)
def test_a_store_that_cannot_be_used(make: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "runs.db"
    path.parent.mkdir()
    prepare, what = STORES[make]
    prepare(path)
    with pytest.raises(StoreError) as writing:
        launch(GPT, path)
    assert what in str(writing.value)
    done = run_command("probe", "gpt", "--store", path)
    assert_one_sentence(done, what)
    assert done.returncode == 2
    assert_one_sentence(run_command("runs", "list", "--store", path), str(path))


def test_a_store_that_is_not_there_yet(tmp_path: Path) -> None:
    done = run_command("runs", "list", "--store", tmp_path / "none.db")
    assert_one_sentence(done, "There is no store at")
    assert not (tmp_path / "none.db").exists()


def test_a_full_disk_keeps_what_was_flushed(tmp_path: Path) -> None:
    """SQLite's own limit on the size of the file raises the same error as a disk does."""
    path = tmp_path / "runs.db"
    writer = RunWriter.create(path, GPT)
    pages = writer._connection.execute("PRAGMA page_count").fetchone()[0]
    writer._connection.execute(f"PRAGMA max_page_count = {pages + 8}")
    step = 0
    with pytest.raises(StoreError, match="is full"):
        while step < 10_000:
            for _ in range(20):
                writer.add_step(StepRecord(step, loss=1.5, grad_norm=2.5))
                step += 1
            writer.flush()
    assert 20 < step < 10_000
    with Reader(path) as reader:
        assert [s.step for s in reader.steps(writer.run_id)] == list(range(step - 20))
    writer._connection.close()


def read_only(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run with the folder mounted read-only, which holds for root as well."""
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
    whole = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(folder)]
    return subprocess.run([*whole, *command], capture_output=True, text=True, timeout=120)


def test_a_read_only_store_can_be_read_and_not_written(tmp_path: Path) -> None:
    from tests.child_runs import command_line

    path = tmp_path / "store" / "runs.db"
    writer = RunWriter.create(path, GPT)
    writer.finish(State.FINISHED)
    writer.close()
    if read_only(path.parent, ["true"]).returncode:
        pytest.skip("no user namespaces here to mount a folder read-only")
    listed = read_only(path.parent, command_line("runs", "list", "--store", path))
    assert listed.returncode == 0, listed.stderr
    assert writer.run_id in listed.stdout
    assert_one_sentence(
        read_only(path.parent, command_line("probe", "gpt", "--store", path)), str(path)
    )
    path.unlink()
    assert_one_sentence(
        read_only(path.parent, command_line("probe", "gpt", "--store", path)), str(path)
    )
