"""`ampscope export --to tensorboard`, read back by TensorBoard's own EventAccumulator."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.store.reader import Reader
from tests.helpers.exported_run import COUNTS_0, EDGES_0, write_run

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def export(store: Path, run_id: str, out: Path, *more: str) -> str:
    arguments = ["export", run_id, "--to", "tensorboard", "--out", str(out), *more]
    result = CliRunner().invoke(main, [*arguments, "--store", str(store)])
    assert result.exit_code == 0, result.output
    return result.output


def read(folder: Path) -> accumulators.EventAccumulator:
    keep_all = {accumulators.SCALARS: 0, accumulators.HISTOGRAMS: 0}
    return accumulators.EventAccumulator(str(folder), size_guidance=keep_all).Reload()


def scalars(found: accumulators.EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_scalars(store: Path, tmp_path: Path) -> None:
    run_id = write_run(store)
    output = export(store, run_id, tmp_path / "tb")
    assert f"3 steps, 4 histograms -> {tmp_path / 'tb' / run_id}" in output
    assert f"tensorboard --logdir {tmp_path / 'tb'}\n" in output
    found = read(tmp_path / "tb" / run_id)
    assert scalars(found, "step/loss") == [(0, 2.5), (1, math.inf), (2, 1.5)]
    assert scalars(found, "step/loss_scale") == [(0, 3.0), (1, 4.0), (2, 2.0)]
    assert scalars(found, "step/skipped") == [(0, 0.0), (1, 1.0), (2, 0.0)]
    assert scalars(found, "step/learning_rate")[0] == (0, pytest.approx(1e-3))
    assert scalars(found, "step/grad_norm")[0] == (0, 0.25)
    assert scalars(found, "step/moved_share")[0] == (0, 0.5)
    assert scalars(found, "step/time_s")[0] == (0, 10.0)
    assert "step/peak_bytes" not in found.Tags()["scalars"]  # was not recorded
    assert scalars(found, "lost_share/grad_output") == [(0, pytest.approx(3 / 100))]
    assert scalars(found, "fp16_lost_share/grad_output") == [(0, pytest.approx(3 / 12))]
    assert scalars(found, "fp16_lost_share/weight_grad") == [(0, 0.0), (2, 0.0)]


def test_histograms_are_unscaled_and_complete(store: Path, tmp_path: Path) -> None:
    run_id = write_run(store)
    export(store, run_id, tmp_path / "tb", "--axis", "magnitude")
    found = read(tmp_path / "tb" / run_id)
    first, last = found.Histograms("weight_grad/fc")
    value = first.histogram_value
    assert value.bucket_limit == pytest.approx(EDGES_0)
    assert value.bucket == [0, *COUNTS_0]
    assert (value.min, value.max) == pytest.approx((EDGES_0[0], EDGES_0[-1]))
    assert value.num == 12
    assert (last.step, last.histogram_value.bucket_limit) == (2, [0.5, 1.0])
    assert scalars(found, "zeros/weight_grad/fc") == [(0, 9), (2, 0)]
    assert scalars(found, "nan/weight_grad/fc") == [(0, 1), (2, 0)]
    assert scalars(found, "inf/weight_grad/fc") == [(0, 2), (2, 0)]
    root = found.Histograms("activation/(model)")[0].histogram_value
    assert root.bucket_limit == [2.0, 4.0]


def test_time_is_that_of_the_training(store: Path, tmp_path: Path) -> None:
    run_id = write_run(store)
    export(store, run_id, tmp_path / "tb", "--axis", "magnitude")
    with Reader(store) as reader:
        started = reader.run(run_id).started
    times = [event.wall_time for event in read(tmp_path / "tb" / run_id).Scalars("step/loss")]
    assert started is not None
    assert times == pytest.approx([started + 11, started + 22, started + 33])


def test_log2_axis(store: Path, tmp_path: Path) -> None:
    run_id = write_run(store)
    export(store, run_id, tmp_path / "tb")
    last = read(tmp_path / "tb" / run_id).Histograms("weight_grad/fc")[1].histogram_value
    assert last.bucket_limit == [-1.0, 0.0]


def test_a_second_export_into_the_same_folder_is_refused(store: Path, tmp_path: Path) -> None:
    run_id = write_run(store)
    export(store, run_id, tmp_path / "tb")
    arguments = ["export", run_id, "--to", "tensorboard", "--out", str(tmp_path / "tb")]
    result = CliRunner().invoke(main, [*arguments, "--store", str(store)])
    assert result.exit_code == 2
    assert "holds an export already" in result.output


@pytest.mark.parametrize("program", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_sentence(
    store: Path, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = write_run(store)
    monkeypatch.setattr("ampscope.ext.trackers.steps.find_spec", lambda name: None)
    arguments = ["export", run_id, "--to", program, "--out", str(tmp_path), "--store", str(store)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.output.count("\n") == 1
    assert f'pip install "ampscope[{program}]"' in result.output


def test_an_unknown_run_and_a_file_as_folder(store: Path, tmp_path: Path) -> None:
    run_id = write_run(store)
    (tmp_path / "file").write_text("")
    for run, out in (("nowhere", tmp_path), (run_id, tmp_path / "file" / "inner")):
        arguments = ["export", run, "--to", "tensorboard", "--out", str(out)]
        result = CliRunner().invoke(main, [*arguments, "--store", str(store)])
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_the_command_line_does_not_load_these_packages() -> None:
    """Asked in a fresh process: other tests have loaded them here."""
    import subprocess

    packages = {"torch", "wandb", "tensorboard", "mlflow"}
    code = (
        "import sys; from ampscope.cli.main import COMMANDS, main\n"
        "for name in COMMANDS: main.get_command(None, name)\n"
        f"print({packages} & {{*sys.modules}})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stdout.strip() == "set()", found.stderr
