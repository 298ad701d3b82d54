"""Experiment trackers of a diagnosed script: its runs are no training and send nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns, trackers_offline
from ampscope.records import RunSpec

REMOTE = "http://tracking.example:5000"
SCRIPT = """
import os
names = ("WANDB_MODE", "COMET_START_ONLINE", "NEPTUNE_MODE", "MLFLOW_TRACKING_URI")
print([os.environ.get(name) for name in names])
"""
WITH_WANDB = """
import torch
import wandb

run = wandb.init(project="toy")
print("mode:", run.settings.mode)
layer = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = layer(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    wandb.log({"loss": loss.item()})
wandb.finish()
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"WANDB_MODE": "offline", "COMET_START_ONLINE": "0", "SWANLAB_MODE": "offline"}),
        ({"WANDB_MODE": "online"}, {"WANDB_MODE": "offline"}),
        ({"WANDB_MODE": "disabled"}, {"WANDB_MODE": "disabled"}),
        ({"MLFLOW_TRACKING_URI": REMOTE}, {"MLFLOW_TRACKING_URI": "file:./mlruns"}),
        ({"MLFLOW_TRACKING_URI": "databricks"}, {"MLFLOW_TRACKING_URI": "file:./mlruns"}),
        ({"MLFLOW_TRACKING_URI": "file:///a"}, {"MLFLOW_TRACKING_URI": "file:///a"}),
        ({"MLFLOW_TRACKING_URI": "sqlite:///a.db"}, {"MLFLOW_TRACKING_URI": "sqlite:///a.db"}),
        ({"MLFLOW_TRACKING_URI": "./mlruns"}, {"MLFLOW_TRACKING_URI": "./mlruns"}),
        ({"PATH": "/bin"}, {"PATH": "/bin"}),
    ],
)  # fmt: skip
def test_a_tracker_is_offline_or_stays_switched_off(
    given: dict[str, str], expected: dict[str, str]
) -> None:
    made = trackers_offline(given)
    assert {name: made[name] for name in expected} == expected


def test_trackio_has_no_address_and_a_folder_of_the_run() -> None:
    given = {
        "TRACKIO_SPACE_ID": "me/x",
        "TRACKIO_SERVER_URL": REMOTE,
        "TRACKIO_WEBHOOK_URL": REMOTE,
    }
    made = trackers_offline({**given, "TRACKIO_DIR": "/home/me/mine", "PATH": "/bin"})
    trackio = {name: text for name, text in made.items() if name.startswith("TRACKIO_")}
    assert (trackio, made["PATH"]) == ({"TRACKIO_DIR": "./trackio"}, "/bin")


def output(tmp_path: Path, text: str, *, private: bool) -> str:
    script = tmp_path / "train.py"
    script.write_text(text)
    spec = RunSpec(str(script), kind="script", steps=3, time_limit_s=100.0)
    with ScriptRuns(spec, tmp_path / "store" / "runs.db", private=private) as runs:
        return runs.wait(runs.start("as_is")).output


@pytest.mark.parametrize("private", [True, False])
def test_only_the_runs_of_a_diagnosis_are_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    for name in ("WANDB_MODE", "COMET_START_ONLINE", "NEPTUNE_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", REMOTE)
    offline = str(["offline", "0", "offline", "file:./mlruns"])
    as_given = str([None, None, None, REMOTE])
    assert (offline if private else as_given) in output(tmp_path, SCRIPT, private=private)


def test_wandb_sends_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    assert "mode: offline" in output(tmp_path, WITH_WANDB, private=True)
    assert not (tmp_path / "wandb").exists()
