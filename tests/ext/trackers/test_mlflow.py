"""`ampscope export --to mlflow`, read back by MLflow's own client."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ampscope.cli.main import main
from tests.helpers.exported_run import COUNTS_0, EDGES_0, write_run

pytest.importorskip("mlflow")


def export(store: Path, run_id: str, out: Path) -> Result:
    arguments = ["export", run_id, "--to", "mlflow", "--out", str(out), "--axis", "magnitude"]
    return CliRunner().invoke(main, [*arguments, "--store", str(store)])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Any, Any]:
    folder = tmp_path_factory.mktemp("mlflow")
    run_id = write_run(folder / "runs.db")
    result = export(folder / "runs.db", run_id, folder / "out")
    assert result.exit_code == 0, result.output
    assert f"3 steps, 4 histograms -> {folder / 'out' / 'mlflow'}\n" in result.output
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "out" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("ampscope")
    (run,) = client.search_runs([experiment.experiment_id])
    return folder, run_id, client, run


def test_every_number_is_there(exported: tuple[Path, str, Any, Any]) -> None:
    _, run_id, client, run = exported

    def history(name: str) -> list[tuple[int, float]]:
        return [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]

    assert history("step/loss") == [(0, 2.5), (1, math.inf), (2, 1.5)]
    assert history("step/loss_scale") == [(0, 3.0), (1, 4.0), (2, 2.0)]
    assert history("step/skipped") == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert history("zeros/weight_grad/fc") == [(0, 9.0), (2, 0.0)]
    assert history("nan/weight_grad/fc") == [(0, 1.0), (2, 0.0)]
    assert history("inf/weight_grad/fc") == [(0, 2.0), (2, 0.0)]
    assert history("zeros/activation/_model_") == [(0, 0.0)]
    assert history("lost_share/grad_output") == [(0, pytest.approx(3 / 100))]
    assert run.data.tags["ampscope.run"] == run_id
    assert "mlflow.user" not in run.data.tags  # who exports it is not who trained
    assert run.data.params["workload"] == "gpt"
    assert (run.info.run_name, run.info.status) == ("by hand", "FINISHED")


def test_histograms_are_unscaled_and_complete(
    exported: tuple[Path, str, Any, Any], tmp_path: Path
) -> None:
    _, _, client, run = exported
    path = client.download_artifacts(run.info.run_id, "histograms.jsonl", str(tmp_path))
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    assert len(lines) == 4
    (first, second) = (line for line in lines if line["name"] == "weight_grad/fc")
    assert (first["step"], first["counts"]) == (0, COUNTS_0)
    assert first["edges"] == pytest.approx(EDGES_0)
    assert (second["step"], second["edges"], second["counts"]) == (2, [0.5, 1.0], [4])


def test_a_second_export_of_a_run_is_refused(exported: tuple[Path, str, Any, Any]) -> None:
    folder, run_id, _, _ = exported
    result = export(folder / "runs.db", run_id, folder / "out")
    assert result.exit_code == 2
    assert "holds this run already" in result.output
    (folder / "file").write_text("")
    result = export(folder / "runs.db", run_id, folder / "file" / "out")
    assert result.exit_code == 2
    assert result.output.startswith("ampscope: Cannot write")
