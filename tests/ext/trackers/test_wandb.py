"""`ampscope export --to wandb`, read back from the .wandb file it left.

The file is a LevelDB log (github.com/google/leveldb, doc/log_format.md) of wandb's own protobuf
records, behind a 7-byte header. It is read here from that description, not by ampscope.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from tests.helpers.exported_run import COUNTS_0, EDGES_0, check_nothing_is_sent, write_run

pytest.importorskip("wandb")

BLOCK = 32768
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # the rest of a block that holds no chunk header
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    folder = tmp_path_factory.mktemp("wandb")
    run_id = write_run(folder / "runs.db")
    arguments = [
        "export",
        run_id,
        "--to",
        "wandb",
        "--axis",
        "magnitude",
        "--out",
        str(folder / "out"),
    ]
    result = CliRunner().invoke(main, [*arguments, "--store", str(folder / "runs.db")])
    assert result.exit_code == 0, result.output
    (found,) = (folder / "out" / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    assert str(found.parent) in result.output
    deadline = time.monotonic() + 60
    written = list(records(found))
    while not any(record.HasField("exit") for record in written):
        assert time.monotonic() < deadline, "wandb's own process, which writes the file, has not"
        time.sleep(0.1)
        written = list(records(found))
    return run_id, written


def history(exported: tuple[str, list[Any]]) -> list[dict[str, Any]]:
    """One dictionary a step, as wandb logged it."""
    out = []
    for record in exported[1]:
        if record.HasField("history"):
            found: dict[str, Any] = {"step": record.history.step.num}
            for item in record.history.item:
                *outer, name = item.nested_key or [item.key]
                place = found
                for key in outer:
                    place = place.setdefault(key, {})
                place[name] = json.loads(item.value_json)
            out.append(found)
    return out


def test_scalars(exported: tuple[str, list[Any]]) -> None:
    steps = history(exported)
    assert [s["step"] for s in steps] == [0, 1, 2]
    assert [s["step/loss"] for s in steps] in ([2.5, "Infinity", 1.5], [2.5, float("inf"), 1.5])
    assert [s["step/loss_scale"] for s in steps] == [3.0, 4.0, 2.0]
    assert [s["step/skipped"] for s in steps] == [0, 1, 0]
    assert steps[0]["lost_share/grad_output"] == pytest.approx(0.03)
    assert steps[0]["fp16_lost_share/grad_output"] == pytest.approx(0.25)
    assert "step/peak_bytes" not in steps[0]


def test_histograms_are_unscaled_and_complete(exported: tuple[str, list[Any]]) -> None:
    first, _, last = history(exported)
    found = first["weight_grad/fc"]
    assert found["_type"] == "histogram"
    assert found["bins"] == pytest.approx(EDGES_0)
    assert found["values"] == COUNTS_0
    assert (last["weight_grad/fc"]["bins"], last["weight_grad/fc"]["values"]) == ([0.5, 1.0], [4])
    keys = [f"{kind}/weight_grad/fc" for kind in ("zeros", "nan", "inf")]
    assert [first[key] for key in keys] == [9, 1, 2]


def test_the_run_is_named_and_says_what_it_was(exported: tuple[str, list[Any]]) -> None:
    run_id, found = exported
    (run,) = (record.run for record in found if record.HasField("run"))
    assert (run.run_id, run.display_name, run.project) == (run_id, "by hand", "ampscope")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["workload"] == "gpt"
    assert not any(r.HasField("environment") for r in found)  # that of the export, not its own


def test_nothing_is_sent(tmp_path: Path) -> None:
    """A proxy that counts who comes: the export does not, a program that asks for a page does."""
    run_id = write_run(tmp_path / "runs.db")
    export = ["-m", "ampscope.cli.main", "export", run_id, "--to", "wandb"]
    export += ["--out", str(tmp_path), "--store", str(tmp_path / "runs.db")]
    check_nothing_is_sent([sys.executable, *export])
