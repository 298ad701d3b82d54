"""Gradients are looked at as backward leaves them: non-finite ones that a script makes finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.root_op import Arrives, root_op
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.observations import Outcome
from ampscope.rules.gradient_underflow import check as underflow
from ampscope.rules.loss_scale_too_high import check as too_high
from ampscope.rules.verdict import Status
from tests.helpers.script_watching import Watched, batch, scaler, small_net, watched

OVERFLOWS = 1e9  # times a loss of ordinary size: beyond fp16
Edit = Callable[[nn.Module], None]


def _cleaned(gradient: Tensor) -> Tensor:
    return torch.where(torch.isfinite(gradient), gradient, torch.zeros_like(gradient))


def _in_place(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad.nan_to_num_(0.0, 0.0, 0.0)


def _into(net: nn.Module) -> None:
    for p in net.parameters():
        torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)


def _masked(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad[~p.grad.isfinite()] = 0.0


def _assigned(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad = _cleaned(p.grad)


def _clipped(net: nn.Module) -> None:
    for p in net.parameters():
        p.grad[p.grad.isnan()] = torch.inf
    nn.utils.clip_grad_value_(net.parameters(), 1.0, foreach=True)


def _nothing(net: nn.Module) -> None:
    pass


def _hook(net: nn.Module) -> None:
    for p in net.parameters():
        p.register_hook(_cleaned)


def _clean(parameter: Tensor) -> None:
    parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def _hook_after(net: nn.Module) -> None:
    for p in net.parameters():
        p.register_post_accumulate_grad_hook(_clean)


def _trained(
    edit: Edit = _nothing, *, hooks: Edit = _nothing, factor: float = OVERFLOWS,
    backwards: int = 1, guard: bool | None = None, half: bool = True, scale: float = 0.0,
) -> Watched:  # fmt: skip
    """Four steps under autocast; ``guard`` is the set_to_none of a zero_grad that drops all."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-9)
    own = scaler(scale or 1.0, enabled=bool(scale))
    hooks(net)
    with watched() as seen:
        for step in range(4):
            optimizer.zero_grad()
            for _ in range(backwards):
                x, y = batch(step)
                with torch.autocast("cpu", dtype=torch.float16, enabled=half):
                    out = net(x)
                own.scale((out.float() - y).square().sum() * factor).backward()
                edit(net)
            if guard is None:
                own.step(optimizer)
                own.update()
            else:
                optimizer.zero_grad(set_to_none=guard)
    return seen


def _view(seen: Watched, control: str = "as_is") -> RunView:
    steps = seen.steps
    reached = {*steps.gradients.taints, *steps.replaced.taints}
    ops = [replace(b, reached_gradient=b.id in reached) for b in seen.watch.records()]
    records = [*seen.log.calls, *steps.records, *steps.gradients.records, *steps.replaced.records]
    return RunView(control, "r1", [*records, *ops, Outcome(ended="returned", uses_autocast="fp16")])


def _lines(function: Callable[..., object]) -> set[str]:
    source, first = inspect.getsourcelines(function)
    return {f"test_replaced_gradients.py:{first + n}" for n in range(len(source))}


@pytest.mark.parametrize("edit", [_in_place, _into, _masked, _assigned, _clipped])
@pytest.mark.parametrize("backwards", [1, 2])
def test_what_the_script_made_finite_is_seen_as_backward_left_it(
    edit: Edit, backwards: int
) -> None:
    run = _view(_trained(edit, backwards=backwards))
    assert [a.grad_nonfinite for a in run.steps] == [0, 0, 0, 0]
    assert run.replaced_steps == {0, 1, 2, 3}
    lines = {line for function in (edit, _cleaned) for line in _lines(function)}
    assert {c.line for c in run.replaced_gradients} <= lines
    root = root_op(run)
    assert root is not None
    assert root.arrives is Arrives.GRADIENT
    assert root.op.phase == "backward"


@pytest.mark.parametrize("hooks", [_hook, _hook_after])
def test_the_value_before_a_hook_is_what_backward_computed(hooks: Edit) -> None:
    run = _view(_trained(hooks=hooks))
    assert [a.grad_nonfinite for a in run.steps] == [0, 0, 0, 0]
    assert run.replaced_steps == {0, 1, 2, 3}
    root = root_op(run)
    assert root is not None
    assert root.arrives is Arrives.GRADIENT


