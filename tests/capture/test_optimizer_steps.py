"""Records of optimizer steps, against NumPy's arithmetic on the same gradients and weights."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from ampscope.capture.script import optimizer_steps
from ampscope.capture.script.optimizer_facts import WrittenState, lr_of
from ampscope.store.codec import decode_observation, encode_observation
from tests.helpers.script_watching import batch, scaler, small_net, train, watched


def _flat(model: nn.Module, *, gradients: bool = False) -> np.ndarray:
    tensors = [p.grad if gradients else p.detach() for p in model.parameters()]
    return np.concatenate([t.double().flatten().numpy() for t in tensors if t is not None])


def test_a_taken_step_against_numpy() -> None:
    model, lr = small_net(), 0.5
    x, y = batch(0)
    loss = mse_loss(model(x), y)
    loss.backward()
    gradient, before = _flat(model, gradients=True), _flat(model)
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with watched() as seen:
        train(model, optimizer, scaler(), steps=1)
    (step,) = seen.steps.records
    after = _flat(model)
    assert (step.scaler, step.skipped, step.scale) == ("scaler0", False, 1024.0)
    assert step.loss == pytest.approx(loss.item(), rel=1e-6)
    assert step.grad_norm == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    assert step.grad_max == pytest.approx(np.abs(gradient).max(), rel=1e-5)
    assert step.grad_total == gradient.size
    assert step.grad_zero == int((gradient == 0).sum())
    assert step.moved_share == float((after != before).mean())
    assert step.update_norm == pytest.approx(np.linalg.norm(after - before), rel=1e-6)
    assert step.update_norm == pytest.approx(lr * np.linalg.norm(gradient), rel=1e-4)
    assert (step.lr, step.backwards) == (lr, 1)
    assert step.expected_change == pytest.approx(gradient @ (after - before), rel=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_sparse_gradient_counts_as_the_dense_one(sparse: bool) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(20, 3, sparse=sparse)
    optimizer = torch.optim.SGD(table.parameters(), 0.5)
    rows, before = torch.tensor([3, 3, 7]), table.weight.detach().clone()
    with watched() as seen:
        table(rows).square().sum().backward()
        optimizer.step()
    way = (table.weight.detach() - before).double()
    (step,) = seen.steps.records
    assert step.grad_norm == pytest.approx(float(way.norm()) / 0.5, rel=1e-6)
    assert step.expected_change == pytest.approx(-float(way.square().sum()) / 0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_share_of_second_moments_that_fell(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((64,), 0.5, dtype=dtype))
    optimizer = torch.optim.Adam([weight], lr=1e-3, eps=1e-3, foreach=False)
    expected, before = [], torch.zeros(64, dtype=dtype)
    with watched() as seen:
        for step in range(12):
            weight.grad = (torch.randn(64) / (1 + step)).to(dtype)
            optimizer.step()
            now = optimizer.state[weight]["exp_avg_sq"].clone()
            expected.append(float((now < before).sum() / 64))
            before = now
    shares = [a.state_fell_share for a in seen.steps.records]
    if dtype is torch.float32:  # it always can
        assert shares == [None] * 12
        return
    assert shares == [None, *expected[1:]]
    # v * 0.999 rounds back to v in bf16, whose numbers are 2^-8 v apart or more; not in fp16.
    assert any(shares[1:]) is (dtype is torch.float16)


class StochasticRmsprop(torch.optim.Optimizer):
    """Second moments in bf16, rounded up or down by chance so that the mean is exact."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"betas": (0.9, 0.999)})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            old = state.setdefault("exp_avg_sq", torch.zeros_like(weight, dtype=torch.bfloat16))
            exact = old.float() * 0.999 + 0.001 * weight.grad.float() ** 2
            bits = exact.view(torch.int32) + torch.randint(
                0, 1 << 16, exact.shape, dtype=torch.int32
            )
            old.copy_(bits.bitwise_and(-65536).view(torch.float32))


