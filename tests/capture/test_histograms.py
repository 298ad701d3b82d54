"""Histogram hooks: which tensors are counted, for which module, how often, in which dtype."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampscope.numerics.formats import FP16
from ampscope.numerics.histogram import NAN, NEG_INF, NEG_ZERO, POS_INF, POS_ZERO, zones
from ampscope.records import Role
from tests.helpers.counting import by_hand, counted, hooked


def test_every_element_of_outputs_and_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    x = torch.randn(7, 6)
    outputs: list[Tensor] = []

    def run() -> None:
        hidden = x
        for layer in model:
            hidden = layer(hidden)
            hidden.retain_grad()
            outputs.append(hidden)
        hidden.square().sum().backward()

    frames = counted(model, run)
    for role, tensors in (
        (Role.ACTIVATION, outputs),
        (Role.GRAD_OUTPUT, [t.grad for t in outputs]),
    ):
        frame = frames[role]
        assert sorted(frame.modules) == [1, 2, 3]
        for module, tensor in zip((1, 2, 3), tensors, strict=True):
            row = frame.row_of(module)
            assert tensor is not None
            assert row is not None
            np.testing.assert_array_equal(row, by_hand(tensor))
    assert frames[Role.GRAD_OUTPUT].scale == 8.0  # gradients carry the loss scale
    assert frames[Role.ACTIVATION].scale == 1.0


class Constant(nn.Module):
    """Puts out what it was given, as a tensor of its own."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self) -> Tensor:
        assert isinstance(self.value, Tensor)
        return self.value.clone()


def test_underflow_counts_are_exact_on_the_boundaries_of_fp16() -> None:
    """fp32 values at the edges of fp16's zones; each appears a different number of times."""
    smallest, normal, largest = 2.0**-24, 2.0**-14, 65504.0
    below = float(np.nextafter(np.float32(smallest / 2), np.float32(0)))
    cases = [
        (0.0, 3), (-0.0, 5),  # zero already
        (below, 7), (-below, 11), (2.0**-149, 2),  # lost
        (smallest / 2, 1),  # a tie: lost in truth; a bin cannot tell it from what lies above
        (smallest, 13), (float(np.nextafter(np.float32(normal), np.float32(0))), 17),  # subnormal
        (normal, 19), (largest, 23), (-1.0, 29),  # normal
        (65536.0, 31), (-1e30, 37),  # overflow
        (math.inf, 4), (-math.inf, 6), (math.nan, 8),
    ]  # fmt: skip
    values = torch.tensor(
        [value for value, count in cases for _ in range(count)], dtype=torch.float32
    )
    model = Constant(values[torch.randperm(len(values))])
    row = counted(model, model)[Role.ACTIVATION].rows[0]
    found = zones(row, FP16)
    assert found.zero == 3 + 5
    assert (row[POS_ZERO], row[NEG_ZERO]) == (3, 5)
    assert found.lost == 7 + 11 + 2
    assert found.subnormal == 1 + 13 + 17
    assert found.normal == 19 + 23 + 29
    assert found.overflow == 31 + 37
    assert (row[POS_INF], row[NEG_INF], row[NAN]) == (4, 6, 8)
    assert found.total == len(values)


def test_a_container_that_hands_on_its_childs_output_is_not_counted() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Identity())
    frames = counted(model, lambda: model(torch.ones(1, 2)))
    assert frames[Role.ACTIVATION].modules == (2,)  # the Linear: 0 and 1 are containers


def test_an_activation_in_place_is_counted_with_its_new_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    x = torch.randn(8, 4)

    def run() -> None:
        model(x).sum().backward()

    frames = counted(model, run)
    plain = model[0](x)
    np.testing.assert_array_equal(frames[Role.ACTIVATION].row_of(1), by_hand(plain))
    np.testing.assert_array_equal(frames[Role.ACTIVATION].row_of(2), by_hand(plain.relu()))
    ones = torch.ones_like(plain)
    np.testing.assert_array_equal(frames[Role.GRAD_OUTPUT].row_of(2), by_hand(ones))
    np.testing.assert_array_equal(frames[Role.GRAD_OUTPUT].row_of(1), by_hand(ones * (plain > 0)))


def test_calls_of_a_module_add_up_and_dtypes_are_kept_apart() -> None:
    model = nn.Linear(2, 2)

    def run() -> None:
        for _ in range(3):
            model(torch.ones(5, 2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(torch.ones(5, 2))

    frame = counted(model, run)[Role.ACTIVATION]
    assert dict(zip(frame.dtypes, frame.rows.sum(axis=1), strict=True)) == {"fp32": 30, "bf16": 10}


class Many(nn.Module):
    """Puts out tensors in all the ways that models do."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"a": x + 1, "b": [x + 2, (x + 3, None)], "c": torch.arange(3), "d": "text"}


def test_nested_outputs() -> None:
    model = Many()
    frame = counted(model, lambda: model(torch.ones(4)))[Role.ACTIVATION]
    assert frame.rows.sum() == 12


class Parameter(nn.Module):
    """Puts out its own parameter, as learned temperatures and position tables do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4))

    def forward(self) -> Tensor:
        return self.table


def test_a_parameter_as_output_is_counted_once_a_step_and_keeps_no_hook() -> None:
    model = Parameter()
    with hooked(model) as hooks:
        for step in range(3):
            hooks.start_step(step, active=True)
            model().sum().backward()
            hooks.end_step()
            frames = hooks.counts.take(step, 1.0)
            assert frames[Role.ACTIVATION].rows.sum() == 4
            assert frames[Role.GRAD_OUTPUT].rows.sum() == 4
    assert not model.table._backward_hooks
    assert not any(name.startswith("_ampscope") for name in vars(model.table))


def test_asleep_nothing_is_counted() -> None:
    model = nn.Linear(2, 2)
    with hooked(model) as hooks:
        hooks.start_step(1, active=False)
        model(torch.ones(1, 2)).sum().backward()
        assert hooks.counts.take(1, 1.0) == {}
        assert hooks.elapsed_s == 0.0


def test_a_forward_that_checkpointing_repeats_is_counted_once() -> None:
    for reentrant in (True, False):
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

        def run(model: nn.Module = model, reentrant: bool = reentrant) -> None:
            x = torch.ones(2, 3, requires_grad=True)
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()

        frames = counted(model, run)
        assert frames[Role.ACTIVATION].rows.sum() == 2 * 6
        assert frames[Role.GRAD_OUTPUT].rows.sum() == 2 * 6
