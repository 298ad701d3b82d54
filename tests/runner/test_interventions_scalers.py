"""Interventions that add a scaler, split one, or move its unscale_, on a small training.

The oracle is the same training written out by hand with the change in its own lines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ampscope.runner.controls import applied
from tests.helpers.script_watching import batch, equal, scaler, small_net, train, weights_of


@contextlib.contextmanager
def _nothing() -> Iterator[None]:
    yield


def _plain(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int = 4,
    clip: Callable[[], object] = lambda: None, micro: int = 1,
) -> None:  # fmt: skip
    """A loop without a scaler."""
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(micro):
            x, y = batch(step * micro + part)
            mse_loss(model(x), y).backward()
        clip()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_an_added_scaler_changes_no_bit_of_a_training_that_fits(
    clipped: bool, micro: int, count: int
) -> None:
    """65,536 is a power of two: scaling and unscaling fp32 gradients is exact."""
    trained = []
    for around in (_nothing(), applied("add_scaler")):
        with around:
            model = small_net()
            halves = [model.parameters()] if count == 1 else [
                model[0].parameters(), model[2].parameters()]  # fmt: skip
            optimizers = [torch.optim.SGD(half, 0.05) for half in halves]

            def clip(model: nn.Module = model) -> None:
                if clipped:
                    nn.utils.clip_grad_norm_(model[0].parameters(), 0.1)

            _plain(model, optimizers, clip=clip, micro=micro)
            trained.append(weights_of(model))
    assert equal(*trained)


def test_an_added_scaler_scales_once_under_a_default_device() -> None:
    """A torch function mode, as a default device is, calls ``Tensor.backward`` a second time."""
    trained, seen = [], []
    for around in (_nothing(), applied("add_scaler")):
        with torch.device("cpu"), around:
            model = small_net()
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            for step in range(3):
                optimizer.zero_grad()
                loss = mse_loss(model(batch(step)[0]), batch(step)[1])
                loss.register_hook(lambda g: seen.append(float(g)))
                loss.backward()
                optimizer.step()
            trained.append(weights_of(model))
    assert equal(*trained)
    assert seen == [1.0] * 3 + [65536.0] * 3


@pytest.mark.parametrize("clipped", [False, True])
def test_an_added_scaler_leaves_out_a_step_that_is_not_finite_and_halves_once(
    clipped: bool,
) -> None:
    seen: list[float] = []
    with applied("add_scaler"):
        model = small_net()
        optimizers = [torch.optim.SGD(model[n].parameters(), 0.05) for n in (0, 2)]
        before = weights_of(model)
        for factor in (1e36, 1.0):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = mse_loss(model(batch(0)[0]), batch(0)[1]) * factor
            loss.register_hook(lambda g: seen.append(float(g)))
            loss.backward()
            if clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            if factor > 1:
                assert equal(before, weights_of(model))
    assert seen == [65536.0, 32768.0]
    assert not equal(before, weights_of(model))
    assert all(bool(torch.isfinite(w).all()) for w in weights_of(model))


def test_unscale_first_is_the_loop_with_unscale_before_the_clip() -> None:
    trained = []
    for control, by_hand in (("as_is", True), ("unscale_first", False), ("as_is", False)):
        with applied(control):
            model = small_net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            own = scaler()

            def clip(step: int, o: Any = optimizer, s: Any = own, m: Any = model,
                     by_hand: bool = by_hand) -> None:  # fmt: skip
                if by_hand:
                    s.unscale_(o)
                nn.utils.clip_grad_norm_(m.parameters(), 0.5)

            train(model, optimizer, own, clip)
            trained.append(weights_of(model))
    assert equal(trained[0], trained[1])
    assert not equal(trained[0], trained[2])


def test_unscale_first_unscales_once_where_one_optimizer_took_anothers_place() -> None:
    trained = []
    for control, by_hand in (("as_is", True), ("unscale_first", False)):
        with applied(control):
            model, own, kept = small_net(), scaler(), []
            for _phase in range(2):
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                kept.append(optimizer)

                def clip(step: int, o: Any = optimizer, by_hand: bool = by_hand) -> None:
                    if by_hand:
                        own.unscale_(o)  # noqa: B023  # called within this turn of the loop
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: B023

                train(model, optimizer, own, clip, steps=3)
            trained.append(weights_of(model))
    assert equal(*trained)


def test_unscale_first_lets_each_scaler_unscale_its_own_optimizer() -> None:
    """Two losses, both scaled before either is clipped: after the first round each is known."""
    trained = []
    for control, by_hand in (("as_is", True), ("unscale_first", False)):
        with applied(control):
            models = [small_net(0), small_net(1)]
            optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
            scalers = [scaler(64.0), scaler(4096.0)]
            for step in range(3):
                for m, o, s in zip(models, optimizers, scalers, strict=True):
                    o.zero_grad()
                    s.scale(mse_loss(m(batch(step)[0]), batch(step)[1])).backward()
                    if step == 0:  # one after the other
                        _clip_and_step(m, o, s, by_hand)
                for m, o, s in zip(models, optimizers, scalers, strict=True):
                    if step:
                        _clip_and_step(m, o, s, by_hand)
            trained.append([*weights_of(models[0]), *weights_of(models[1])])
    assert equal(*trained)


def _clip_and_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, own: torch.amp.GradScaler, by_hand: bool
) -> None:
    if by_hand:
        own.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    own.step(optimizer)
    own.update()


def _gan_scales(control: str, own_scalers: bool) -> tuple[list[Tensor], list[float]]:
    """Two losses that share a scaler; the first overflows at every step."""
    with applied(control):
        models = [small_net(0), small_net(1)]
        optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in models]
        first = scaler(1024.0)
        scalers = [first, scaler(1024.0) if own_scalers else first]
        seen = []
        for step in range(5):
            for n, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                loss = mse_loss(model(batch(step)[0]), batch(step)[1])
                scalers[n].scale(loss * (1e38 if n == 0 else 1.0)).backward()
                scalers[n].step(optimizer)
            seen.append(scalers[1].get_scale())
            for one in dict.fromkeys(scalers):
                one.update()
        return [w for m in models for w in weights_of(m)], seen


def test_separate_scalers_are_the_loop_with_two() -> None:
    _, shared_scales = _gan_scales("as_is", own_scalers=False)
    by_hand, hand_scales = _gan_scales("as_is", own_scalers=True)
    separate, scales = _gan_scales("separate_scalers", own_scalers=False)
    assert shared_scales == [1024.0, 512.0, 256.0, 128.0, 64.0]
    assert scales == hand_scales == [1024.0] * 5
    assert equal(separate, by_hand)


def test_one_loss_needs_no_second_scaler() -> None:
    trained = []
    for control in ("as_is", "separate_scalers"):
        with applied(control):
            model = small_net()
            train(model, torch.optim.SGD(model.parameters(), 0.05), scaler(3e38), steps=8)
            trained.append(weights_of(model))
    assert equal(*trained)


@pytest.mark.parametrize("in_buffers", [False, True])
def test_cleared_gradients_are_those_of_a_loop_that_clears_after_every_step(
    in_buffers: bool,
) -> None:
    """The second of four steps overflows and is skipped; what it left is gone at the next one."""
    trained = []
    for control, by_hand in (("as_is", True), ("cleared_grads", False), ("as_is", False)):
        with applied(control):
            model = small_net()
            optimizer, own = torch.optim.SGD(model.parameters(), 0.05), scaler(1024.0)
            if in_buffers:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            buffers = [p.grad for p in model.parameters()]
            for step in range(4):
                x, y = batch(step)
                loss = mse_loss(model(x), y) * (torch.inf if step == 1 else 1.0)
                own.scale(loss).backward()
                before = own.get_scale()
                own.step(optimizer)
                own.update()
                if by_hand or (own.get_scale() >= before and not in_buffers):
                    optimizer.zero_grad(set_to_none=False)
            if in_buffers:  # the script's own memory still
                assert all(p.grad is b for p, b in zip(model.parameters(), buffers, strict=True))
            trained.append(weights_of(model))
    assert equal(trained[0], trained[1])
    assert not equal(trained[0], trained[2])


def test_cleared_gradients_leave_an_accumulation_alone() -> None:
    trained = []
    for control in ("as_is", "cleared_grads"):
        with applied(control):
            model = small_net()
            halves = [torch.optim.SGD(model[n].parameters(), 0.05) for n in (0, 2)]
            _plain(model, halves, micro=3)
            trained.append(weights_of(model))
    assert equal(*trained)
