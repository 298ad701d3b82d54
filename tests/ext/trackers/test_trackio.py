"""`ampscope export --to trackio`: what Trackio is told, by a stand-in with its signatures; and what
the real Trackio then holds, read back by itself in another process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ampscope.cli.main import main
from ampscope.ext.trackers.trackio_folder import local_environment
from tests.helpers.exported_run import COUNTS_0, EDGES_0, check_nothing_is_sent, write_run

# The parameters are those of trackio 0.43. It writes what it was told, and in which environment.
STAND_IN = """
import json, os, warnings
from pathlib import Path

folder = Path(os.environ["TRACKIO_DIR"])
told = folder / "told.json"


class Histogram:
    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        counts, edges = np_histogram
        self.pair = [counts.tolist(), edges.tolist()]


class Api:
    def runs(self, project):
        if not told.exists():
            raise ValueError(f"Project '{project}' does not exist")
        return [type("Run", (), {"name": json.loads(told.read_text())["init"]["name"]})]


def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None,
         bucket_id=None, config=None, resume="never", settings=None, private=None, embed=True,
         auto_log_gpu=None, gpu_log_interval=10.0, auto_log_cpu=None, cpu_log_interval=10.0,
         webhook_url=None, webhook_min_level=None):
    global record
    print("* Trackio project initialized")
    names = ("TRACKIO_", "HF_HUB_OFFLINE")
    environment = {k: v for k, v in os.environ.items() if k.startswith(names)}
    record = {"init": dict(project=project, name=name, config=config, embed=embed, gpu=auto_log_gpu,
                           cpu=auto_log_cpu, space=space_id, server=server_url),
              "environment": environment, "steps": []}


def log(metrics, step=None):
    values = {k: v.pair if isinstance(v, Histogram) else v for k, v in metrics.items()}
    record["steps"].append([step, values])


def finish():
    if (folder / "full").exists():
        warnings.warn("trackio failed to write: no space left")
    told.write_text(json.dumps(record))
"""
REMOTE = {
    "TRACKIO_SPACE_ID": "me/space",
    "TRACKIO_SERVER_URL": "http://tracking.example?write_token=x",
    "TRACKIO_WEBHOOK_URL": "http://hook.example",
    "TRACKIO_DIR": "/nowhere/at/all",
}


def export(store: Path, run_id: str, out: Path) -> Result:
    arguments = ["export", run_id, "--to", "trackio", "--out", str(out), "--axis", "magnitude"]
    return CliRunner().invoke(main, [*arguments, "--store", str(store)])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Trackio's stand-in is found before the real one; returns the folder to export to."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "trackio.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    for name, value in REMOTE.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "out"


def test_what_trackio_is_told(stand_in: Path, tmp_path: Path) -> None:
    run_id = write_run(tmp_path / "runs.db")
    result = export(tmp_path / "runs.db", run_id, stand_in)
    assert result.exit_code == 0, result.output
    folder = stand_in / "trackio"
    assert f"3 steps, 4 histograms -> {folder}\n" in result.output
    assert f"TRACKIO_DIR={folder} trackio show --project ampscope" in result.output
    assert "initialized" not in result.output
    told = json.loads((folder / "told.json").read_text())
    assert told["init"].pop("config")["workload"] == "gpt"
    assert told["init"] == {
        "project": "ampscope", "name": f"by hand ({run_id})", "embed": False,
        "gpu": False, "cpu": False, "space": None, "server": None,
    }  # fmt: skip
    (_, first), (_, second), _ = told["steps"]
    assert [step for step, _ in told["steps"]] == [0, 1, 2]
    assert (first["step/loss"], second["step/loss"]) == (2.5, math.inf)
    counts, edges = first["weight_grad/fc"]
    assert (counts, edges) == (COUNTS_0, pytest.approx(EDGES_0))


def test_no_address_of_the_environment_reaches_trackio(stand_in: Path, tmp_path: Path) -> None:
    run_id = write_run(tmp_path / "runs.db")
    assert export(tmp_path / "runs.db", run_id, stand_in).exit_code == 0
    told = json.loads((stand_in / "trackio" / "told.json").read_text())
    assert told["environment"] == {
        "TRACKIO_DIR": str(stand_in / "trackio"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    assert {name: os.environ[name] for name in REMOTE} == REMOTE  # the caller's own is as it was


def test_a_second_export_and_a_failed_write_are_refused(stand_in: Path, tmp_path: Path) -> None:
    run_id = write_run(tmp_path / "runs.db")
    (stand_in / "trackio").mkdir(parents=True)
    (stand_in / "trackio" / "full").touch()
    result = export(tmp_path / "runs.db", run_id, stand_in)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "trackio failed to write: no space left" in result.output
    result = export(tmp_path / "runs.db", run_id, stand_in)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "holds this run already" in result.output


def test_what_trackio_raises_is_one_sentence(stand_in: Path, tmp_path: Path) -> None:
    broken = tmp_path / "packages" / "trackio.py"
    broken.write_text("raise RuntimeError('needs a newer Python')")
    result = export(tmp_path / "runs.db", write_run(tmp_path / "runs.db"), stand_in)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert "Trackio cannot write" in result.output
    assert "needs a newer Python" in result.output


def test_without_trackio_the_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampscope.ext.trackers.steps.find_spec", lambda package: None)
    result = export(tmp_path / "runs.db", write_run(tmp_path / "runs.db"), tmp_path / "out")
    assert result.exit_code == 2
    assert 'trackio is not installed: pip install "ampscope[trackio]"' in result.output


# The real one.

READ = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage

(run,) = trackio.Api().runs("ampscope")
logs = SQLiteStorage.get_logs("ampscope", run.name, run_id=run.id)
print(json.dumps([run.name, run.config, logs]))
"""
needs_trackio = pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Any]:
    folder = tmp_path_factory.mktemp("trackio")
    run_id = write_run(folder / "runs.db")
    result = export(folder / "runs.db", run_id, folder / "out")
    assert result.exit_code == 0, result.output
    environment = local_environment(dict(os.environ), folder / "out" / "trackio")
    read = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True
    )
    return folder, run_id, json.loads(read.stdout)


@needs_trackio
def test_trackio_holds_every_number(exported: tuple[Path, str, Any]) -> None:
    folder, run_id, (name, config, logs) = exported
    assert name == f"by hand ({run_id})"
    assert (config["workload"], config["_Username"]) == ("gpt", None)
    assert [log["step"] for log in logs] == [0, 1, 2]
    assert [log["step/loss"] for log in logs] == [2.5, math.inf, 1.5]
    assert [log["step/loss_scale"] for log in logs] == [3.0, 4.0, 2.0]
    assert logs[0]["zeros/weight_grad/fc"] == 9.0
    found = logs[0]["weight_grad/fc"]
    assert (found["values"], found["bins"]) == (COUNTS_0, pytest.approx(EDGES_0))
    assert not any("cpu" in key or "gpu" in key for log in logs for key in log)
    result = export(folder / "runs.db", run_id, folder / "out")
    assert result.exit_code == 2
    assert "holds this run already" in result.output


@needs_trackio
def test_trackio_sends_nothing(tmp_path: Path) -> None:
    """A proxy counts who comes, with a Space, a server and a user's token in the environment."""
    run_id = write_run(tmp_path / "runs.db")
    command = [sys.executable, "-m", "ampscope.cli.main", "export", run_id, "--to", "trackio"]
    command += ["--out", str(tmp_path), "--store", str(tmp_path / "runs.db")]
    check_nothing_is_sent(command, **REMOTE, HF_TOKEN="hf_" + "x" * 34)
