"""The call log off the plain path: several scalers in turn, and exceptions inside calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from tests.helpers.script_watching import Watched, batch, scaler, small_net, watched


def _pair() -> tuple[nn.Sequential, torch.optim.SGD]:
    model = small_net()
    return model, torch.optim.SGD(model.parameters(), 0.01)


def test_two_scalers_that_take_turns_do_not_forget_each_others_unscale() -> None:
    """scaler0's update begins scaler0's protocol anew and leaves what scaler1 unscaled alone."""
    pairs = [_pair(), _pair()]
    with watched() as seen:
        scalers = [scaler(), scaler(256.0)]
        for (model, optimizer), own in zip(pairs, scalers, strict=True):
            own.scale(mse_loss(model(batch(0)[0]), batch(0)[1])).backward()
            own.unscale_(optimizer)
        scalers[0].step(pairs[0][1])
        scalers[0].update()
        nn.utils.clip_grad_norm_(pairs[1][0].parameters(), 1.0)
        scalers[1].step(pairs[1][1])
        scalers[1].update()
    assert [c.scaled for c in seen.log.calls if c.name == "clip"] == [False]
    subjects = [c.subject for c in seen.log.calls if c.name in ("scaler_step", "update")]
    assert subjects == ["scaler0", "scaler0", "scaler1", "scaler1"]
    assert [(a.optimizer, a.scaler, a.scale) for a in seen.steps.records] == [
        ("optimizer0", "scaler0", 1024.0), ("optimizer1", "scaler1", 256.0),
    ]  # fmt: skip


def _unscale_twice(seen: Watched) -> None:
    model, optimizer = _pair()
    grad_scaler = scaler()
    grad_scaler.scale(model(batch(0)[0]).sum()).backward()
    grad_scaler.unscale_(optimizer)
    grad_scaler.unscale_(optimizer)


def _backward_without_a_graph(seen: Watched) -> None:
    torch.ones(1).backward()


def _step_without_gradients(seen: Watched) -> None:
    grad_scaler = scaler()
    grad_scaler.scale(torch.ones(1, requires_grad=True))
    grad_scaler.step(_pair()[1])


def _function_that_raises(seen: Watched) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    Broken.apply(torch.ones(1))


@pytest.mark.parametrize(
    "script",
    [_unscale_twice, _backward_without_a_graph, _step_without_gradients, _function_that_raises],
)
def test_an_exception_inside_a_call_passes_and_leaves_the_log_upright(script: Any) -> None:
    with watched() as seen:
        with pytest.raises((RuntimeError, AssertionError)):
            script(seen)
        logged = len(seen.log.calls)
        loss = torch.ones(1, requires_grad=True).sum()
        loss.backward()
        assert [(c.name, c.nested) for c in seen.log.calls[logged:]] == [("backward", False)]
        assert seen.watch.functions == []


def test_an_optimizer_that_was_replaced_does_not_make_a_clip_a_scaled_one() -> None:
    """Two phases: the first one's optimizer still lives, and nobody unscales it any more."""
    model, grad_scaler = small_net(), scaler()
    with watched() as seen:
        kept = []
        for phase in range(2):
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            kept.append(optimizer)
            for unscales in (True, False):
                optimizer.zero_grad()
                loss = mse_loss(model(batch(phase)[0]), batch(phase)[1])
                grad_scaler.scale(loss).backward()
                if unscales:
                    grad_scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                grad_scaler.step(optimizer)
                grad_scaler.update()
    assert [c.scaled for c in seen.log.calls if c.name == "clip"] == [False, True, False, True]


def test_a_clip_of_two_networks_is_scaled_where_one_of_them_is() -> None:
    pairs, grad_scaler = [_pair(), _pair()], scaler()
    with watched() as seen:
        for _ in range(2):
            for model, _optimizer in pairs:
                grad_scaler.scale(mse_loss(model(batch(0)[0]), batch(0)[1])).backward()
            grad_scaler.unscale_(pairs[0][1])
            every = [p for model, _ in pairs for p in model.parameters()]
            nn.utils.clip_grad_norm_(every, 1.0)
            nn.utils.clip_grad_norm_(pairs[0][0].parameters(), 1.0)
            for _model, optimizer in pairs:
                grad_scaler.step(optimizer)
            grad_scaler.update()
    assert [c.scaled for c in seen.log.calls if c.name == "clip"][2:] == [True, False]
