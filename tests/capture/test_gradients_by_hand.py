"""Gradients that a script sets or clears itself are logged as the same training's with torch's own
``backward`` and ``zero_grad``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ampscope.observations import Call
from tests.helpers.script_watching import Watched, batch, scaler, small_net, watched

SCALED = 256.0
Loss = Callable[[int], Tensor]
Fill = Callable[[nn.Module, Tensor], None]


def _backward(net: nn.Module, loss: Tensor) -> None:
    loss.backward()


def _asked(net: nn.Module, loss: Tensor) -> None:
    own = list(net.parameters())
    for p, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
        p.grad = gradient


def _copied(net: nn.Module, loss: Tensor) -> None:
    own = list(net.parameters())
    for p, gradient in zip(own, torch.autograd.grad(loss, own), strict=True):
        p.grad = torch.zeros_like(p)
        p.grad.copy_(gradient)


def _in_two(net: nn.Module, loss: Tensor) -> None:
    own = list(net.parameters())
    found = [torch.autograd.grad(loss, own, retain_graph=True) for _ in range(2)]
    for p, *both in zip(own, *found, strict=True):
        p.grad = sum(both) / 2


def _after_a_product(net: nn.Module, loss: Tensor) -> None:
    own = list(net.parameters())
    found = torch.autograd.grad(loss, own, create_graph=True)
    torch.autograd.grad(found, own, [torch.ones_like(p) for p in own], retain_graph=True)
    for p, gradient in zip(own, found, strict=True):
        p.grad = gradient.detach()


def _differentiated(net: nn.Module, loss: Tensor) -> None:
    raise NotImplementedError  # another loop: see _trained


def _trained(fill: Fill, *, clip: bool = False, scale: float = SCALED) -> Watched:
    """Four steps through a scaler."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with watched() as seen:
        grads = scaler(scale)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            if fill is _differentiated:
                _by_transform(net, grads, x, y)
            else:
                fill(net, grads.scale(mse_loss(net(x), y)))
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            grads.step(optimizer)
            grads.update()
    return seen


def _by_transform(net: nn.Module, grads: torch.amp.GradScaler, x: Tensor, y: Tensor) -> None:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        return grads.scale(mse_loss(torch.func.functional_call(net, weights, (x,)), y))

    copies = {name: p.detach() for name, p in net.named_parameters()}
    gradients, _ = torch.func.grad_and_value(loss)(copies)
    for name, p in net.named_parameters():
        p.grad = gradients[name]


def _backwards(seen: Watched) -> list[Call]:
    return [c for c in seen.log.calls if c.name == "backward" and not c.nested]


@pytest.mark.parametrize("fill", [_asked, _copied, _in_two, _after_a_product, _differentiated])
def test_a_training_without_backward_has_the_losses_of_one_with_it(fill: Fill) -> None:
    plain, own = _trained(_backward), _trained(fill)
    assert [a.loss for a in own.steps.records] == pytest.approx(
        [a.loss for a in plain.steps.records]
    )
    assert {(c.subject, c.scaled, c.dtype) for c in _backwards(own)} == {("scaler0", True, "fp32")}
    assert len({c.line for c in _backwards(own)}) == 1
    assert [a.grad_norm for a in own.steps.records] == pytest.approx(
        [a.grad_norm for a in plain.steps.records]
    )


def test_several_calls_at_one_line_are_several_backward_passes() -> None:
    assert [a.backwards for a in _trained(_in_two).steps.records] == [2] * 4


@pytest.mark.parametrize("fill", [_asked, _differentiated])
def test_a_clip_of_what_the_script_set_meets_the_scale(fill: Fill) -> None:
    clips = [c for c in _trained(fill, clip=True).log.calls if c.name == "clip"]
    assert len(clips) == 4
    assert all(c.scaled for c in clips)


