"""The command line, started as a person starts it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ampscope.records import State
from ampscope.store.reader import Reader
from tests.helpers.child_runs import (
    PATIENCE_S,
    assert_one_sentence,
    run_command,
    started_runs,
    terminal,
    wait_until,
    workload_file,
)

QUIET = ("--histogram-every", 0, "--trace-every", 0, "--shadow-every", 0)


@pytest.fixture(autouse=True)
def _locks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_two_precisions_and_a_table_of_eighty_columns(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    done = run_command(
        "probe", "lenet", "--precision", "fp16-noscaler,fp16", "--loss-factor", 2.0**-12,
        "--steps", 2, "--shadow-every", 1, "--store", store,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in done.stdout
    header = " ".join(lines[:4])
    for word in ("precision", "loss", "scale", "skips", "below/", "cancel.", "normal", "both"):
        assert word in header
    with Reader(store) as reader:
        runs = {info.spec.precision: info.id for info in reader.runs()}
    rows = {line.split()[1]: line.split() for line in lines if line[:12] in runs.values()}
    below = {name: float(row[-3].removesuffix("%")) for name, row in rows.items()}
    second = [line.split() for line in lines if line.strip().startswith("→")]
    cancelled = [float(row[-1].removesuffix("%")) for row in second]
    assert below["fp16-noscaler"] > 10  # a small loss's gradients vanish without a scaler
    assert below["fp16"] < 0.01
    assert max(cancelled) < 0.1  # max pooling and ReLU may choose another element in half
    assert rows["fp16-noscaler"][-5] == "–"  # no scale
    assert rows["fp16"][-5].startswith("2^")


def test_json_and_nothing_else_on_standard_output(tmp_path: Path) -> None:
    name = workload_file(tmp_path, "becomes_nan", "value = value * float('nan')")
    done = run_command(
        "probe", name, "--precision", "fp32", "--steps", 3, "--json", "--store", tmp_path / "s.db"
    )
    (run,) = json.loads(done.stdout, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert (run["state"], run["steps"], run["first_loss"]) == ("finished", 3, "nan")
    assert run["policy"] in ("rehearsal", "cuda")
    assert run["title"] == "becomes_nan.py:build tiny fp32"
    assert done.returncode == 0


def test_bad_input_before_and_in_the_child(tmp_path: Path) -> None:
    store = ("--store", tmp_path / "s.db")
    for arguments, what, status in (
        (("probe", "gtp", *store), "Did you mean gpt", 2),
        (("probe", "gpt", "--steps", -1, *store), "Steps must be from 1", 2),
        (("probe", "gpt", "--precision", " , ", *store), "at least one precision", 2),
        (("probe", "gpt", "--precision", "tf32", "--device", "cpu", *store), "tf32 needs", 2),
    ):
        done = run_command(*arguments)
        assert_one_sentence(done, what)
        assert done.returncode == status
    assert not (tmp_path / "s.db").exists()
    name = workload_file(tmp_path, "raises", "raise ValueError('a [bold]secret[/bold]')")
    done = run_command("probe", name, "--precision", "fp32", *store)
    assert_one_sentence(done, "ValueError: a [bold]secret[/bold]")
    assert done.returncode == 1


def test_ctrl_c_stops_the_runs_and_keeps_what_they_recorded(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    name = workload_file(tmp_path, "slow", "time.sleep(0.1)")
    asked = ("probe", name, "--precision", "fp32,bf16", "--steps", 9000, *QUIET)
    with terminal(store, *asked) as process:
        first, second = started_runs(store, 2)
        wait_until(store, first, lambda info: info.steps_done > 0)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert "Traceback" not in out + errors
    assert "What was recorded is kept" in errors
    with Reader(store) as reader:
        assert {reader.run(run_id).state for run_id in (first, second)} == {State.CANCELLED}
        assert reader.run(first).steps_done == len(reader.steps(first)) > 0
        assert reader.run(second).steps_done == 0


def test_a_killed_child_is_told(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    name = workload_file(tmp_path, "slow", "time.sleep(0.1)")
    with terminal(store, "probe", name, "--precision", "fp32", "--steps", 9000) as process:
        (run_id,) = started_runs(store, 1)
        info = wait_until(store, run_id, lambda info: info.steps_done > 0)
        assert info.pid is not None
        assert info.pid != process.pid
        os.kill(info.pid, signal.SIGKILL)
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "exited without reporting an error" in errors
    assert "Traceback" not in out + errors