@pytest.mark.parametrize(
    ("dtype", "beta", "is_lost"),
    [
        (torch.bfloat16, 0.999, True),
        (torch.bfloat16, 0.9981, True),  # 0.0019 is less than 2^-9
        (torch.bfloat16, 0.99, False),
        (torch.float16, 0.999, False),
        (torch.float16, 0.9998, True),  # 0.0002 is less than 2^-12
    ],
)
def test_the_decay_that_rounding_takes_from_second_moments(
    dtype: torch.dtype, beta: float, is_lost: bool
) -> None:
    """Against NumPy: the formula in doubles, in units of the spacing at the old value."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.full((64,), 0.5, dtype=dtype))
    optimizer = torch.optim.Adam([weight], lr=1e-3, betas=(0.9, beta), eps=1e-3, foreach=False)
    due, done = [], []
    old = np.zeros(64)
    with watched() as seen:
        for step in range(12):
            weight.grad = (torch.randn(64) * (4 if step < 6 else 0.5)).to(dtype)
            optimizer.step()
            now = optimizer.state[weight]["exp_avg_sq"].double().numpy().copy()
            fall = old - (beta * old + (1 - beta) * weight.grad.double().numpy() ** 2)
            falls = (fall > 0) & (old > 0)
            bits = 7 if dtype is torch.bfloat16 else 10
            lowest = -126 if dtype is torch.bfloat16 else -14
            size = np.floor(np.log2(old, out=np.full(64, -200.0), where=old > 0))
            spacing = 2.0 ** (np.maximum(size, lowest) - bits)
            due.append(float((fall / spacing)[falls].sum()))
            done.append(float(((old - now) / spacing)[falls].sum()))
            old = now
    records = seen.steps.records
    assert [a.state_decay for a in records] == [beta] * 12
    assert [a.state_fall_due for a in records[1:]] == pytest.approx(due[1:])
    assert [a.state_fall_done for a in records[1:]] == pytest.approx(done[1:])
    assert sum(due) > 8
    assert (sum(done) < 0.5 * sum(due)) is is_lost


def test_stochastic_rounding_keeps_the_decay() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(64))
    optimizer = StochasticRmsprop([weight])
    with watched() as seen:
        for step in range(60):
            weight.grad = torch.randn(64) * (4 if step < 6 else 0.1)
            optimizer.step()
    records = seen.steps.records[1:]
    due = sum(a.state_fall_due or 0.0 for a in records)
    assert sum(a.state_fall_done or 0.0 for a in records) == pytest.approx(due, rel=0.25)


def test_the_norm_is_unscaled_whoever_unscaled_it() -> None:
    norms = []
    for by_user in (False, True):
        model = small_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        own = scaler(2.0**14)
        with watched() as seen:
            train(model, optimizer, own, lambda step, f=by_user, s=own, o=optimizer:
                  s.unscale_(o) if f else None, 2)  # fmt: skip
        norms.append([a.grad_norm for a in seen.steps.records])
        assert [a.unscaled_before for a in seen.steps.records] == [by_user] * 2
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_leaves_out_is_skipped_and_moves_nothing(fused: bool) -> None:
    """A fused optimizer's step is called all the same and leaves itself out."""
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), 0.1, fused=fused)
    overflowed, weights = [], []

    def look(step: int) -> None:
        overflowed.append(not np.isfinite(_flat(model, gradients=True)).all())
        weights.append(_flat(model))

    with watched() as seen:
        train(model, optimizer, scaler(3e38), look, 8)
    weights.append(_flat(model))
    assert set(overflowed) == {True, False}
    still = [np.array_equal(a, b) for a, b in itertools.pairwise(weights)]
    steps = seen.steps.records
    assert [a.skipped for a in steps] == overflowed == still
    assert [a.moved_share == 0.0 for a in steps] == overflowed
    scales = [a.scale for a in steps]
    for now, after, bad in zip(scales, scales[1:], overflowed, strict=False):
        assert after == (now / 2 if bad else now)


@pytest.mark.parametrize("parts", [1, 2])
def test_both_norms_of_a_script_that_clips(parts: int) -> None:
    """Before its clip and after it; at steps at which the clip changed nothing, only one."""
    model = small_net()
    optimizer, grad_scaler = torch.optim.SGD(model.parameters(), 0.01), scaler()
    norms: list[float] = []

    def clip(step: int) -> None:
        grad_scaler.unscale_(optimizer)
        parameters = list(model.parameters())
        squares = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None)
        norms.append(math.sqrt(squares))
        limit = 1e6 if step == 2 else 0.01
        for part in range(parts):
            nn.utils.clip_grad_norm_(parameters[part::parts], limit)

    with watched() as seen:
        train(model, optimizer, grad_scaler, clip, steps=3)
    first, second, third = seen.steps.records
    for record, norm in ((first, norms[0]), (second, norms[1])):
        assert record.unclipped_norm == pytest.approx(norm, rel=1e-5)
        assert record.grad_norm == pytest.approx(0.01 * math.sqrt(parts), rel=1e-3)
    assert (third.unclipped_norm, third.grad_norm) == (None, pytest.approx(norms[2], rel=1e-5))


