"""Clipping by hand is told from everything else that a loop does to scaled gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.hand_clips import hand_clips
from ampscope.analysis.run_view import RunView
from ampscope.observations import GradientChange
from ampscope.rules.clip_before_unscale import check
from ampscope.rules.verdict import Status
from tests.helpers import gradient_edits
from tests.helpers.gradient_edits import (
    CLIPS,
    INNOCENT,
    Change,
    clamp,
    clip_by_largest,
    clip_data,
    clip_each,
    clip_foreach,
    clip_in_place,
    norm_of,
)
from tests.helpers.script_watching import scaler, small_net, train, watched

SCALE = 2.0**16


def _watched_training(change: Change, *, grows: bool = False, by_user: bool = False) -> RunView:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    own = scaler(SCALE, growth_interval=2 if grows else 2000)

    def between(step: int) -> None:
        if by_user:
            own.unscale_(optimizer)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        change(gradients, own.get_scale())

    with watched() as seen:
        train(model, optimizer, own, between, 6)
    records = [
        *seen.log.calls,
        *seen.steps.records,
        *seen.steps.changes.records,
    ]
    return RunView("as_is", "r1", records)


@pytest.mark.parametrize("change", CLIPS)
@pytest.mark.parametrize("grows", [False, True])
def test_a_clip_by_hand_is_found(change: Change, grows: bool) -> None:
    run = _watched_training(change, grows=grows)
    (clip,) = hand_clips(run.gradient_changes)
    limits = {clip_in_place: 1.0, clip_data: 0.5, clip_foreach: 5.0, clip_each: 2.0,
              clamp: 0.1, clip_by_largest: 3.0}  # fmt: skip
    assert clip.limit == pytest.approx(limits[change], rel=1e-4)
    verdict = check(Evidence({"as_is": run}, "native"))
    assert verdict.status is Status.FOUND
    assert verdict.fix.kind == "move_unscale"


@pytest.mark.parametrize("change", INNOCENT)
@pytest.mark.parametrize("grows", [False, True])
def test_what_else_is_done_to_gradients_is_no_clip(change: Change, grows: bool) -> None:
    run = _watched_training(change, grows=grows)
    assert hand_clips(run.gradient_changes) == []
    assert check(Evidence({"as_is": run}, "native")).status is Status.PASSED


@pytest.mark.parametrize("change", CLIPS)
def test_a_clip_after_unscale_is_right_and_leaves_no_record(change: Change) -> None:
    assert _watched_training(change, by_user=True).gradient_changes == []


def test_the_record_against_arithmetic_done_apart() -> None:
    norms: list[tuple[float, float]] = []

    def both(gradients: list[Tensor], scale: float) -> None:
        before = torch.cat([g.flatten() for g in gradients]).double().norm().item()
        clip_in_place(gradients, scale)
        norms.append((before, torch.cat([g.flatten() for g in gradients]).double().norm().item()))

    run = _watched_training(both)
    assert [(c.step, c.kind, c.changed) for c in run.gradient_changes] == [
        (n, "factor", 4) for n in range(6)
    ]
    for change, (before, after) in zip(run.gradient_changes, norms, strict=True):
        assert change.norm_before == pytest.approx(before, rel=1e-9)
        assert change.norm_after == pytest.approx(after, rel=1e-9)
        assert change.scale == SCALE


def test_the_line_is_the_one_that_wrote_the_gradient() -> None:
    run = _watched_training(clip_in_place)
    source = Path(gradient_edits.__file__)
    lines = source.read_text().splitlines()
    number = next(n for n, text in enumerate(lines, 1) if text.endswith("# the clip"))
    assert {c.line for c in run.gradient_changes} == {f"{source.name}:{number}"}


def test_a_replaced_gradient_counts_as_changed() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)

    def replace(step: int) -> None:
        parameters = list(model.parameters())
        factor = 1.0 / float(norm_of([p.grad for p in parameters if p.grad is not None]))
        for p in parameters:
            p.grad = None if p.grad is None else p.grad * factor

    with watched() as seen:
        train(model, optimizer, scaler(SCALE), replace, 4)
    (clip,) = hand_clips(seen.steps.changes.records)
    assert (clip.bounds, clip.limit) == ("norm", pytest.approx(1.0, rel=1e-4))
    assert all(c.line for c in clip.changes)


def test_accumulation_is_no_change() -> None:
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    own = scaler(SCALE)
    with watched() as seen:
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(3):
                own.scale(model(torch.randn(8, 4)).pow(2).mean() / 3).backward()
            own.step(optimizer)
            own.update()
    assert seen.steps.changes.records == []


def test_two_optimizers_are_judged_apart() -> None:
    models = [small_net(0), small_net(1)]
    optimizers = [torch.optim.SGD(m.parameters(), 1e-5) for m in models]
    own = scaler(SCALE)
    with watched() as seen:
        for step in range(5):
            for n in range(2):
                optimizers[n].zero_grad()
                x = torch.randn(8, 4) * (1 + step)
                own.scale(models[n](x).pow(2).mean()).backward()
                if n:
                    clamp([p.grad for p in models[1].parameters() if p.grad is not None], SCALE)
                own.step(optimizers[n])
            own.update()
    assert {c.optimizer for c in seen.steps.changes.records} == {"optimizer1"}
    assert [c.optimizer for c in hand_clips(seen.steps.changes.records)] == ["optimizer1"]


def _change(step: int, **facts: object) -> GradientChange:
    made: dict[str, object] = {
        "step": step, "optimizer": "optimizer0", "scale": SCALE, "kind": "factor",
        "changed": 4, "norm_before": 1000.0 + 100 * step, "norm_after": 1.0, "max_after": 0.5,
        "each_norm": None,
    }  # fmt: skip
    return GradientChange(**(made | facts))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ([{}] * 3, True),
        ([{}] * 2, False),  # two equal norms can be chance
        ([{"norm_before": 1000.0}] * 4, False),  # a constant factor would look the same
        ([{"norm_after": 1.0 + n / 100, "max_after": 1 + n} for n in range(4)], False),
        ([{}, {}, {"kind": "other"}], False),
        ([{"norm_after": 2000.0}] * 4, False),  # it grew
        ([{"norm_after": SCALE / 2.0, "norm_before": 1e9 + n * 1e8, "max_after": 1 + n}
          for n in range(4)], False),
        ([{"scale": SCALE * 2**n} for n in range(4)], True),
        ([{"scale": SCALE * 2**n, "norm_after": 2.0**n, "max_after": 2.0**n} for n in range(4)],
         False),
        ([{"norm_after": float("nan"), "max_after": float("nan")}] * 4, False),
    ],
)  # fmt: skip
def test_when_a_limit_is_a_limit(facts: list[dict[str, object]], found: bool) -> None:
    changes = [_change(n, **own) for n, own in enumerate(facts)]
    assert bool(hand_clips(changes)) is found


def test_the_gradients_are_not_touched() -> None:
    trained = []
    for watching in (False, True):
        model: nn.Module = small_net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def between(step: int, model: nn.Module = model) -> None:
            clamp([p.grad for p in model.parameters() if p.grad is not None], SCALE)

        if watching:
            with watched():
                train(model, optimizer, scaler(SCALE), between)
        else:
            train(model, optimizer, scaler(SCALE), between)
        trained.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
