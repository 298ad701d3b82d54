"""The ordered log of calls, against sequences written down by hand from PyTorch's documentation."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ampscope.capture.global_hooks import OPTIMIZER_POST, OPTIMIZER_PRE
from tests.helpers.script_watching import batch, scaler, small_net, train, watched

WRAPPED: list[tuple[Any, str]] = [
    *((torch.amp.GradScaler, name) for name in (
        "__init__", "scale", "unscale_", "step", "update", "get_scale", "state_dict",
        "load_state_dict")),
    (torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "grad"),
    (torch.optim.Optimizer, "zero_grad"), (torch.nn.Module, "zero_grad"),
    *((owner, name) for owner in (torch.nn.utils, torch.nn.utils.clip_grad)
      for name in ("clip_grad_norm_", "clip_grad_value_")),
    (torch.amp.autocast_mode.autocast, "__enter__"),
    (torch.amp.autocast_mode.autocast, "__exit__"),
    *((nn.Module, name) for name in ("half", "bfloat16", "to", "type")),
    (torch.autograd.Function, "apply"), (torch.Tensor, "__reduce_ex__"),
    (torch.nn.Parameter, "__reduce_ex__"), (torch, "save"), (torch, "load"),
]  # fmt: skip


def _own_attributes() -> list[object]:
    return [vars(owner).get(name, "not its own") for owner, name in WRAPPED]


def _pair() -> tuple[nn.Sequential, torch.optim.SGD]:
    model = small_net()
    return model, torch.optim.SGD(model.parameters(), 0.01)


def test_a_step_is_logged_in_order_and_the_scalers_own_unscale_is_nested() -> None:
    model, optimizer = _pair()
    with watched() as seen:
        train(model, optimizer, scaler(), steps=1)
    assert [(c.name, c.nested) for c in seen.log.calls] == [
        ("scaler_new", False), ("zero_grad", False), ("scale", False), ("backward", False),
        ("scaler_step", False), ("unscale_", True), ("update", False),
    ]  # fmt: skip
    assert [c.seq for c in seen.log.calls] == list(range(7))


def test_an_unscale_that_the_script_makes_is_its_own_and_happens_once() -> None:
    model, optimizer = _pair()
    grad_scaler = scaler()
    with watched() as seen:
        train(model, optimizer, grad_scaler, lambda step: grad_scaler.unscale_(optimizer), 1)
    unscales = [c for c in seen.log.calls if c.name == "unscale_"]
    assert [c.nested for c in unscales] == [False]
    assert [a.unscaled_before for a in seen.steps.records] == [True]


def test_lines_are_those_of_the_script() -> None:
    with watched() as seen:
        scaler()
        loss = torch.ones(1, requires_grad=True).sum()
        loss.backward()
    here = Path(__file__).read_text().splitlines()
    call = next(c for c in seen.log.calls if c.name == "backward")
    file, number = call.line.split(":")
    assert file == Path(__file__).name
    assert here[int(number) - 1].strip() == "loss.backward()"


def test_a_cast_of_a_module_to_half_is_logged_once_and_no_other_move_of_it() -> None:
    with watched() as seen:
        small_net().to("cpu").float().double()
        small_net().to(torch.bfloat16).bfloat16()
        small_net().half()
        nn.ReLU().half()
    assert [(c.name, c.dtype) for c in seen.log.calls] == [("cast", "bf16"), ("cast", "fp16")]


def test_a_module_that_cannot_list_its_parameters_is_moved_all_the_same() -> None:
    class Closed(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            raise RuntimeError("not now")

    with watched() as seen:
        assert Closed(2, 2).half().weight.dtype == torch.float16
    assert [(c.name, c.dtype) for c in seen.log.calls] == [("cast", "fp16")]


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back(raises: bool) -> None:
    before = _own_attributes()
    hooks = (OPTIMIZER_PRE, OPTIMIZER_POST)
    sizes = [len(h.subscribers) for h in hooks]
    try:
        with watched():
            changed = [a is not b for a, b in zip(before, _own_attributes(), strict=True)]
            assert all(changed)
            assert [len(h.subscribers) for h in hooks] == [n + 1 for n in sizes]
            if raises:
                raise KeyError("the script's own")
    except KeyError:
        assert raises
    assert all(a is b for a, b in zip(before, _own_attributes(), strict=True))
    assert [len(h.subscribers) for h in hooks] == sizes


def test_watching_changes_no_bit_of_the_training() -> None:
    trained = []
    for watching in (False, True):
        model = small_net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        if watching:
            with watched():
                train(model, optimizer, scaler(2.0**40))
        else:
            train(model, optimizer, scaler(2.0**40))
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_the_loss_is_logged_without_the_scale_and_through_the_division_for_accumulation() -> None:
    model, optimizer = _pair()
    grad_scaler = scaler(4096.0)
    with watched() as seen:
        for step in range(2):
            x, y = batch(step)
            (grad_scaler.scale(mse_loss(model(x), y)) / 2).backward()
        grad_scaler.step(optimizer)
    backwards = [c for c in seen.log.calls if c.name == "backward"]
    assert [(c.scaled, c.subject) for c in backwards] == [(True, "scaler0")] * 2
    fresh = small_net()  # the step has moved the other one's weights
    for call, step in zip(backwards, range(2), strict=True):
        x, y = batch(step)
        assert call.value == pytest.approx(mse_loss(fresh(x), y).item() / 2, rel=1e-6)
    assert seen.steps.records[0].backwards == 2


def test_a_loss_that_no_scaler_saw_is_not_scaled() -> None:
    model, _ = _pair()
    with watched() as seen:
        scaler().scale(torch.ones(1, requires_grad=True).sum())
        mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    assert [c.scaled for c in seen.log.calls if c.name == "backward"] == [False]


@pytest.mark.parametrize(("times", "scaled"), [(1.0, True), (0.5, False)])
def test_a_loss_times_get_scale_is_scaled_though_not_by_scale(times: float, scaled: bool) -> None:
    model, optimizer = _pair()
    own = scaler()
    with watched() as seen:
        x, y = batch(0)
        own.scale(mse_loss(model(x), y)).backward()
        penalty = sum(p.square().sum() for p in model.parameters())
        (penalty * (times * own.get_scale())).backward()
        own.step(optimizer)
        own.update()
    first, second = (c for c in seen.log.calls if c.name == "backward")
    assert (first.scaled, second.scaled) == (True, scaled)
    assert second.value == pytest.approx(penalty.item() * (1.0 if scaled else 512.0), rel=1e-5)


def test_a_clip_says_whether_the_gradients_carry_the_scale() -> None:
    model, optimizer = _pair()
    grad_scaler = scaler()
    norms = []

    def clip(step: int) -> None:
        if step == 1:
            grad_scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))

    with watched() as seen:
        train(model, optimizer, grad_scaler, clip, 3)
    clips = [c for c in seen.log.calls if c.name == "clip"]
    assert [(c.scaled, c.nested, c.note) for c in clips] == [
        (True, False, "0.5"), (False, False, "0.5"), (True, False, "0.5"),
    ]  # fmt: skip
    assert [c.value for c in clips] == norms


def test_backward_of_several_roots_by_keyword() -> None:
    roots = [torch.full((1,), float(n), requires_grad=True) * 1.0 for n in (2, 3)]
    with watched() as seen:
        torch.autograd.backward(tensors=roots, grad_tensors=[torch.ones(1)] * 2)
    assert [c.value for c in seen.log.calls if c.name == "backward"] == [2.0, 3.0]


def test_a_disabled_scaler_leaves_no_trace_but_its_creation() -> None:
    model, optimizer = _pair()
    with watched() as seen:
        train(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), steps=1)
    assert seen.names() == ["scaler_new", "zero_grad", "backward", "optimizer_step"]
    assert [c.enabled for c in seen.log.calls if c.name == "scaler_new"] == [False]


def test_autocast_regions_are_logged_once_a_line_and_followed_in_depth() -> None:
    depths = []
    with watched() as seen:
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.float16):
                depths.append(seen.watch.autocast)
                with torch.autocast("cpu", enabled=False):
                    depths.append(seen.watch.autocast)
                depths.append(seen.watch.autocast)
            depths.append(seen.watch.autocast)
    assert depths == ["fp16", "", "fp16", ""] * 3
    assert [(c.dtype, c.enabled) for c in seen.log.calls] == [("fp16", True), ("", False)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_checkpoint_says_whether_it_holds_the_scaler_and_holds_no_marks(
    keep: bool, tmp_path: Path
) -> None:
    model, optimizer = _pair()
    grad_scaler = scaler()
    with watched() as seen:
        train(model, optimizer, grad_scaler, steps=1)
        state: dict[str, Any] = {"model": model.state_dict()}
        if keep:
            state["amp"] = {"scaler": grad_scaler.state_dict()}
        torch.save(obj=state, f=tmp_path / "checkpoint.pt")
        torch.load(tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt")
    notes = [c.note for c in seen.log.calls if c.name in ("save", "load")]
    assert notes == ["with scaler state" if keep else "without scaler state"] * 2
    assert not any(hasattr(t, "_ampscope_provenance") for t in loaded["model"].values())


def test_a_backward_knows_the_line_that_made_its_loss() -> None:
    model, grad_scaler = small_net(), scaler()
    here = Path(__file__).name
    with watched() as seen:
        x, y = batch(0)
        loss = mse_loss(model(x), y)
        line = sys._getframe().f_lineno - 1
        grad_scaler.scale(loss).backward()
        scaled = grad_scaler.scale(mse_loss(model(x), y))
        scaled.backward()
        (mse_loss(model(x), y) * 4.0).backward()
    made_at = [c.made_at for c in seen.log.calls if c.name == "backward"]
    assert made_at == [f"{here}:{line}", f"{here}:{line + 3}", f"{here}:{line + 5}"]


class _OfPartials(torch.autograd.Function):
    """Its parts have no code of their own."""

    forward = staticmethod(partial(lambda context, x, factor: x * factor, factor=3.0))
    backward = staticmethod(
        partial(lambda context, gradient, factor: gradient * factor, factor=3.0)
    )


def test_a_function_of_partials_runs_under_autocast() -> None:
    x = torch.ones(4, requires_grad=True)
    with watched() as seen, torch.autocast("cpu", torch.float16):
        _OfPartials.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4
    assert not seen.watch.failures.note
