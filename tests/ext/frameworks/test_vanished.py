"""Layers whose output is finite and nothing, and single ops inside layers, as records say them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ampscope.analysis.root_op import ForwardClass, forward_class, silent_suspects
from ampscope.analysis.run_view import RunView
from ampscope.ext.frameworks.bad_layers import LayerCall
from ampscope.ext.frameworks.recorder import FrameworkRecorder, StepFacts
from ampscope.ext.frameworks.tensors import TensorBits, is_there, is_vanished
from ampscope.records import Cadence

STEPS = 6


def half(*numbers: float, times: int = 16) -> TensorBits:
    return TensorBits.of(np.array(numbers * times, np.float16))


@pytest.mark.parametrize(
    ("outputs", "vanished"),
    [
        ([half(0.0)], True),
        ([half(-0.0)], True),
        ([half(0.0, 1.0)], False),  # as behind a ReLU
        ([half(*[0.0] * 19, 1.0)], True),
        ([half(0.0), half(1.0)], False),
        ([half(0.0, times=3)], False),  # too few to say
        ([TensorBits.of(np.zeros(64, np.float32))], True),  # an fp32 op behind the infinity
        ([], False),
    ],
)
def test_an_output_that_has_vanished(outputs: list[TensorBits], vanished: bool) -> None:
    assert is_vanished(outputs) is vanished


def test_a_few_zeros_among_the_elements_that_are_looked_at_first_do_not_mislead() -> None:
    bits = np.ones(64 * 100, np.float16)
    bits[::100] = 0  # exactly the sample
    assert not is_vanished([TensorBits.of(bits)])
    assert is_there(TensorBits.of(bits))


def share(closer: Callable[[], LayerCall | None], given: TensorBits) -> LayerCall:
    return LayerCall("share", "Share", "layer", (given,), (half(0.0),), "fp16", closer=closer)


def trained(call: LayerCall) -> FrameworkRecorder:
    recorder = FrameworkRecorder(Cadence())
    for step in range(STEPS):
        recorder.bad(call)
        recorder.step(StepFacts(loss=1.0 - step / 10, scale=None, skipped=False, lr=0.1))
    return recorder


def test_the_sum_inside_is_a_silent_suspect() -> None:
    inside = LayerCall(
        "share", "Share", "aten.sum", (half(700.0),), (half(np.inf, times=1),), "fp16"
    )
    recorder = trained(share(lambda: inside, half(700.0)))
    (op,) = recorder.bad_layers.records()
    assert (op.op, op.module, op.count, op.reached_loss) == ("aten.sum", "share", STEPS, False)
    view = RunView("as_is", "as_is", [*recorder.optimizer_steps, op])
    assert silent_suspects(view) == [op]


def test_a_layer_that_has_nothing_bad_inside_is_looked_into_a_few_times() -> None:
    looks = []
    recorder = trained(share(lambda: looks.append(1), half(1.0)))
    assert recorder.bad_layers.records() == []
    assert len(looks) == 3


def test_zeros_that_came_in_are_nobodys_fault() -> None:
    looks = []
    trained(share(lambda: looks.append(1), half(0.0)))
    assert looks == []


def product(right: TensorBits, weights: tuple[TensorBits, ...]) -> ForwardClass:
    """Of a bad product inside a layer that has ``weights``, and whose result goes to a softmax."""
    left, out = half(270.0), half(np.inf)
    op = LayerCall(
        "mix", "Mix", "aten.bmm", (left, right), (out,), "fp16", consumers=("mul", "_softmax")
    )
    layer = LayerCall(
        "mix", "Mix", "layer", (left,), (out,), "fp16", closer=lambda: op, weights=lambda: weights
    )
    recorder = FrameworkRecorder(Cadence())
    recorder.bad(layer)
    (found,) = recorder.bad_layers.records()
    return forward_class(found)


def test_queries_times_keys_are_logits_and_a_product_with_a_weight_is_not() -> None:
    kernel = TensorBits.of(np.full(16, 266.6, np.float32))
    keys = half(266.6)
    assert product(keys, ()) is ForwardClass.ATTENTION
    assert product(keys, (TensorBits.of(np.full(16, 0.1, np.float32)),)) is ForwardClass.ATTENTION
    assert product(keys, (kernel,)) is ForwardClass.ACTIVATION  # its cast to half