def test_gradients_that_enter_a_loss_are_no_backward_pass() -> None:
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with watched() as seen:
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = mse_loss(net(x), y)
            found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            total = loss + sum(g.square().sum() for g in found)
            total.backward()
            optimizer.step()
    assert len(_backwards(seen)) == 3
    assert [a.backwards for a in seen.steps.records] == [1] * 3


def test_two_lines_whose_results_are_mixed_name_no_loss() -> None:
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    own = list(net.parameters())
    with watched() as seen:
        x, y = batch(0)
        first = torch.autograd.grad(mse_loss(net(x), y), own)
        second = torch.autograd.grad(net(x).sum(), own)
        for p, a, b in zip(own, first, second, strict=True):
            p.grad = a + b
        optimizer.step()
    assert seen.steps.records[0].loss is None


def _dropped(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = None


def _zeroed(net: nn.Module) -> None:
    for p in net.parameters():
        if p.grad is not None:
            p.grad.data.zero_()


def _kept(net: nn.Module) -> None:
    pass


@pytest.mark.parametrize(("clear", "cleared"), [(_dropped, 3), (_zeroed, 3), (_kept, 0)])
def test_gradients_that_the_script_clears_are_cleared(
    clear: Callable[[nn.Module], None], cleared: int
) -> None:
    net = small_net()
    with watched() as seen:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        for step in range(4):
            clear(net)
            for micro in range(2):
                x, y = batch(2 * step + micro)
                mse_loss(net(x), y).backward()
            optimizer.step()
    assert seen.names().count("zero_grad") == cleared


@pytest.mark.parametrize("to_none", [True, False])
def test_what_zero_grad_cleared_is_told_once(to_none: bool) -> None:
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with watched() as seen:
        for step in range(3):
            x, y = batch(step)
            net.zero_grad(set_to_none=to_none)
            mse_loss(net(x), y).backward()
            optimizer.step()
    assert seen.names().count("zero_grad") == 3


@pytest.mark.parametrize("sets", [False, True])
def test_gradients_that_are_asked_for_beside_a_backward_are_no_step_s(sets: bool) -> None:
    """A look at gradients (GradNorm, a monitor) between the backward and the step; ``sets``: one
    of them is put into ``.grad``."""
    net = small_net()
    with watched() as seen:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        grads = scaler(SCALED)
        for step in range(4):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = mse_loss(net(x), y)
            grads.scale(loss).backward(retain_graph=True)
            own = list(net.parameters())
            found = torch.autograd.grad(loss * 3, own)
            if sets:
                own[0].grad = found[0]
            grads.step(optimizer)
            grads.update()
            assert seen.steps.records[-1].loss == pytest.approx(loss.item())
    assert len(_backwards(seen)) == 4
    assert all(c.scaled for c in _backwards(seen))
    assert {a.backwards for a in seen.steps.records} == {1}


def test_gradients_of_several_losses_that_are_made_finite_are_told() -> None:
    net = small_net()
    with watched() as seen:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        own = list(net.parameters())
        for step in range(3):
            x, y = batch(step)
            loss = mse_loss(net(x), y)
            found = torch.autograd.grad([loss, loss * torch.inf], own)
            for p, gradient in zip(own, found, strict=True):
                p.grad = torch.nan_to_num(gradient, 0.0, 0.0, 0.0)
            optimizer.step()
    assert len(seen.steps.replaced.records) == 3


def test_zeros_of_gradients_that_were_asked_for_are_counted_in_the_first_calls_of_each_line() -> (
    None
):
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    keeps = torch.tensor([0.0, 1.0, 0.0, 0.0])
    with watched() as seen:
        for _ in range(10):
            torch.autograd.grad((x * keeps).sum(), x)
        torch.autograd.grad([(x * 2).sum()], [x, torch.zeros(4, requires_grad=True)],
                            allow_unused=True)  # fmt: skip
    shares = [c.value for c in seen.log.calls if c.name == "grad"]
    assert shares == [0.75] * 8 + [None] * 2 + [0.0]
