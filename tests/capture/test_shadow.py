"""The fp32 shadow: what was lost, what became subnormal, what was zero in both, and how far off."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ampscope.capture import comparisons
from ampscope.capture.comparisons import PIECE, Comparisons, pieces
from ampscope.capture.model_map import ModelMap
from ampscope.capture.shadow import Shadow, random_state_kept
from ampscope.policy.tensor_core import TensorCoreMode
from ampscope.records import Role, ShadowRecord

HALF = torch.float16


def compared(half: Tensor, reference: Tensor, scale: float = 1.0) -> ShadowRecord:
    comparisons = Comparisons(step=3)
    comparisons.add(5, Role.GRAD_OUTPUT, half, reference, scale)
    (record,) = comparisons.records()
    assert (record.step, record.module, record.role) == (3, 5, Role.GRAD_OUTPUT)
    return record


def test_the_three_counts_on_a_tensor_built_for_them() -> None:
    smallest, normal = 2.0**-24, 2.0**-14
    reference = torch.tensor(
        [0.0, -0.0, smallest / 2, -smallest / 4, smallest, -normal * 0.75, normal, 1.0, 1e-40]
    )
    record = compared(reference.to(HALF), reference)
    assert record.total == 9
    assert record.zero_before == 2  # +0 and -0
    assert record.lost == 3  # the tie at half the smallest subnormal, a quarter of it, and 1e-40
    assert (
        record.subnormal == 2
    )  # the smallest subnormal, and three quarters of the smallest normal
    assert record.max_abs_fp32 == 1.0


def test_a_loss_scale_saves_what_would_be_lost() -> None:
    reference = torch.full((10,), 2.0**-30)
    assert compared(reference.to(HALF), reference).lost == 10
    saved = compared((reference * 2.0**16).to(HALF), reference, 2.0**16)
    assert (saved.lost, saved.subnormal, saved.relative_error) == (0, 0, 0.0)


def test_subnormal_means_of_the_tensors_own_format() -> None:
    """Softmax and losses run in fp32 under autocast: 1e-6 is an ordinary number there."""
    reference = torch.full((4,), 1e-6)
    assert compared(reference.clone(), reference).subnormal == 0
    assert compared(reference.to(torch.bfloat16), reference).subnormal == 0
    assert compared(reference.to(HALF), reference).subnormal == 4


def test_errors_and_cosine_against_a_computation_in_double() -> None:
    torch.manual_seed(0)
    reference = torch.randn(1000) * 1e-3
    half = (reference * 1024).to(HALF)
    record = compared(half, reference, 1024.0)
    value, wanted = half.double() / 1024, reference.double()
    error = float((value - wanted).norm() / wanted.norm())
    assert record.relative_error == pytest.approx(error, rel=1e-5)
    cosine = float(nn.functional.cosine_similarity(value, wanted, dim=0))
    assert record.cosine == pytest.approx(cosine, rel=1e-5)


def test_squares_that_leave_the_range_of_fp32_do_not_spoil_the_norms() -> None:
    for magnitude in (1e-30, 1e30):
        reference = torch.full((4,), magnitude)
        assert compared(reference.to(torch.bfloat16), reference).relative_error == pytest.approx(
            abs(1 - float(torch.tensor(magnitude).to(torch.bfloat16)) / float(reference[0])),
            rel=1e-6,
        )


def test_what_is_not_finite_is_said() -> None:
    reference = torch.tensor([1.0, 2.0])
    overflowed = compared(torch.tensor([1.0, math.inf]).to(HALF), reference)
    assert overflowed.relative_error == math.inf
    assert math.isnan(compared(torch.tensor([math.nan, 2.0]), reference).relative_error or 0.0)
    assert compared(torch.zeros(2), torch.zeros(2)).relative_error is None
    assert compared(torch.zeros(0), torch.zeros(0)).max_abs_fp32 is None


def test_calls_of_a_module_add_up_to_one_comparison() -> None:
    comparisons = Comparisons(0)
    one = torch.ones(4)
    for half in (one.to(HALF), (one * 1.5).to(HALF), one.to(HALF)):
        comparisons.add(1, Role.ACTIVATION, half, one, 1.0)
    comparisons.add(2, Role.ACTIVATION, one, one * 2, 1.0)
    first, second = comparisons.records()
    assert (first.module, first.total) == (1, 12)
    # Over all 12 elements: sqrt(4 * 0.5^2) / sqrt(12).
    assert first.relative_error == pytest.approx(1 / math.sqrt(12))
    assert first.cosine == pytest.approx(14 / math.sqrt(12 * 17))
    assert (second.module, second.max_abs_fp32) == (2, 2.0)


def test_a_small_tensor_of_a_module_does_not_stand_for_all_of_it() -> None:
    """The gradient of a convolution's bias before BatchNorm is rounding alone: its own relative
    error is in the hundreds and says nothing about the module."""
    weight, bias = torch.ones(1000), torch.full((10,), 1e-9)
    comparisons = Comparisons(0)
    comparisons.add(1, Role.WEIGHT_GRAD, weight * (1 + 2.0**-11), weight, 1.0)
    comparisons.add(1, Role.WEIGHT_GRAD, bias * 848, bias, 1.0)
    (record,) = comparisons.records()
    assert record.relative_error == pytest.approx(2.0**-11, rel=1e-3)
    comparisons.add(1, Role.WEIGHT_GRAD, bias * math.nan, bias, 1.0)
    assert math.isnan(comparisons.records()[0].relative_error or 0.0)


SPARSE = {
    "coo": lambda dense: dense.to_sparse(),
    "hybrid coo": lambda dense: dense.to_sparse(1),
    "csr": lambda dense: dense.to_sparse_csr(),
    "csc": lambda dense: dense.to_sparse_csc(),
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
    "bsc": lambda dense: dense.to_sparse_bsc((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", SPARSE)
def test_gradients_of_every_sparse_layout_are_compared(layout: str) -> None:
    wanted = torch.tensor([[0, 1.0, 0, 0], [0, 0, 0, 0], [2.0**-30, 0, 0, 3.0], [0, 0, 0, 4.0]])
    value = wanted.clone()
    value[2, 0] = 0.0  # lost, so that half stores fewer places than the shadow
    record = compared(SPARSE[layout](value.to(HALF)), SPARSE[layout](wanted))
    assert (record.lost, record.below_range, record.subnormal) == (1, 1, 0)
    assert record.relative_error == pytest.approx(2.0**-30 / math.sqrt(26))
    assert (record.max_abs_fp32, record.cosine) == (4.0, pytest.approx(1.0))


def test_layouts_that_differ_and_layouts_of_other_kinds() -> None:
    wanted = torch.eye(4)
    assert compared(wanted.to_sparse().to(HALF), wanted).total == 16
    assert compared(wanted.to(HALF), wanted.to_sparse()).lost == 0
    assert compared(wanted.to_mkldnn(), wanted.to_mkldnn()).relative_error == 0.0
    assert compared(wanted.to(torch.complex64), wanted.to(torch.complex64)).total == 32
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    assert compared(nested.to(HALF), nested).total == 18
    comparisons = Comparisons(0)
    comparisons.add(1, Role.ACTIVATION, torch.ones(2), torch.ones(3), 1.0)
    assert comparisons.records() == []


def test_pieces_of_a_tensor_add_up_to_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(4)
    reference = torch.randn(1000) * 2.0 ** torch.randint(-30, 8, (1000,))
    half = reference.to(HALF)
    whole = compared(half, reference)
    monkeypatch.setattr(comparisons, "PIECE", 7)
    parts = compared(half, reference)
    for name in ("total", "lost", "below_range", "subnormal", "zero_before", "max_abs_fp32"):
        assert getattr(parts, name) == getattr(whole, name)
    assert parts.relative_error == pytest.approx(whole.relative_error, rel=1e-6)
    assert parts.cosine == pytest.approx(whole.cosine, rel=1e-6)


def test_a_tensor_of_more_than_2_to_31_elements_is_compared_in_pieces() -> None:
    """BLAS counts to 2^31 - 1, and an fp32 sum of equal terms ends at 2^24."""
    count = 2**31 + 5
    parts = list(pieces(count, PIECE))
    assert (parts[0].start, parts[-1].stop) == (0, count)
    assert all(one.stop == other.start for one, other in itertools.pairwise(parts))
    assert max(part.stop - part.start for part in parts) <= PIECE <= 2**24
    # Elements that take no memory; one fp32 sum of their squares would stop at 2^24.
    ones = torch.ones(1).expand(2**25)
    record = compared(torch.full((1,), 1.5).expand(2**25), ones)
    assert record.relative_error == pytest.approx(0.5, rel=1e-4)
    assert record.cosine == pytest.approx(1.0, rel=1e-4)


def test_lost_values_below_the_range_are_told_from_those_that_rounding_cancelled() -> None:
    smallest = 2.0**-24
    reference = torch.tensor([smallest / 4, smallest * 0.75, 1e-3, 5.0, 0.0, 2.0])
    half = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 2.0]).to(HALF)
    record = compared(half, reference)
    assert (record.lost, record.below_range, record.cancelled) == (4, 2, 2)
    # A gradient carries the loss scale: 1e-9 is no small number at a scale of 2^16.
    scaled = compared(torch.zeros(2).to(HALF), torch.tensor([1e-9, 1e-13]), 2.0**16)
    assert (scaled.lost, scaled.below_range) == (2, 1)
    # bf16 has fp32's range: what it loses here it loses to rounding.
    bf16 = compared(torch.zeros(3).to(torch.bfloat16), torch.tensor([1e-9, 1e-30, 3.0]))
    assert (bf16.lost, bf16.below_range, bf16.cancelled) == (3, 0, 3)


def test_an_fp32_weight_gradient_is_judged_by_the_format_it_was_computed_in() -> None:
    reference = torch.tensor([1e-9, 1.0])
    for computes_in, below in ((None, 0), (HALF, 1), (torch.bfloat16, 0)):
        comparisons = Comparisons(0, computes_in)
        comparisons.add(1, Role.WEIGHT_GRAD, torch.tensor([0.0, 1.0]), reference, 1.0)
        (record,) = comparisons.records()
        assert (record.lost, record.below_range) == (1, below)


class Deep(nn.Module):
    """Two linear layers with an activation in place, and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def one_step(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], scale: float = 1.0
) -> dict[tuple[int, Role], ShadowRecord]:
    """The shadow's step and then the real one, in fp16."""
    shadow = Shadow(ModelMap(model), 0, scale)
    shadow.run_shadow(loss)
    with TensorCoreMode(), shadow:
        with torch.autocast("cpu", dtype=HALF):
            value = loss(model)
        (value * scale).backward()
        shadow.compare_weights()
    return {(record.module, record.role): record for record in shadow.take()}


