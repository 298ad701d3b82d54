"""``ampscope tensor-cores``, started as a user starts it; ``cores`` is its former name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.child_runs import assert_one_sentence, run_command


@pytest.fixture(autouse=True)
def _locks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def test_a_sentence_a_table_of_eighty_columns_and_json(tmp_path: Path) -> None:
    out = tmp_path / "cores.json"
    done = run_command(
        "tensor-cores", "lenet", "--size", "tiny", "--precision", "bf16", "--device", "cpu",
        "--json", out, "--store", tmp_path / "runs.db",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, about, *table = done.stdout.splitlines()
    assert "matmuls" in first
    assert about.startswith("A CPU has no Tensor Cores.")
    assert max(map(len, table)) <= 80
    found = json.loads(out.read_text())
    assert found["sentence"] == first
    calls = sum(p["count"] for one in found["products"] for p in one["places"])
    assert calls == found["step"]["calls"] == sum(found["calls"].values())
    for matmul in found["products"]:
        assert matmul["timing"]["repeats"] >= 5
        assert matmul["flops_s"] == pytest.approx(matmul["flops"] / matmul["timing"]["median_s"])
    assert {rate["series"] for rate in found["ceilings"]} == {"copy", "ceiling"}


def test_fp32_uses_none_on_a_cpu(tmp_path: Path) -> None:
    done = run_command(
        "tensor-cores", "mlp", "--size", "tiny", "--precision", "fp32", "--device", "cpu",
        "--store", tmp_path / "runs.db",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None of ")


def test_wrong_input_is_one_sentence(tmp_path: Path) -> None:
    store = tmp_path / "runs.db"
    done = run_command("tensor-cores", "gtp", "--store", store)
    assert_one_sentence(done, "Did you mean gpt?")
    assert done.returncode == 2
    tf32 = run_command(
        "tensor-cores", "gpt", "--precision", "tf32", "--device", "cpu", "--store", store
    )
    assert tf32.returncode == 2
    assert_one_sentence(tf32, "needs a CUDA device")


SCRIPT = """
import sys, torch
model = torch.nn.Linear(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(int(sys.argv[1])):
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
"""


def test_a_script_untouched(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    store = ("--device", "cpu", "--store", tmp_path / "runs.db")
    done = run_command("tensor-cores", script, "9", *store)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None of 2 matmuls and convolutions runs on ")
    too_short = run_command("tensor-cores", script, "1", *store)
    assert_one_sentence(too_short, "The script ended after one optimizer step")
    assert_one_sentence(
        run_command("tensor-cores", "gpt", "9", *store),
        "gpt takes no arguments; only a script does.",
    )
