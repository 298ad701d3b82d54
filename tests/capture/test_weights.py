"""Weights, gradients and updates: exact counts, the order of backward, shared parameters."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ampscope.capture.accumulator import Accumulator
from ampscope.capture.model_map import ModelMap
from ampscope.capture.script.script_scans import scan
from ampscope.capture.weights import WeightObserver, gradient_norm, moved_share
from ampscope.numerics.histogram import NEG_ZERO, POS_ZERO
from ampscope.records import NonFiniteRecord, Role
from tests.helpers.counting import by_hand


def observer(model: nn.Module) -> WeightObserver:
    return WeightObserver(ModelMap(model), Accumulator())


def test_weights_and_gradients_of_a_module_are_one_row() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with observer(model) as weights:
        weights.start_step()
        model(torch.randn(5, 3)).square().sum().backward()
        weights.count_weights()
        weights.count_gradients()
        frames = weights.counts.take(2, 16.0)
    gradients = weights.by_module(frames[Role.WEIGHT_GRAD])
    for module, layer in enumerate(model, start=1):
        own = list(layer.parameters())
        expected = sum(by_hand(p) for p in own)
        np.testing.assert_array_equal(frames[Role.WEIGHT].row_of(module), expected)
        expected = sum(by_hand(p.grad) for p in own if p.grad is not None)
        np.testing.assert_array_equal(gradients.row_of(module), expected)
    assert (gradients.scale, gradients.step) == (16.0, 2)
    assert frames[Role.WEIGHT].scale == 1.0


def test_updates_are_new_minus_old_and_what_stayed_is_plus_zero() -> None:
    model = nn.Linear(3, 1)
    with observer(model) as weights, torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0, 0.5]]))
        model.bias.zero_()
        weights.remember()
        model.weight.add_(torch.tensor([[2.0**-20, 0.0, -0.25]]))
        weights.count_updates()
        frame = weights.counts.take(0, 1.0)[Role.UPDATE]
    expected = by_hand(torch.tensor([2.0**-20, 0.0, -0.25, 0.0]))
    np.testing.assert_array_equal(frame.rows[0], expected)
    assert (frame.rows[0][POS_ZERO], frame.rows[0][NEG_ZERO]) == (2, 0)
    assert moved_share(frame) == 0.5


def test_an_update_smaller_than_half_an_ulp_moves_nothing() -> None:
    model = nn.Linear(8, 8, bias=False).half()
    with observer(model) as weights, torch.no_grad():
        model.weight.fill_(1.0)
        for amount, share in ((2.0**-12, 0.0), (2.0**-10, 1.0)):  # ulp of 1 in fp16 is 2^-10
            weights.remember()
            model.weight.add_(amount)
            weights.count_updates()
            assert moved_share(weights.counts.take(0, 1.0)[Role.UPDATE]) == share


def test_the_smallest_difference_of_two_numbers_counts_as_moved() -> None:
    """Gradual underflow: x != y means x - y != 0, down to the smallest subnormal."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = nn.Linear(2, 1, bias=False).to(dtype)
        tiny = torch.finfo(dtype).smallest_normal
        with observer(model) as weights, torch.no_grad():
            model.weight.fill_(tiny)
            weights.remember()
            bits = model.weight.view(torch.int32 if dtype is torch.float32 else torch.int16)
            bits[0, 0] += 1  # the next number
            weights.count_updates()
            assert moved_share(weights.counts.take(0, 1.0)[Role.UPDATE]) == 0.5


class Poisoned(torch.autograd.Function):
    """Identity whose gradient is what one says."""

    @staticmethod
    def forward(ctx, x: Tensor, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def,override]
        ctx.save_for_backward(gradient)
        return x.clone()

    @staticmethod
    def backward(ctx, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def,override]
        return ctx.saved_tensors[0], None