def test_a_whole_step_is_compared() -> None:
    torch.manual_seed(1)
    model, x = Deep(), torch.randn(32, 8)
    records = one_step(model, lambda m: m(x).float().square().mean(), 2.0**10)
    modules = {"first": 2, "relu": 3, "dropout": 4, "last": 5}
    for name, module in modules.items():
        for role in (Role.ACTIVATION, Role.GRAD_OUTPUT):
            record = records[module, role]
            assert record.relative_error is not None, (name, role)
            assert record.relative_error < 0.01, (name, role)
    for module in (modules["first"], modules["last"]):
        assert records[module, Role.WEIGHT_GRAD].cosine == pytest.approx(1.0, abs=1e-3)
    assert records[modules["dropout"], Role.ACTIVATION].zero_before > 0  # the same mask in both


def test_small_gradients_without_a_scale_are_lost_and_with_one_are_not() -> None:
    torch.manual_seed(2)
    model, x = Deep(), torch.randn(32, 8)

    def loss(m: nn.Module) -> Tensor:
        return m(x).float().square().mean() * 2.0**-20

    without, scaled = one_step(model, loss), one_step(model, loss, 2.0**20)
    first = (2, Role.GRAD_OUTPUT)
    assert without[first].lost > 0.9 * (without[first].total - without[first].zero_before)
    assert scaled[first].lost == 0


