"""Differences whose terms agree to within their rounding, against fp32 of the same numbers; and
small differences that are what they should be."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ampscope.capture.script import cancellation
from ampscope.observations import BadOp
from tests.helpers.script_watching import watched

Expression = Callable[[nn.Linear, Tensor], Tensor]


def _seen(make: Expression, dtype: torch.dtype = torch.bfloat16, step: int = 0) -> list[BadOp]:
    """Cancelled ops of a forward and backward pass under autocast, of 32 rows of 16."""
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(32, 16)
    with watched() as seen:
        seen.watch.new_step(step)
        with torch.autocast("cpu", dtype=dtype):
            out = make(layer, x)
        out.float().sum().backward()
    return [b for b in seen.watch.records() if b.kind == "cancelled"]


def _closed_features(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.bias.data.fill_(-8.5)
    return F.elu(layer(0.1 * x)) + 1


def _complement(layer: nn.Linear, x: Tensor) -> Tensor:
    return 1 - torch.sigmoid(0.1 * layer(x) + 7)


def _expanded_distances(layer: nn.Linear, x: Tensor) -> Tensor:
    a = layer(x) + 30
    b = (a + 0.1 * torch.randn_like(a)).detach()
    return a.pow(2).sum(-1, keepdim=True) + b.pow(2).sum(-1) - 2 * (a @ b.t())


def _variance(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x) + 50
    return h.pow(2).mean(-1) - h.mean(-1).pow(2)


def _one_minus_cosine(layer: nn.Linear, x: Tensor) -> Tensor:
    h = F.normalize(layer(x), dim=-1).bfloat16()
    other = F.normalize(h + 0.01 * torch.randn_like(h), dim=-1).bfloat16()
    return 1 - (h * other).sum(-1).bfloat16()


@pytest.mark.parametrize(
    "make",
    [_closed_features, _complement, _expanded_distances, _variance, _one_minus_cosine],
)
def test_a_difference_that_is_only_rounding_is_seen_and_reaches_the_loss(make: Expression) -> None:
    bad = _seen(make)[-1]
    assert bad.op in ("aten.add", "aten.sub", "aten.rsub")
    assert (bad.phase, bad.dtype, bad.reached_gradient) == ("forward", "bf16", True)
    assert max(bad.share or 0.0, bad.error or 0.0) > 0.3


def test_what_was_lost_is_what_fp32_gives() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(32, 16)
    with torch.no_grad():
        exact = _closed_features(layer, x)
    (bad,) = _seen(_closed_features)
    assert bad.share == 1.0
    assert bad.error == pytest.approx(1.0)
    assert bad.fp32_max == pytest.approx(float(exact.max()), rel=0.05)
    assert bad.chain == ()  # elu stands at the same line


def test_lines_that_made_the_terms_are_named_where_they_must_be_lifted_too() -> None:
    def apart(layer: nn.Linear, x: Tensor) -> Tensor:
        keep = torch.sigmoid(0.1 * layer(x) + 7)  # another line
        return 1 - keep

    (bad,) = _seen(apart)
    place, number = bad.line.split(":")
    assert bad.chain == (f"{place}:{int(number) - 1}",)


def _straight_through(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x)
    return h + (h.round() - h).detach()


def _close_to_its_target(layer: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = layer(x)
    return layer(x) - target


def _stored_long_ago(layer: nn.Linear, x: Tensor) -> Tensor:
    kept = torch.empty(32, 16, dtype=torch.bfloat16)
    with torch.no_grad():
        kept.copy_(layer(x))
    return layer(x) - kept


HEALTHY: dict[str, Expression] = {
    "features": lambda layer, x: F.elu(layer(x)) + 1,
    "residual": lambda layer, x: (h := layer(x)) + 0.01 * layer(h),
    "straight-through": _straight_through,
    "minus itself": lambda layer, x: (h := layer(x)) - h.detach(),
    "centred": lambda layer, x: (h := layer(x)) - h.mean(-1, keepdim=True),
    "error": lambda layer, x: (layer(x) - x).pow(2),
    "1 - p": lambda layer, x: 1 - torch.softmax(layer(x), -1),
    "logits": lambda layer, x: ((h := layer(x)) - h.max(-1, keepdim=True)[0]).exp(),
    "mask": lambda layer, x: layer(x) * (1 - (x > 0).bfloat16()),
    "dropout": lambda layer, x: F.dropout(layer(x), 0.5),
    "reference with the same weights": _close_to_its_target,
    "kept numbers whose making is unknown": _stored_long_ago,
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_loses_nothing_is_left_alone(name: str, dtype: torch.dtype) -> None:
    assert not _seen(HEALTHY[name], dtype)


def test_later_steps_are_looked_at_now_and_then() -> None:
    assert [bool(_seen(_complement, step=n)) for n in (2, 3, 16, 17)] == [True, False, True, False]


def test_numbers_written_over_since_are_not_taken_for_what_was_computed() -> None:
    def written_over(layer: nn.Linear, x: Tensor) -> Tensor:
        h = 1.0 * torch.sigmoid(0.1 * layer(x) + 7)
        with torch.no_grad():
            h.fill_(0.5)
        return 1 - h

    assert not _seen(written_over)


def test_what_a_script_lets_go_of_is_not_held_to_the_end_of_its_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cancellation, "MAX_NUMEL", 1_000)
    monkeypatch.setattr(cancellation, "MAX_KEPT", 10_000)
    held: list[StorageWeakRef] = []
    gc.collect()
    gc.disable()
    with watched() as seen:
        seen.watch.new_step(0)
        for size in [900] * 40 + [2_000] * 40:
            part = torch.randn(size).half()
            held.append(StorageWeakRef(part.untyped_storage()))
            part.mean()
        alive = [not storage.expired() for storage in held]
    gc.enable()
    assert sum(alive[40:]) <= 1  # the last, which is in use
    assert 1 < sum(alive[:40]) <= 10_000 // 900


def test_a_storage_that_was_freed_is_not_read() -> None:
    with watched() as seen:
        seen.watch.new_step(0)
        layer, x = nn.Linear(16, 16), torch.randn(4, 16)
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            h = layer(x) + 50
            mean, square = h.mean(-1), h.pow(2).mean(-1)
            h.untyped_storage().resize_(0)
            difference = square - mean.pow(2)
        assert not seen.watch.failures.note
    assert difference.isfinite().all()