class Chain(nn.Module):
    """Three scalars that multiply an input; backward reaches c, then b, then a."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))
        self.c = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Poisoned.apply(x * self.a, torch.tensor([-torch.inf, torch.nan, 1.0]))
        out: Tensor = hidden * self.b * self.c
        return out


def test_nonfinite_gradients_are_named_in_the_order_of_backward() -> None:
    model = Chain()
    with observer(model) as weights:
        weights.start_step()
        model(torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        assert model.b.grad is not None
        model.b.grad.fill_(torch.inf)
        weights.count_gradients()
        frame = weights.counts.take(4, 2.0)[Role.WEIGHT_GRAD]
        bad = weights.nonfinite(frame)
    assert bad == [
        NonFiniteRecord(4, "b", 1, total=1, nan=0, pos_inf=1, neg_inf=0),
        NonFiniteRecord(4, "a", 2, total=1, nan=1, pos_inf=0, neg_inf=0),
    ]  # c, which backward reached first, is finite; the gradient of a is -inf + nan = nan


def test_accumulation_reaches_a_parameter_twice_and_counts_it_once() -> None:
    model = nn.Linear(2, 2, bias=False)
    with observer(model) as weights:
        weights.start_step()
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        weights.count_gradients()
        frame = weights.counts.take(0, 1.0)[Role.WEIGHT_GRAD]
    np.testing.assert_array_equal(frame.rows[0], by_hand(torch.full((2, 2), 2.0)))


def test_a_shared_parameter_belongs_to_its_first_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    names = ModelMap(model)
    assert [(p.owner, p.name) for p in names.parameters] == [(1, "0.weight")]
    assert [record.shared_with for record in names.records()] == ["", "", "0"]
    with observer(model) as weights:
        weights.count_weights()
        assert weights.counts.take(0, 1.0)[Role.WEIGHT].modules == (1,)


def test_frozen_and_sparse_parameters() -> None:
    model = nn.ModuleDict(
        {"table": nn.Embedding(5, 2, sparse=True), "frozen": nn.Linear(2, 1).requires_grad_(False)}
    )
    with observer(model) as weights:
        weights.start_step()
        model["frozen"](model["table"](torch.tensor([1, 1, 3]))).sum().backward()
        weights.count_weights()
        weights.count_gradients()
        frames = weights.counts.take(0, 1.0)
    assert frames[Role.WEIGHT].rows.sum() == 10 + 3
    assert weights.by_module(frames[Role.WEIGHT_GRAD]).modules == (1,)
    assert frames[Role.WEIGHT_GRAD].rows.sum() == 4  # two rows of the table are stored
    expected = model["table"].weight.grad.to_dense().norm()  # type: ignore[union-attr]  # a tensor
    assert gradient_norm(ModelMap(model)) == float(expected)


def test_the_gradient_norm_is_that_of_clip_grad_norm() -> None:
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    model(torch.randn(4, 9)).square().sum().backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]  # all have one
    assert abs(gradient_norm(ModelMap(model)) - norm) <= 1e-6 * norm


def test_the_gradient_norm_does_not_overflow_before_the_gradients_do() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.full((1, 2), 3e30)
    assert gradient_norm(ModelMap(model)) == pytest.approx(float(np.float32(3e30)) * 2**0.5)
    half = nn.Linear(4, 1, bias=False).half()
    half.weight.grad = torch.full((1, 4), 60_000.0, dtype=torch.float16)
    assert gradient_norm(ModelMap(half)) == 2 * 60_000.0
    half.weight.grad[0, 0] = torch.inf
    assert gradient_norm(ModelMap(half)) == float("inf")
    assert gradient_norm(ModelMap(nn.Linear(1, 1))) == 0.0  # no gradient yet


def test_the_way_of_a_parameter_is_kept_at_evenly_spaced_places() -> None:
    first = torch.randn(300, 7)
    now = (first + 0.01 * torch.randn(300, 7)).bfloat16()
    seen = scan("end", "parameter", "w", now, first=first)
    moved = (now.double() - first.double()).flatten()
    assert seen.displacement == pytest.approx(moved[:: 2100 // 64][:64].tolist(), rel=1e-4)
    assert seen.change == pytest.approx(float(moved.norm() / first.double().norm()))
    assert scan("start", "parameter", "w", now).displacement == ()


@pytest.mark.parametrize(
    ("now", "still"),
    [
        (lambda w: w.bfloat16().float(), 1.0),  # the script rounds, and no update stays
        (lambda w: w, 1.0),
        (lambda w: w + 0.1 * (torch.arange(100) < 25), 0.75),
        (lambda w: w * 1.001, 0.0),
    ],
)
def test_weights_that_are_as_they_were_up_to_a_rounding_stand_still(
    now: Callable[[Tensor], Tensor], still: float
) -> None:
    first = torch.linspace(0.3, 1.7, 100)
    assert scan("end", "parameter", "w", now(first), first=first).still == pytest.approx(still)
    assert scan("start", "parameter", "w", first).still is None
