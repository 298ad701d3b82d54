"""Half copies of weights that are used after the weight has changed, and copies that never are."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, mse_loss

from ampscope.observations import STALE_CACHED, STALE_KEPT, STALE_MODEL, OpUse
from ampscope.runner.controls import applied
from tests.helpers.script_watching import batch, equal, small_net, watched, weights_of

STEPS = 6
Loop = Callable[[], object]


def region(**facts: Any) -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16, **facts)


def learn(model: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    mse_loss(model(x).float(), y).backward()
    optimizer.step()


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_net()
    return model, torch.optim.SGD(model.parameters(), 0.01)


def found(loop: Loop) -> list[OpUse]:
    with watched() as seen:
        loop()
    assert not seen.watch.failures.note
    return seen.watch.copies.records()


def around_the_loop() -> nn.Module:
    model, optimizer = made()
    with region():
        for step in range(STEPS):
            learn(model, optimizer, step)
    return model


def inside_an_open_one() -> nn.Module:
    model, optimizer = made()
    with region():
        for step in range(STEPS):
            with region():
                learn(model, optimizer, step)
    return model


def with_weights_swapped_in() -> None:
    """A reference's weights are written by ``.data``, and the copies that it made are then used for
    the model itself."""
    model, optimizer = made()
    first = weights_of(model)
    for step in range(STEPS):
        with region():
            own = weights_of(model)
            write(model, first)
            with torch.no_grad():
                model(batch(step)[0])
            write(model, own)
            learn(model, optimizer, step)


def write(model: nn.Module, values: list[Tensor]) -> None:
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data.copy_(value)


@pytest.mark.parametrize(
    ("loop", "first", "steps"),
    [(around_the_loop, 3, 3), (inside_an_open_one, 3, 3), (with_weights_swapped_in, 1, 5)],
)
def test_autocasts_copies_that_outlive_an_update_are_found(
    loop: Loop, first: int, steps: int
) -> None:
    (use,) = found(loop)
    lines, start = inspect.getsourcelines(loop)
    opened = start + next(n for n, line in enumerate(lines) if "with region" in line)
    assert use.name == STALE_CACHED
    assert use.line.endswith(f"test_stale_copies.py:{opened}")
    assert (use.step, use.value, use.count) == (first, steps, 4)  # two weights and two biases


def test_the_distance_is_that_of_the_copy_from_the_weight() -> None:
    weight = nn.Parameter(torch.ones(4, 4))

    def loop() -> None:
        with region():
            linear(torch.ones(1, 4), weight)
            weight.data.fill_(4.0)
            linear(torch.ones(1, 4), weight)

    (use,) = found(loop)
    assert use.other == pytest.approx(0.75)  # |1 - 4| / 4


class Kept(nn.Module):
    """Casts its weight once."""

    def __init__(self, *, with_gradients: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(1, 4))
        self.half: Tensor | None = None
        self.with_gradients = with_gradients

    def forward(self, x: Tensor) -> Tensor:
        if self.half is None:
            with torch.set_grad_enabled(self.with_gradients):
                self.half = self.weight.bfloat16()
        return linear(x.bfloat16(), self.half)


def train_kept() -> Kept:
    model = Kept()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        learn(model, optimizer, step)
    return model


def test_a_copy_that_the_script_keeps_is_found_at_its_cast() -> None:
    (use,) = found(train_kept)
    lines, start = inspect.getsourcelines(Kept)
    cast = start + next(n for n, line in enumerate(lines) if ".bfloat16()" in line)
    assert use.name == STALE_KEPT
    assert use.line.endswith(f"test_stale_copies.py:{cast}")
    assert (use.step, use.value, use.count) == (3, 3, 1)


def two_losses_in_one_region() -> None:
    """As of a GAN: the second loss goes through what the first one's step has just changed."""
    model, optimizer = made()
    for step in range(STEPS):
        with region():
            learn(model, optimizer, step)
            learn(model, optimizer, step)


def test_a_copy_of_the_step_before_is_a_delay() -> None:
    assert not found(two_losses_in_one_region)


def region_per_step() -> None:
    model, optimizer = made()
    for step in range(STEPS):
        with region():
            learn(model, optimizer, step)


def without_the_cache() -> None:
    model, optimizer = made()
    with region(cache_enabled=False):
        for step in range(STEPS):
            learn(model, optimizer, step)


def cleared_after_each_step() -> None:
    model, optimizer = made()
    with region():
        for step in range(STEPS):
            learn(model, optimizer, step)
            torch.clear_autocast_cache()