def test_a_clip_of_some_gradients_is_not_the_norm_of_all() -> None:
    model = small_net()
    optimizer, grad_scaler = torch.optim.SGD(model.parameters(), 0.01), scaler()

    def clip(step: int) -> None:
        grad_scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)

    with watched() as seen:
        train(model, optimizer, grad_scaler, clip, steps=1)
    assert seen.steps.records[0].unclipped_norm is None


def test_a_step_that_the_script_calls_itself_has_no_scaler() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched() as seen:
        for step in range(2):
            for _ in range(3):
                mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
    steps = seen.steps.records
    assert [(a.scaler, a.scale, a.backwards, a.step) for a in steps] == [
        ("", 1.0, 3, 0), ("", 1.0, 3, 1),
    ]  # fmt: skip
    assert "optimizer_step" in seen.names()


def test_lbfgs_whose_step_runs_the_closure_itself() -> None:
    model = small_net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    calls = 0

    def closure() -> torch.Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = mse_loss(model(batch(0)[0]), batch(0)[1])
        loss.backward()
        return loss

    with watched() as seen:
        optimizer.step(closure)
    (step,) = seen.steps.records
    assert step.backwards == calls > 1
    assert step.grad_norm == pytest.approx(np.linalg.norm(_flat(model, gradients=True)))


def test_every_parameters_gradient_is_kept_for_the_first_steps_and_for_bad_ones() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def poison(step: int) -> None:
        if step == 5:
            model[2].bias.grad.fill_(math.nan)

    with watched() as seen:
        train(model, optimizer, scaler(), poison, 7)
    parameters = len(list(model.parameters()))
    kept = [g.step for g in seen.steps.gradients.records]
    assert kept == [n for n in (0, 1, 2, 3, 5) for _ in range(parameters)]
    bad = [g for g in seen.steps.gradients.records if g.nonfinite]
    assert [(g.step, g.order, g.nonfinite) for g in bad] == [(5, 3, 1)]
    assert [a.step for a in seen.steps.records if a.skipped] == [5]


def test_half_state_and_its_dead_second_moments() -> None:
    """fp16 squares of gradients below 2^-12.5 are zero while the gradients are not."""
    weight = nn.Parameter(torch.ones(4, dtype=torch.float16))
    optimizer = torch.optim.Adam([weight], 1e-3, eps=1e-4)
    gradient = torch.tensor([1e-4, 2e-5, 0.5, 0.25], dtype=torch.float16)
    with watched() as seen:
        weight.grad = gradient
        optimizer.step()
    (step,) = seen.steps.records
    second = (np.float16(0.001) * gradient.numpy() * gradient.numpy()).astype(np.float16)
    assert step.state_zero_share == float((second == 0).mean())
    assert (step.weight_dtypes, step.state_dtypes) == ("fp16", "fp16")
    assert step.eps == 1e-4


def test_too_many_weights_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "MAX_NUMEL", 10)
    model = small_net()
    with watched() as seen:
        train(model, torch.optim.SGD(model.parameters(), 0.1), scaler(), steps=1)
    (step,) = seen.steps.records
    assert (step.moved_share, step.update_norm) == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_that_the_script_rounds_between_steps(dtype: torch.dtype) -> None:
    model = small_net()

    def rounded() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))

    optimizer, starts = torch.optim.SGD(model.parameters(), 1e-3), []
    with watched() as seen:
        for _ in range(3):
            rounded()
            starts.append(_flat(model))
            train(model, optimizer, scaler(), steps=1)
    records = seen.steps.records
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    assert [a.held_in for a in records] == [name] * 3
    assert records[0].moved_since is None
    for n in (1, 2):
        assert records[n].moved_since == float((starts[n] != starts[n - 1]).mean())
        assert records[n].moved_since < records[n - 1].moved_share


