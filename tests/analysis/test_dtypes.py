"""Dtypes, casts, FLOPs and what stayed in fp32, on a model that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from ampscope.analysis.op_precision import (
    CastSite,
    cast_kinds,
    cast_sites,
    compute_dtype,
    dtypes_by_module,
    flop_share,
    flops_by_module,
    fold,
    fp32_ops,
    is_half,
    modules_by_precision,
    parameters_by_dtype,
    split,
)
from ampscope.numerics.histogram import RAW_LEN
from ampscope.policy.autocast_lists import list_of
from ampscope.records import Frame, ModuleRecord, OpRecord, Role

MODULES = [
    ModuleRecord(0, "", "Net", is_leaf=False),
    ModuleRecord(1, "a", "Block", is_leaf=False),
    ModuleRecord(2, "a.fc", "Linear", "fp32", 100),
    ModuleRecord(3, "a.norm", "LayerNorm", "fp32", 20),
    ModuleRecord(4, "head", "Linear", "fp16+fp32", 7),
    ModuleRecord(5, "tied", "Linear", "fp32", 100, shared_with="a.fc"),
]
OPS = [
    OpRecord(2, "forward", "aten._to_copy", "fp32", "fp16", 3, is_cast=True),
    OpRecord(2, "forward", "aten.addmm", "fp16,fp16,fp16", "fp16", 1, flops=600),
    OpRecord(2, "forward", "aten.view", "fp32", "fp32", 50),
    OpRecord(2, "backward", "aten.mm", "fp16,fp16", "fp16", 2, flops=1200),
    OpRecord(2, "backward", "aten._to_copy", "fp16", "fp32", 1, is_cast=True),
    OpRecord(2, "step", "aten.add_", "fp32,fp32", "fp32", 1),
    OpRecord(3, "forward", "aten._to_copy", "fp16", "fp32", 1, is_cast=True),
    OpRecord(3, "forward", "aten.native_layer_norm", "fp32,fp32,fp32", "fp32", 2),
    OpRecord(4, "forward", "aten.mm", "fp32,fp32", "fp32", 1, flops=200),
    OpRecord(4, "forward", "aten.gelu", "fp16", "fp16", 1),
    OpRecord(0, "forward", "aten._log_softmax", "fp32", "fp32", 1),
    OpRecord(0, "forward", "aten.add", "fp16,fp32", "fp32", 4),
    OpRecord(0, "forward", "aten._amp_foreach_non_finite_check_and_unscale_", "fp32", "", 1),
    OpRecord(0, "forward", "aten.argmax", "", "", 1),
]


def frame(role: Role, *held: tuple[int, str]) -> Frame:
    rows = np.zeros((len(held), RAW_LEN), np.int64)
    return Frame(0, role, tuple(m for m, _ in held), tuple(d for _, d in held), rows)


FRAMES = {
    Role.ACTIVATION: frame(Role.ACTIVATION, (2, "fp16"), (3, "fp32"), (2, "fp32")),
    Role.GRAD_OUTPUT: frame(Role.GRAD_OUTPUT, (2, "fp16")),
    Role.WEIGHT_GRAD: frame(Role.WEIGHT_GRAD, (2, "fp32")),
}


def test_names_of_dtypes() -> None:
    assert split("fp16,fp16,fp32") == ("fp16", "fp32")
    assert split("fp16+fp32") == ("fp16", "fp32")
    assert split("") == ()
    assert [compute_dtype(t) for t in ("fp16,fp16", "fp16,fp32", "", "int64,fp32")] == [
        "fp16",
        "mixed",
        "",
        "fp32",
    ]
    half = [d for d in ("fp64", "fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2", "x") if is_half(d)]
    assert half == ["bf16", "fp16", "e4m3", "e5m2"]


def test_one_row_a_module_with_what_it_held_and_did() -> None:
    rows = {r.path: r for r in dtypes_by_module(MODULES, OPS, FRAMES)}
    fc = rows["a.fc"]
    assert (fc.weights, fc.activations) == (("fp32",), ("fp16", "fp32"))
    assert (fc.grad_outputs, fc.weight_grads) == (("fp16",), ("fp32",))
    assert fc.computed_in == ("fp16",)  # neither the view nor the optimizer's op is the layer's
    assert (fc.op_count, fc.cast_count, fc.flops, fc.half_flops) == (54, 4, 1800, 1800)
    assert rows["head"].weights == ("fp16", "fp32")
    assert (rows["head"].flops, rows["head"].half_flops) == (200, 0)
    assert rows[""].computed_in == ("fp32", "mixed")
    assert rows["a"].op_count == 0
    assert rows["a"].activations == ()


def test_the_optimizer_is_shown_when_it_is_asked_about() -> None:
    step = [op for op in OPS if op.phase == "step"]
    rows = {r.path: r for r in dtypes_by_module(MODULES, step, {})}
    assert rows["a.fc"].computed_in == ("fp32",)


def test_folding_adds_up_what_lies_deeper() -> None:
    rows = dtypes_by_module(MODULES, OPS, FRAMES)
    folded = {r.path: r for r in fold(rows, 1)}
    assert list(folded) == ["", "a", "head", "tied"]
    a = folded["a"]
    assert (a.folded, a.parameter_count, a.op_count, a.cast_count) == (2, 120, 56, 5)
    assert (a.flops, a.half_flops) == (1800, 1800)
    assert a.computed_in == ("fp16", "fp32")
    assert sum(r.op_count for r in folded.values()) == sum(r.op_count for r in rows)
    assert fold(rows, 2) == rows
    assert [r.path for r in fold(rows, 0)] == [""]
    assert fold(rows, 0)[0].flops == 2000


def test_shared_parameters_count_once() -> None:
    assert parameters_by_dtype(MODULES) == [("fp32", 120), ("fp16+fp32", 7)]


def test_casts_by_place_and_by_kind() -> None:
    sites = cast_sites(OPS)
    assert sites[0] == CastSite(2, "forward", "fp32", "fp16", 3)
    assert sum(s.count for s in sites) == 5
    assert cast_kinds(sites) == [("fp32", "fp16", 3), ("fp16", "fp32", 2)]
    assert cast_sites([]) == []


def test_flops_by_dtype() -> None:
    share = flop_share(OPS)
    assert share.by_dtype == (("fp16", 1800), ("fp32", 200))
    assert (share.half, share.total, share.half_share) == (1800, 2000, 0.9)
    assert [(m, s.total) for m, s in flops_by_module(OPS)] == [(2, 1800), (4, 200)]
    assert flop_share([]).half_share is None


def test_why_ops_ran_in_fp32() -> None:
    found = {f.op: f for f in fp32_ops(OPS, list_of)}
    assert set(found) == {
        "aten.native_layer_norm",
        "aten.mm",
        "aten._log_softmax",
        "aten.add",
    }
    assert found["aten.native_layer_norm"].reason == "fp32_list"
    assert found["aten._log_softmax"].autocast_list == "fp32_set_opt_dtype"
    assert found["aten._log_softmax"].reason == "fp32_list"
    assert found["aten.mm"].reason == "not_cast"
    assert found["aten.add"].reason == "follows"
    assert (found["aten.native_layer_norm"].count, found["aten.native_layer_norm"].modules) == (
        2,
        (3,),
    )


@pytest.mark.parametrize("op", ["aten.index_put", "aten.addcmul"])
def test_promoted_ops(op: str) -> None:
    record = OpRecord(0, "forward", op, "fp16,fp32", "fp32", 1)
    assert fp32_ops([record], list_of)[0].reason == "promoted"


def test_modules_by_the_dtypes_of_their_forward_ops() -> None:
    kinds = modules_by_precision(OPS)
    assert (kinds.fp32, kinds.half, kinds.both) == ((3,), (2,), (0, 4))
    assert kinds.total == 4