def accumulated_in_one_region() -> None:
    model, optimizer = made()
    for step in range(STEPS):
        with region():
            for part in range(3):
                mse_loss(model(batch(3 * step + part)[0]).float(), batch(part)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluated_in_one_region() -> None:
    model, optimizer = made()
    for step in range(STEPS):
        with region():
            learn(model, optimizer, step)
        with region(), torch.no_grad():
            for part in range(12):
                model(batch(part)[0])


def steps_left_out() -> None:
    """A scaler skips every step: nothing changes."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.float16):
        for step in range(3):
            scaler.scale(model(batch(step)[0]).sum() * torch.inf).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def target_that_lags() -> None:
    """A second network, half and updated every other step, whose output is a target."""
    model, optimizer = made()
    target = copy.deepcopy(model).bfloat16()
    for step in range(STEPS):
        with torch.no_grad():
            target(batch(step)[0].bfloat16())
        with region():
            learn(model, optimizer, step)
        if step % 2:
            target.load_state_dict(model.state_dict())


def target_of_kept_weights() -> None:
    """As before, of one weight that was cast without gradients."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with torch.no_grad():
        half = model.weight.bfloat16()
    for step in range(STEPS):
        linear(batch(step)[0].bfloat16(), half)
        with region():
            learn(model, optimizer, step)


def average_swapped_in_between_regions() -> None:
    model, optimizer = made()
    average = weights_of(model)
    for step in range(STEPS):
        with region():
            learn(model, optimizer, step)
        average = [0.9 * a + 0.1 * p for a, p in zip(average, weights_of(model), strict=True)]
        own = weights_of(model)
        write(model, average)
        with region(), torch.no_grad():
            model(batch(step)[0])
        write(model, own)


def one_cell_many_times() -> None:
    torch.manual_seed(0)
    cell = nn.GRUCell(4, 4)
    optimizer = torch.optim.SGD(cell.parameters(), 0.01)
    for step in range(STEPS):
        x, hidden = batch(step)[0], torch.zeros(16, 4)
        with region():
            for _ in range(12):
                hidden = cell(x, hidden)
            hidden.float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [
        region_per_step,
        without_the_cache,
        cleared_after_each_step,
        accumulated_in_one_region,
        evaluated_in_one_region,
        steps_left_out,
        target_that_lags,
        target_of_kept_weights,
        average_swapped_in_between_regions,
        one_cell_many_times,
    ],
    ids=lambda loop: loop.__name__,
)
def test_copies_that_follow_their_weights_are_not_found(loop: Loop) -> None:
    assert found(loop) == []


def test_fresh_casts_are_the_loop_with_a_region_for_each_step() -> None:
    model, optimizer = made()
    for step in range(STEPS):
        with region():
            learn(model, optimizer, step)
    stale = weights_of(around_the_loop())
    with applied("fresh_casts"):
        fresh = weights_of(around_the_loop())
        assert found(around_the_loop) == []
    assert equal(fresh, weights_of(model))
    assert not equal(fresh, stale)


def test_fresh_casts_write_the_scripts_own_copies_anew() -> None:
    class Anew(Kept):
        def forward(self, x: Tensor) -> Tensor:
            return linear(x.bfloat16(), self.weight.bfloat16())

    model = Anew()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(STEPS):
        learn(model, optimizer, step)
    with applied("fresh_casts"):
        fresh = train_kept()
    assert equal(weights_of(fresh), weights_of(model))
    assert not equal(weights_of(train_kept()), weights_of(model))


def train_by_a_half_model(*, copied_back: bool) -> tuple[nn.Module, nn.Module]:
    model, optimizer = made()
    half = copy.deepcopy(model).bfloat16()
    for step in range(STEPS):
        x, y = batch(step)
        mse_loss(half(x.bfloat16()).float(), y).backward()
        for own, weight in zip(half.parameters(), model.parameters(), strict=True):
            assert own.grad is not None
            weight.grad, own.grad = own.grad.float() / 2, own.grad
        optimizer.step()
        for own, weight in zip(half.parameters(), model.parameters(), strict=True):
            own.grad = None
            if copied_back:
                own.data.copy_(weight.data)
    return half, model


@pytest.mark.parametrize("copied_back", [False, True])
def test_a_half_model_that_never_gets_the_weights_back_is_found(copied_back: bool) -> None:
    with watched() as seen:
        kept = train_by_a_half_model(copied_back=copied_back)
        uses = seen.watch.model_copies.records(seen.steps.count)
    assert len(kept) == 2
    told = [(use.name, use.step, use.value, use.count) for use in uses]
    assert told == (
        [] if copied_back else [(STALE_MODEL, 1, STEPS - 1, 3)]
    )  # one bias is one number


@pytest.mark.parametrize("sign", [1, -1])
def test_a_teacher_that_gets_gradients_of_its_own_is_no_copy(sign: int) -> None:
    """A half copy of the first weights whose parameters were not frozen: at first its gradients are
    its pupil's."""
    with watched() as seen:
        model, optimizer = made()
        teacher = copy.deepcopy(model).bfloat16()
        for step in range(STEPS):
            x = batch(step)[0]
            optimizer.zero_grad()
            with region():
                pupil = model(x)
            (sign * pupil * teacher(x.bfloat16())).float().sum().backward()
            optimizer.step()
        uses = seen.watch.model_copies.records(seen.steps.count)
    assert uses == []


def test_fresh_casts_copy_the_weights_back() -> None:
    expected = train_by_a_half_model(copied_back=True)
    with applied("fresh_casts"):
        written = train_by_a_half_model(copied_back=False)
    big = ("0.weight", "0.bias", "2.weight")
    for fresh, by_hand in zip(written, expected, strict=True):
        state, other = fresh.state_dict(), by_hand.state_dict()
        assert all(torch.allclose(state[n].float(), other[n].float(), atol=0.02) for n in big)
    assert not equal(
        weights_of(written[0]), weights_of(train_by_a_half_model(copied_back=False)[0])
    )
