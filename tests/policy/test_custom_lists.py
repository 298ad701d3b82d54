"""What if an op were on the other list: dtypes by torch's own results, undone, refused, run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ampscope.control import Control, list_changes
from ampscope.errors import BadInput
from ampscope.policy.precision import custom_lists
from ampscope.policy.rehearsal import cuda_autocast_lists

FP16, FP32 = torch.float16, torch.float32
OPS = {
    "matmul": lambda x: x @ x,
    "softmax": lambda x: torch.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "gelu": F.gelu,
    "exp": torch.exp,
}


def dtype_of(op: str, x: torch.Tensor) -> torch.dtype:
    with torch.autocast("cpu", FP16):
        return OPS[op](x).dtype


@pytest.mark.parametrize("lists", [contextlib.nullcontext, cuda_autocast_lists])
@pytest.mark.parametrize("op", OPS)
def test_an_op_runs_on_the_named_list_and_goes_back(op, lists):
    half, full = torch.randn(4, 4).half(), torch.randn(4, 4)
    with warnings.catch_warnings(), lists():
        warnings.simplefilter("error")
        before = dtype_of(op, half), dtype_of(op, full)
        with custom_lists({op: "half"}, "cpu"):
            assert dtype_of(op, full) is FP16
        with custom_lists({op: "fp32"}, "cpu"):
            assert dtype_of(op, half) is FP32
        if op in ("exp", "gelu"):  # the others call ops that are in lists themselves
            with custom_lists({op: "as it comes"}, "cpu"):
                assert (dtype_of(op, half), dtype_of(op, full)) == (FP16, FP32)
        assert (dtype_of(op, half), dtype_of(op, full)) == before


def test_widest_takes_the_widest_and_leaves_integers_and_doubles_alone():
    half, full, double = torch.ones(2).half(), torch.ones(2), torch.ones(2, dtype=torch.float64)
    with custom_lists({"add": "widest", "mul": "half"}, "cpu"), torch.autocast("cpu", FP16):
        assert (half + half).dtype is FP16
        assert (half + full).dtype is FP32
        assert (double * double).dtype is torch.float64
        assert (torch.ones(2, dtype=torch.int64) * 2).dtype is torch.int64


def test_numbers_are_those_of_the_named_dtype_and_gradients_flow():
    x = torch.tensor([300.0, -300.0], requires_grad=True)
    with custom_lists({"pow": "half"}, "cpu"), torch.autocast("cpu", FP16):
        assert torch.isinf(x**2).all()  # 90,000 is beyond 65,504
    with custom_lists({"mul": "fp32"}, "cpu"), torch.autocast("cpu", FP16):
        product = x.half() * x.half()
    product.sum().backward()
    assert product.tolist() == [90000.0, 90000.0]
    assert x.grad.tolist() == [600.0, -600.0]


def test_words_round_trip_and_nonsense_is_refused():
    changes = {"softmax": "half", "add": "as it comes"}
    assert dict(Control(f"as_is;{Control.of(op_lists=changes)}").list_changes) == changes
    assert not Control("as_is;fp32").list_changes
    for wrong in (
        "softmax",
        "softmax=fp8",
        "=half",
        "a b=half",
        "softmax=",
        "__import__('os')=half",
        "softmax=half,softmax=fp32",
    ):
        with pytest.raises(BadInput):
            list_changes(wrong)
    with (
        pytest.raises(BadInput, match="no op 'nonsense'"),
        custom_lists({"nonsense": "half"}, "cpu"),
    ):
        pass


def test_a_probe_runs_both_ways_and_the_traced_dtypes_differ(tmp_path: Path):
    command = [sys.executable, "-m", "ampscope.cli.main", "probe", "gpt", "--steps", "2", "--json"]
    command += ["--op-list", "layer_norm=half", "--store", str(tmp_path / "runs.db")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = json.loads(done.stdout)
    assert [run["spec"]["control"] for run in runs] == ["", "op_lists:layer_norm=half"]
    from ampscope.store.reader import Reader

    with Reader(tmp_path / "runs.db") as reader:
        results = []
        for run in runs:
            norms = {
                op.outputs.partition(",")[0]
                for step in reader.steps(run["id"])
                for op in reader.ops(run["id"], step.op_set)
                if op.op == "aten.native_layer_norm" and op.phase == "forward"
            }
            results.append(norms)
    assert results == [{"fp32"}, {"fp16"}]