def test_weights_that_nothing_rounds_stay_where_a_step_left_them() -> None:
    model = small_net()
    with watched() as seen:
        train(model, torch.optim.SGD(model.parameters(), 0.1), scaler(), steps=3)
    assert [a.held_in for a in seen.steps.records] == [""] * 3
    moved = [a.moved_share for a in seen.steps.records[:-1]]
    assert [a.moved_since for a in seen.steps.records[1:]] == pytest.approx(moved, abs=0.05)


def test_a_clone_of_the_training_sees_the_same_steps() -> None:
    """Nothing of one watch leaks into the next."""
    model = small_net()
    seen_twice = []
    for own in (model, copy.deepcopy(model)):
        with watched() as seen:
            train(own, torch.optim.Adam(own.parameters(), 0.01), scaler(), steps=3)
        seen_twice.append([replace(r, ended_at=None) for r in seen.steps.records])
    assert seen_twice[0] == seen_twice[1]


def test_options_that_are_no_single_number_are_not_recorded() -> None:
    """Adafactor has two eps; that of Transformers has no learning rate where it chooses its own."""
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), torch.tensor(0.01))
    optimizer.param_groups[0]["eps"] = (None, 1e-3)
    with watched() as seen:
        train(model, optimizer, scaler(), steps=1)
    (step,) = seen.steps.records
    assert decode_observation(*encode_observation(step)) == step
    assert (step.lr, step.eps) == (pytest.approx(0.01), None)
    optimizer.param_groups[0]["lr"] = None
    assert math.isnan(lr_of(optimizer))


class _Outer(torch.optim.Optimizer):
    """Steps another optimizer and then halves the weights, or raises."""

    def __init__(self, base: torch.optim.Optimizer, *, fails: bool = False) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.fails = base, fails

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        self.base.step()
        if self.fails:
            raise RuntimeError("no step")
        for group in self.param_groups:
            torch._foreach_mul_(group["params"], 0.5)


def _train_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    mse_loss(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()


def test_a_step_inside_another_leaves_the_outer_ones_weights() -> None:
    model = small_net()
    before, optimizer = _flat(model), _Outer(torch.optim.SGD(model.parameters(), 0.1))
    with watched() as seen:
        _train_by_hand(model, optimizer)
    inner, outer = seen.steps.records
    after = _flat(model)
    assert (inner.optimizer, outer.optimizer) == ("optimizer1", "optimizer0")
    assert inner.update_norm == pytest.approx(np.linalg.norm(2 * after - before), rel=1e-5)
    assert outer.update_norm == pytest.approx(np.linalg.norm(after - before), rel=1e-6)


def test_copies_of_a_step_that_raised_are_freed() -> None:
    """At the next backward, but not at one inside a step."""

    def copies() -> int:
        gc.collect()
        tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor)
        return sum(x.shape == (37, 4) for x in tensors)

    model = nn.Sequential(nn.Linear(4, 37), nn.Linear(37, 1))
    optimizer = _Outer(torch.optim.SGD(model.parameters(), 0.1), fails=True)
    with watched() as seen:
        with pytest.raises(RuntimeError, match="no step"):
            _train_by_hand(model, optimizer)
        model.zero_grad()
        assert copies() == 1
        model(batch(0)[0]).sum().backward()
        model.zero_grad()
        assert copies() == 0

        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            loss = mse_loss(model(batch(0)[0]), batch(0)[1])
            loss.backward()
            return loss

        lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=4)
        lbfgs.step(closure)
    assert seen.steps.records[-1].moved_share == 1.0


