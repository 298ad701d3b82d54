"""`ampscope runs`: list, show, cancel, delete, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ampscope.cli.main import main
from ampscope.records import Event, Machine, RunSpec, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers import script_stores, stores, watched_stores


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def run(store: Path, state: State | None = State.FINISHED, message: str = "") -> str:
    spec = RunSpec("gpt", precision="fp16-noscaler", steps=2, label="[red]<b>label</b>")
    writer = RunWriter.create(store, spec)
    writer.start(Machine("cuda:0", "NVIDIA H100", "cuda"))
    writer.add_step(StepRecord(0, loss=2.0, scale=float("inf")))
    if state is not None:
        writer.finish(state, message)
    writer.close()
    return writer.run_id


def call(*arguments: object, text: str = "") -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)), input=text, env={"COLUMNS": "80"})


def test_a_measurement_has_no_number_of_steps(store: Path) -> None:
    bench = stores.finished(store, RunSpec(workload="", kind="bench"))
    output = call("runs", "list", "--store", store).output
    (row,) = [line for line in output.splitlines() if line.startswith(bench)]
    assert "/" not in row


def test_list(store: Path) -> None:
    ids = [run(store), run(store, State.FAILED, "It [bold]broke[/bold].")]
    result = call("runs", "list", "--store", store)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line[:12] for line in lines if line[:12] in ids] == [ids[1], ids[0], ids[1]]
    assert max(map(len, lines[:6])) <= 80
    assert "[red]<b>label</b>" in result.output  # as text
    finished = next(line for line in lines if line.startswith(ids[0]))
    with Reader(store) as reader:
        assert f"/{reader.run(ids[0]).spec.steps}" in finished
    assert f"{ids[1]} ([red]<b>label</b>): It [bold]broke[/bold]." in result.output
    found = json.loads(call("runs", "list", "--json", "--limit", 1, "--store", store).output)
    assert [r["id"] for r in found] == [ids[1]]


def test_an_empty_store_says_what_to_do(store: Path) -> None:
    RunWriter.create(store, RunSpec("gpt")).close()
    with Reader(store) as reader:
        call("runs", "delete", "--yes", reader.runs()[0].id, "--store", store)
    assert "Record a run with" in call("runs", "list", "--store", store).output


def test_show(store: Path) -> None:
    run_id = run(store)
    shown = json.loads(call("runs", "show", run_id[:11], "--store", store).output)
    assert shown["id"] == run_id
    assert (shown["last_scale"], shown["first_loss"]) == ("inf", 2.0)
    result = call("runs", "show", "nothing", "--store", store)
    assert result.exit_code == 2
    assert "is not in this store" in result.output


def test_cancel(store: Path) -> None:
    active, ended = run(store, None), run(store)
    assert "was asked to stop" in call("runs", "cancel", active, "--store", store).output
    writer = RunWriter(store, active)
    assert writer.beat()
    writer.close()
    assert "is finished already" in call("runs", "cancel", ended, "--store", store).output


def test_delete_asks_first(store: Path) -> None:
    run_id = run(store)
    call("runs", "delete", run_id, "--store", store, text="n\n")
    with Reader(store) as reader:
        assert len(reader.runs()) == 1
    call("runs", "delete", run_id, "--store", store, text="y\n")
    with Reader(store) as reader:
        assert reader.runs() == []


def test_export(store: Path, tmp_path: Path) -> None:
    run_id = run(store)
    out = tmp_path / "run.json"
    result = call("runs", "export", run_id, "--out", out, "--store", store)
    assert result.output.split() == [str(out)]
    assert json.loads(out.read_text())["run"]["id"] == run_id
    folder = tmp_path / "parquet"
    result = call(
        "runs", "export", run_id, "--format", "parquet", "--out", folder, "--store", store
    )
    assert result.exit_code == 0
    assert (folder / "step.parquet").exists()
    result = call("runs", "export", run_id, "--out", tmp_path / "no" / "x.json", "--store", store)
    assert result.exit_code == 2
    assert "Cannot write" in result.output


def test_a_script_is_listed_with_its_control_and_the_steps_it_made(store: Path) -> None:
    baseline = script_stores.healthy_run(store, "as_is")
    script_stores.healthy_run(store, "fp32")
    output = call("runs", "list", "--store", store).output
    assert "(in fp32)" in output
    assert "(unchanged)" not in output
    assert baseline in output
    assert "12/" not in output  # of how many is not known: a script ends when it likes


def test_a_watched_run_shows_its_bad_step_and_how_to_replay_it(store: Path) -> None:
    made = [watched_stores.step(0), watched_stores.step(1, loss=float("nan"))]
    path = str(store.with_name("a b.safetensors"))
    kept = Event(1, "capsule", "loss", "The loss is NaN.", path=path)
    writer = watched_stores.begun(store, made, [kept])
    run_id = watched_stores.ended(writer)
    shown = json.loads(call("runs", "show", "--store", store, run_id).output)
    assert (shown["first_bad_step"], shown["bad_steps"]) == (1, 1)
    (event,) = shown["events"]
    assert event["replay"] == f"ampscope replay '{path}' --model FILE.py:build"
    assert "2/0" not in call("runs", "list", "--store", store).output
