"""Sums into one place, as CUDA rounds them; what of CUDA's arithmetic a CPU cannot show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ampscope.policy import op_lists
from ampscope.policy.tensor_core import TensorCoreMode
from ampscope.zoo.answers import ANSWERS
from tests.helpers.child_runs import run_command

HITS = 5000
ROW = torch.zeros(HITS, dtype=torch.long)
STALLED = {torch.float16: 2048.0, torch.bfloat16: 256.0}
# By the kernels in aten/src/ATen/native/cuda: Embedding.cu, EmbeddingBackwardKernel.cu,
# Indexing.cu, SparseCUDATensor.cu (fp32); ScatterGatherKernel.cu, Indexing.cu's index_add (atomics)
IN_FP32: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda x: F.embedding(ROW, x),
    "embedding bag": lambda x: F.embedding_bag(ROW.view(1, -1), x, mode="sum"),
    "sparse embedding": lambda x: F.embedding(ROW, x, sparse=True),
    "rows by tensor": lambda x: x[ROW],
    "elements by tensor": lambda x: x[ROW, ROW],
}
IN_HALF: dict[str, Callable[[Tensor], Tensor]] = {
    "index_select": lambda x: x.index_select(0, ROW),
    "gather": lambda x: x.gather(0, ROW[:, None].expand(-1, x.shape[1])),
    "gather, last dimension": lambda x: x.gather(1, ROW[None].expand(x.shape[0], -1)),
    "take": lambda x: x.take(ROW),
}


def first_gradient(op: Callable[[Tensor], Tensor], dtype: torch.dtype, width: int = 8) -> float:
    table = torch.ones(4, width, dtype=dtype, requires_grad=True)
    with TensorCoreMode():
        op(table).sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        gradient = table.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = gradient.coalesce().values()
    assert gradient.dtype is dtype
    return float(gradient[0, 0])


@pytest.mark.parametrize("dtype", STALLED)
@pytest.mark.parametrize("name", IN_FP32)
def test_a_row_that_is_used_often_gets_the_whole_gradient(name: str, dtype: torch.dtype) -> None:
    expected = float(torch.tensor(float(HITS)).to(dtype))
    assert first_gradient(IN_FP32[name], dtype) == expected


@pytest.mark.parametrize("dtype", STALLED)
@pytest.mark.parametrize("name", IN_HALF)
def test_atomic_sums_stall_in_half_as_on_cuda(name: str, dtype: torch.dtype) -> None:
    assert first_gradient(IN_HALF[name], dtype) == STALLED[dtype]


def test_rows_longer_than_a_warp_are_rounded_value_by_value_on_cuda() -> None:
    assert first_gradient(IN_FP32["rows by tensor"], torch.float16, width=33) == 2048.0
    assert first_gradient(IN_FP32["embedding"], torch.float16, width=33) == 5000.0


def test_forms_in_place_and_what_does_not_accumulate() -> None:
    ones = torch.ones(HITS, 3, dtype=torch.float16)
    with TensorCoreMode():
        put = torch.zeros(4, 3, dtype=torch.float16).index_put_((ROW,), ones, accumulate=True)
        set_once = torch.zeros(4, 3, dtype=torch.float16).index_put_((ROW,), ones)
        added = torch.zeros(4, 3, dtype=torch.float16).index_add_(0, ROW, ones)
        doubled = torch.zeros(4, 3, dtype=torch.float16).index_add(0, ROW[:2], ones[:2], alpha=2)
        spread = torch.zeros(3, 4, dtype=torch.float16).scatter_add_(
            1, ROW.expand(3, -1), ones.t().contiguous()
        )
        wide = torch.zeros(4, 3).index_add_(0, ROW, ones.float())
    assert (put[0, 0], set_once[0, 0], added[0, 0]) == (5000.0, 1.0, 2048.0)
    assert (doubled[0, 0], spread[0, 0], wide[0, 0]) == (4.0, 2048.0, 5000.0)


@pytest.mark.parametrize("dtype", STALLED)
def test_sums_without_repetition_are_what_the_cpu_computes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    target, source = torch.randn(6, 5).to(dtype), torch.randn(3, 5).to(dtype)
    index, places = torch.tensor([4, 0, 2]), torch.randint(6, (3, 5))
    places[1], places[2] = (places[0] + 1) % 6, (places[0] + 2) % 6
    for op in (
        lambda: target.index_add(0, index, source),
        lambda: target.scatter_add(0, places, source),
        lambda: target.t().contiguous().scatter_add(1, places.t(), source.t()),
        lambda: target.index_put((index,), source, accumulate=True),
    ):
        native = op()
        with TensorCoreMode():
            assert op().equal(native)


def test_gaps_are_chosen_by_what_ran_and_by_what_the_finding_rests_on() -> None:
    ran = {("aten.mm", "fp16"), ("aten.convolution", "fp32"), ("aten.relu", "fp16")}
    ids = [gap.id for gap in op_lists.met_by(ran)]
    assert ids == ["split_k", "tf32_convolution"]
    assert len(op_lists.texts(ids, "rehearsal")) == 2
    (matmul,) = op_lists.texts(ids, "rehearsal", "aten.mm")
    assert "allow_fp16_reduced_precision_reduction" in matmul
    assert op_lists.texts(ids, "rehearsal", "aten.exp") == []
    assert op_lists.texts(ids, "cuda") == []  # CUDA itself
    assert op_lists.met_by({("aten.mm", "fp32")}) == ()
    embedding = [gap.id for gap in op_lists.met_by({("aten.embedding_dense_backward", "fp16")})]
    (said,) = op_lists.texts(embedding, "native", "aten.embedding_dense_backward")
    assert "fault of CPU arithmetic" in said
    assert op_lists.texts(embedding, "rehearsal", "aten.embedding_dense_backward") == []
    (rnn,) = op_lists.texts(
        [gap.id for gap in op_lists.met_by({(op_lists.RNN, "fp16")})], "rehearsal"
    )
    assert "cuDNN" in rnn


def test_c82_is_told_as_a_fault_of_cpu_arithmetic(tmp_path: Path) -> None:
    answer = next(a for a in ANSWERS if a.id == "C82")
    assert answer.policy == "native"
    assert "CPU arithmetic alone" in answer.note
    found = {}
    for policy in ("native", "cuda"):
        out = tmp_path / f"{policy}.json"
        run_command(
            "diagnose", "--policy", policy, "--json", out, "--store", tmp_path / "s.db",
            Path(__file__).parents[2] / "core/ampscope/zoo/scripts" / answer.script,
        )  # fmt: skip
        found[policy] = json.loads(out.read_text())
    assert found["native"]["findings"][0]["cause"] == "half_accumulation_stagnation"
    assert any("fault of CPU arithmetic" in note for note in found["native"]["notes"])
    assert found["cuda"]["verdict"] == "no_fault"