class _SameParameters(torch.optim.SGD):
    """As Lightning's optimizer: another object, by the tables of the one that it stands for."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = dict(optimizer.__dict__)


def _emptied(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


@pytest.mark.parametrize(
    ("clear", "kept"),
    [
        (lambda own, model: None, 5),
        (lambda own, model: own.zero_grad(), 0),
        (lambda own, model: own.zero_grad(set_to_none=False), 0),
        (lambda own, model: model.zero_grad(), 0),
        (lambda own, model: _SameParameters(own).zero_grad(), 0),
        (lambda own, model: _emptied(own), 0),
    ],
)
@pytest.mark.parametrize("another_between", [False, True])
def test_what_a_skipped_step_left_is_kept_where_the_gradient_itself_says_so(
    clear: Callable[..., None], kept: int, another_between: bool
) -> None:
    """Six steps of infinite gradients: whether five of them began with those of the one before."""
    model, other = small_net(), small_net(1)
    first = torch.optim.SGD(model.parameters(), 0.1)
    second = torch.optim.SGD(other.parameters(), 0.1)
    own = scaler()
    with watched() as seen:
        for step in range(6):
            x, y = batch(step)
            if another_between:  # before the first one's gradients are cleared
                second.zero_grad()
                own.scale(mse_loss(other(x), y)).backward()
                own.step(second)
            clear(first, model)
            (own.scale(mse_loss(model(x), y)) * torch.inf).backward()
            own.step(first)
            own.update()
    steps = [a for a in seen.steps.records if a.skipped]
    assert len(steps) == 6
    assert sum(a.kept_nonfinite for a in steps) == kept


@pytest.mark.parametrize(("clears", "kept"), [(False, 3), (True, 0)])
def test_a_backward_pass_that_adds_to_gradients_that_are_not_finite_is_logged(
    clears: bool, kept: int
) -> None:
    """Without a scaler: four batches of which the first overflows."""
    model = small_net()
    with watched() as seen:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            x, y = batch(step)
            if clears:
                optimizer.zero_grad()
            (mse_loss(model(x), y) * (torch.inf if step == 0 else 1.0)).backward()
            if all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
                optimizer.step()
    assert sum(c.name == "kept" for c in seen.log.calls) == kept


def test_gradients_that_are_set_anew_each_time_keep_nothing() -> None:
    model = small_net()
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), scaler()
    with watched() as seen:
        for step in range(6):
            x, y = batch(step)
            loss = own.scale(mse_loss(model(x), y)) * torch.inf
            found = torch.autograd.grad(loss, list(model.parameters()))
            for p, g in zip(model.parameters(), found, strict=True):
                p.grad = g
            own.step(optimizer)
            own.update()
    assert [a.skipped for a in seen.steps.records] == [True] * 6
    assert not any(a.kept_nonfinite for a in seen.steps.records)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("how", ["load", "in place"])
def test_a_state_that_came_back_through_half(dtype: torch.dtype, how: str) -> None:
    """Against NumPy: which second moments of the state itself fp16 makes zero. Steps before and
    after, which find the state as the last one left it, look at nothing."""
    model = small_net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x, y = batch(0)

    def step() -> None:
        optimizer.zero_grad()
        (mse_loss(model(x), y) * 1e-3).backward()
        optimizer.step()

    with watched() as seen:
        step()
        step()
        moments = [(s["exp_avg"], s["exp_avg_sq"]) for s in optimizer.state.values()]
        first = np.concatenate([m.numpy().ravel() for m, _ in moments])
        second = np.concatenate([v.numpy().ravel() for _, v in moments])
        if how == "load":
            stored = copy.deepcopy(optimizer.state_dict())
            for held in stored["state"].values():
                held |= {k: v.to(dtype) for k, v in held.items() if v.dim()}
            optimizer.load_state_dict(stored)
        else:
            for pair in moments:
                for moment in pair:
                    moment.copy_(moment.to(dtype))
        step()
        step()
    records = seen.steps.records
    assert [a.written_zero_share is None for a in records] == [True, True, False, True]
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: ""}[dtype]
    assert records[2].written_in == name
    if dtype is torch.float16:
        first, second = first.astype(np.float16), second.astype(np.float16)
        lost = ((second == 0) & (first != 0)).sum() / (first != 0).sum()
        assert records[2].written_zero_share == pytest.approx(lost)
        assert lost > 0.5
    else:
        assert records[2].written_zero_share == 0


def test_rmsprop_that_begins_from_zeros_has_lost_nothing() -> None:
    """A state that was made before the first step is no half one."""
    model = small_net()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-4)
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.zeros(()), "square_avg": torch.zeros_like(p)}
    with watched() as seen:
        train(model, optimizer, scaler(), steps=2)
    assert [a.written_in for a in seen.steps.records] == ["", ""]


def test_a_state_of_inference_tensors_has_no_version_and_no_failure() -> None:
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    with torch.inference_mode():
        optimizer.state[weight]["momentum_buffer"] = torch.linspace(0.1, 0.9, 64).half().float()
    states = WrittenState()
    assert states.before_step(optimizer, "optimizer0")["written_in"] == "fp16"
    states.after_step(optimizer, "optimizer0")
    assert states.before_step(optimizer, "optimizer0") == {}
