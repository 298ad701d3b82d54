"""``ampscope hardware --bench``: a real, quick measurement of this machine's CPU, printed."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.store.reader import Reader

pytestmark = pytest.mark.slow
LIMIT_S = 90.0  # it takes 10 s on two idle cores


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench") / "runs.db"


@pytest.fixture(scope="module")
def printed(store: Path) -> dict[str, Any]:
    began = time.monotonic()
    command = ["hardware", "--bench", "--quick", "--device", "cpu", "--json", "--store", str(store)]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert time.monotonic() - began < LIMIT_S
    return json.loads(done.stdout)


def test_it_prints_the_machine_and_the_bench(printed: dict[str, Any]) -> None:
    assert printed["schema"] == 1
    assert printed["software"]["torch"] == printed["bench"]["torch"]
    bench = printed["bench"]
    assert bench["device"] == "cpu"
    assert bench["device_name"]
    assert bench["is_quick"]
    age = time.time() - datetime.fromisoformat(bench["date"]).timestamp()
    assert 0 <= age < 600


def test_every_dtype_is_there_with_its_spread_or_its_reason(printed: dict[str, Any]) -> None:
    found = {c["dtype"]: c for c in printed["bench"]["ceilings"]}
    assert set(found) == {"fp64", "fp32", "tf32", "bf16", "fp16", "int8", "e4m3"}
    assert found["tf32"]["flops_s"] is None
    assert "Tensor Cores" in found["tf32"]["note"]
    for dtype in ("fp64", "fp32", "bf16"):
        assert found[dtype]["flops_s"] > 1e8  # 0.1 GFLOP/s: any CPU of this century
        assert found[dtype]["spread"] >= 0
        assert found[dtype]["vendor_flops_s"] is None  # no figures of CPUs are known


def test_every_rate_follows_from_its_time(printed: dict[str, Any]) -> None:
    rates = printed["bench"]["rates"]
    assert {"ceiling", "copy", "align_m", "align_n", "align_k", "align_channels"} == {
        r["series"] for r in rates
    }
    matmuls = [r for r in rates if r["op"] == "matmul" and r["timing"]]
    for rate in matmuls:
        m, n, k = rate["shape"]
        assert rate["flops_s"] == pytest.approx(2 * m * n * k / rate["timing"]["median_s"])
        assert rate["timing"]["repeats"] >= 7
        assert rate["timing"]["low_s"] <= rate["timing"]["median_s"] <= rate["timing"]["high_s"]


def test_the_run_is_kept(printed: dict[str, Any], store: Path) -> None:
    with Reader(store) as reader:
        assert len(reader.results(printed["bench"]["run"])) == len(printed["bench"]["rates"])


def test_quick_without_bench_is_one_sentence() -> None:
    done = CliRunner().invoke(main, ["hardware", "--quick"])
    assert done.exit_code == 2
    assert "add --bench" in done.output


def test_a_device_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    command = ["hardware", "--bench", "--device", "tpu", "--store", str(tmp_path / "runs.db")]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 2
    assert "no device called 'tpu'" in done.output


def test_without_a_bench_nothing_is_measured() -> None:
    done = CliRunner().invoke(main, ["hardware", "--json"])
    assert done.exit_code == 0
    assert "bench" not in json.loads(done.stdout)