def test_the_twin_touches_no_gradient_of_the_model() -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    shadow = Shadow(ModelMap(model), 0, 1.0)
    shadow.run_shadow(lambda m: m(torch.ones(1, 2)).sum())
    assert all((p.grad == 7.0).all() for p in model.parameters())  # type: ignore[union-attr]  # set above
    # A loss that ignores the model it is given must not train the one that it holds.
    shadow = Shadow(ModelMap(model), 0, 1.0)
    shadow.run_shadow(lambda m: model(torch.ones(1, 2)).sum() + m(torch.ones(1, 2)).sum())
    assert all((p.grad == 7.0).all() for p in model.parameters())  # type: ignore[union-attr]  # as above


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_compares_like_with_like(reentrant: bool) -> None:
    torch.manual_seed(3)
    model, x = Deep(), torch.randn(16, 8, requires_grad=True)

    def loss(m: nn.Module) -> Tensor:
        out = checkpoint(m, x, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return out.float().square().mean()

    plain = one_step(model, lambda m: m(x).float().square().mean(), 2.0**10)
    model.zero_grad()
    repeated = one_step(model, loss, 2.0**10)
    for key, record in plain.items():
        assert repeated[key].total == record.total, key
        assert repeated[key].relative_error == pytest.approx(record.relative_error, abs=0.02), key


def test_random_states_are_put_back() -> None:
    import random

    import numpy as np

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    with random_state_kept(nn.Identity()):
        inside = draw()
    assert draw() == inside
