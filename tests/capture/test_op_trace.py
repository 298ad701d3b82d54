"""The op trace against models so small that its answer is written down here."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.policy.tensor_core import TensorCoreMode
from tests.helpers.op_tracing import Two, of, step, traced


def test_fp32_forward_and_backward_of_each_module() -> None:
    model, x = Two(), torch.randn(5, 4)
    seen, _ = traced(model, step(model, x))
    assert of(seen, "aten.addmm") == {
        ("first", "forward", "aten.addmm", "fp32,fp32,fp32", "fp32"): 1
    }
    # last: no bias, so mm forward; backward one mm for its input and one for its weight.
    # first: x needs no gradient, so backward has one mm, for its weight.
    assert of(seen, "aten.mm") == {
        ("last", "forward", "aten.mm", "fp32,fp32", "fp32"): 1,
        ("last", "backward", "aten.mm", "fp32,fp32", "fp32"): 2,
        ("first", "backward", "aten.mm", "fp32,fp32", "fp32"): 1,
    }
    assert ("", "forward", "aten.gelu", "fp32", "fp32") in seen  # called by the model itself
    assert ("", "backward", "aten.gelu_backward", "fp32,fp32", "fp32") in seen
    assert of(seen, "aten.native_layer_norm") == {
        ("norm", "forward", "aten.native_layer_norm", "fp32,fp32,fp32", "fp32,fp32,fp32"): 1
    }
    backward = of(seen, "aten.native_layer_norm_backward")
    assert [key[:2] for key in backward] == [("norm", "backward")]
    assert of(seen, "aten._to_copy") == {}


def test_the_casts_of_autocast_are_counted_where_they_happen() -> None:
    model, x = Two(), torch.randn(5, 4)
    _, records = traced(model, step(model, x, torch.bfloat16))
    casts = Counter[tuple[int, str, str, str]]()
    for record in records:
        if record.is_cast:
            casts[record.module, record.phase, record.inputs, record.outputs] += record.count
    first, norm, last = 1, 2, 3
    assert casts[first, "forward", "fp32", "bf16"] == 3  # input, weight and bias
    assert casts[last, "forward", "fp32", "bf16"] == 1  # its weight; its input is bf16 already
    assert casts[first, "backward", "bf16", "fp32"] == 2  # gradients of the weight and the bias
    assert casts[last, "backward", "bf16", "fp32"] == 1
    assert casts[norm, "forward", "fp32", "bf16"] == 0


def test_the_dtypes_are_those_below_autocast() -> None:
    model, x = Two(), torch.randn(5, 4)
    seen, _ = traced(model, step(model, x, torch.bfloat16))
    assert ("first", "forward", "aten.addmm", "bf16,bf16,bf16", "bf16") in seen
    assert ("last", "backward", "aten.mm", "bf16,bf16", "bf16") in seen


@pytest.mark.parametrize("mode", [None, TensorCoreMode], ids=["alone", "with-tensor-cores"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_flops_are_those_of_torchs_counter(
    dtype: torch.dtype | None, mode: type[TensorCoreMode] | None
) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 10))
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    both = nn.ModuleList([model, attention])
    image, text = torch.randn(3, 2, 8, 8), torch.randn(2, 5, 8, requires_grad=True)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            out = model(image).float().sum()
            out = out + attention(text, text, text, need_weights=True)[0].float().sum()
        out.backward()

    counter = FlopCounterMode(display=False)
    with counter:
        run()
    trace = OpTrace(ModelMap(both), executes=None if mode is None else mode())
    with trace:
        run()
    _, records = trace.take()
    assert counter.get_total_flops() > 0
    assert sum(record.flops for record in records) == counter.get_total_flops()


def test_fused_attention_has_the_flops_of_its_products() -> None:
    q = torch.randn(2, 3, 16, 8, requires_grad=True)
    model = nn.Identity()
    _, records = traced(model, lambda: F.scaled_dot_product_attention(q, q, q).sum().backward())
    by_phase = Counter[str]()
    for record in records:
        by_phase[record.phase] += record.flops
    product = 2 * (2 * 3) * 16 * 16 * 8
    assert by_phase == {"forward": 2 * product, "backward": 5 * product}  # 1 is repeated


def test_a_list_gives_each_dtype_once() -> None:
    parts = [torch.ones(1)] * 50 + [torch.ones(1, dtype=torch.float64)]
    seen, _ = traced(nn.Identity(), lambda: torch.cat(parts[:50]))
    assert list(of(seen, "aten.cat")) == [("", "forward", "aten.cat", "fp32", "fp32")]
    seen, _ = traced(nn.Identity(), lambda: torch._foreach_add(parts, 1.0))
    assert next(iter(of(seen, "aten._foreach_add")))[3:] == ("fp32,fp64", "fp32,fp64")


def test_ops_on_integers_alone_are_left_out() -> None:
    seen, _ = traced(nn.Identity(), lambda: torch.arange(3) + 1)
    assert seen == {}
    seen, _ = traced(nn.Identity(), lambda: torch.arange(3).float())
    assert list(seen) == [("", "forward", "aten._to_copy", "", "fp32")]


def test_equal_steps_have_one_op_set() -> None:
    model, x = Two(), torch.randn(5, 4)
    trace = OpTrace(ModelMap(model))
    numbers, lengths = [], []
    for dtype in (None, torch.bfloat16, None, None):
        with trace:
            step(model, x, dtype)()
        number, records = trace.take()
        numbers.append(number)
        lengths.append(bool(records))
        model.zero_grad()
    assert numbers[0] == numbers[2] == numbers[3] != numbers[1]
    assert lengths == [True, True, False, False]
    another = OpTrace(ModelMap(Two()))
    with another:
        step(another.place.names.model, x)()
    assert another.take()[0] == numbers[0]  # the same in every process


def test_the_same_ops_run_through_another_mode() -> None:
    """The trace calls the mode that computes itself; results and records stay what they were."""
    model, x = Two(), torch.randn(5, 4)
    with TensorCoreMode(), torch.autocast("cpu", dtype=torch.float16):
        expected = model(x)
    trace = OpTrace(ModelMap(model), executes=TensorCoreMode())
    with trace, torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    assert out.equal(expected)
    ops = {(r.op, r.inputs, r.outputs) for r in trace.take()[1]}
    assert ("aten.addmm", "fp16,fp16,fp16", "fp16") in ops
    assert not any("fp32" in inputs for op, inputs, _ in ops if op in ("aten.addmm", "aten.mm"))