@pytest.mark.parametrize(
    ("edit", "factor", "guard"),
    [
        (_in_place, 1.0, None),  # finite anyway
        (_assigned, 1.0, None),
        (_nothing, OVERFLOWS, None),  # the optimizer got them
        (_nothing, OVERFLOWS, True),  # no step took them
        (_nothing, OVERFLOWS, False),
    ],
)
def test_nothing_is_said_of_other_trainings(edit: Edit, factor: float, guard: bool | None) -> None:
    assert _trained(edit, factor=factor, guard=guard).steps.replaced.records == []
    assert _trained(hooks=_hook, factor=1.0).steps.replaced.records == []


def test_the_cause_is_that_of_the_values_and_not_underflow() -> None:
    run = _view(_trained(_in_place, factor=1.0, scale=2.0**30))
    fp32 = _view(_trained(_in_place, factor=1.0, half=False), "fp32")
    evidence = Evidence({"as_is": run, "fp32": fp32}, "native")
    assert symptoms(run, fp32) >= {Symptom.GRADIENTS}
    assert underflow(evidence).status is not Status.FOUND
    verdict = too_high(evidence)
    assert verdict.status is Status.FOUND
    assert verdict.fix.controls[0].startswith("init_scale:")


def test_a_derivative_that_no_precision_has_is_no_symptom_where_it_is_replaced() -> None:
    run, fp32 = (_view(_trained(_in_place), control) for control in ("as_is", "fp32"))
    assert Symptom.GRADIENTS not in symptoms(run, fp32)


def _asked(factor: float, *, sets: bool, cleans: bool, backward: bool) -> set[int]:
    """Four steps whose gradients come from torch.autograd.grad: the steps with replaced ones."""
    net = small_net()
    with watched() as seen:
        optimizer = torch.optim.SGD(net.parameters(), 1e-9)
        for step in range(4):
            x, y = batch(step)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            loss = (out.float() - y).square().sum()
            taken = torch.autograd.grad(loss * factor, net.parameters(), retain_graph=backward)
            for p, g in zip(net.parameters(), taken, strict=True):
                if sets:
                    p.grad = _cleaned(g) if cleans else g
            if backward:
                optimizer.zero_grad()
                loss.backward()
            optimizer.step()
    return _view(seen).replaced_steps


def test_gradients_that_the_script_asks_for_are_those_of_backward() -> None:
    """The first step too, though nothing has named the optimizer yet."""
    assert _asked(OVERFLOWS, sets=True, cleans=True, backward=False) == {0, 1, 2, 3}
    assert not _asked(1.0, sets=True, cleans=True, backward=False)
    assert not _asked(OVERFLOWS, sets=True, cleans=False, backward=False)


def test_gradients_that_were_asked_for_and_not_set_are_none_of_the_step() -> None:
    """A gradient's norm, a penalty, an inner loop: the step takes what backward computed."""
    assert not _asked(OVERFLOWS, sets=False, cleans=False, backward=True)
    assert not _asked(OVERFLOWS, sets=True, cleans=True, backward=True)


@pytest.mark.parametrize("to_none", [True, False])
def test_clearing_the_gradients_sets_none_of_them(to_none: bool) -> None:
    """The first gradients, which are not finite, are for a norm; the step takes the second."""
    net = small_net()
    with watched() as seen:
        optimizer = torch.optim.SGD(net.parameters(), 1e-9)
        for step in range(4):
            x, y = batch(step)
            with torch.autocast("cpu", dtype=torch.float16):
                out = net(x)
            loss = (out.float() - y).square().sum()
            torch.autograd.grad(loss * OVERFLOWS, net.parameters(), retain_graph=True)
            optimizer.zero_grad(set_to_none=to_none)
            for p, g in zip(
                net.parameters(), torch.autograd.grad(loss, net.parameters()), strict=True
            ):
                p.grad = g
            optimizer.step()
    assert not _view(seen).replaced_steps
