"""What is heard of optimizers and scalers: other threads, loops without backward, failures."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampscope.capture.global_hooks import OPTIMIZER_POST, OPTIMIZER_PRE
from ampscope.capture.training_events import (
    MOST_TAKEN,
    StepEvents,
    StepListener,
    TrainingEvents,
)
from ampscope.patches import Patches
from ampscope.watcher.guard import Guard
from ampscope.watcher.step import OpenStep
from tests.helpers.script_watching import scaler, small_net, train, watched

PATCHED: list[tuple[Any, str]] = [
    *((torch.amp.GradScaler, name) for name in ("scale", "unscale_", "step", "update")),
    (torch.autograd, "backward"), (torch.autograd, "grad"), (Optimizer, "zero_grad"),
]  # fmt: skip


class Heard:
    """A listener of one training that keeps what matters here."""

    def __init__(self) -> None:
        self.scalers: list[Any] = []
        self.skips: list[bool] = []
        self.losses: list[float] = []
        self.taken: list[tuple[int, int]] = []  # how much was scaled, how many gradients
        self.scaled: list[weakref.ref[Tensor]] = []

    def loss_seen(self, loss: Tensor) -> None:
        self.losses.append(float(loss))

    def gradients_taken(self, scaled: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        assert not any(one.requires_grad for one in scaled)
        self.taken.append((len(scaled), len(gradients)))
        self.scaled.append(weakref.ref(scaled[-1]))

    def losses_dropped(self) -> None: ...

    def backward_ended(self) -> None: ...

    def gradients_complete(self, optimizer: Optimizer, scaler: Any) -> None:
        self.scalers.append(scaler)

    def before_step(self, optimizer: Optimizer) -> None: ...

    def after_step(self, optimizer: Optimizer) -> None: ...

    def optimizer_stepped(self, optimizer: Optimizer, *, skipped: bool) -> None:
        self.skips.append(skipped)

    def optimizer_dropped(self, optimizer: Optimizer) -> None: ...


class CallsInside(torch.optim.SGD):
    """Its step calls ``inside`` in a thread of its own, and waits for it."""

    inside: Callable[[], None]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        in_thread(self.inside)


class CallsBefore(torch.amp.GradScaler):
    """Before it steps or skips it calls ``inside`` in a thread of its own, and waits for it."""

    inside: Callable[[], None]

    def _maybe_opt_step(self, *args: Any, **kwargs: Any) -> Any:
        in_thread(self.inside)
        return super()._maybe_opt_step(*args, **kwargs)


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def one_weight(gradient: float) -> nn.Parameter:
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.tensor([gradient])
    return weight


def ready(value: torch.amp.GradScaler) -> torch.amp.GradScaler:
    """With its scale on the device, as after the first ``scale``."""
    value.scale(torch.ones(1))
    return value


def listening(heard: Heard, optimizer: Optimizer) -> TrainingEvents:
    threads = {threading.get_ident()}
    return TrainingEvents(heard, lambda one: one is optimizer, threads, Guard(pytest.fail))


def test_a_skip_is_heard_while_another_thread_is_inside_its_own_scalers_step() -> None:
    ours = torch.optim.SGD([one_weight(float("inf"))], 0.1)
    other, of_other, of_ours = CallsInside([one_weight(1.0)]), ready(scaler()), ready(scaler())
    other.inside = lambda: of_ours.step(ours)
    heard = Heard()
    with listening(heard, ours):
        of_other.step(other)
    assert heard.skips == [True]
    assert heard.scalers == [of_ours]


def test_a_direct_step_has_no_scaler_of_another_thread() -> None:
    ours = torch.optim.SGD([one_weight(1.0)], 0.1)
    other, of_other = CallsInside([one_weight(1.0)]), ready(scaler())
    other.inside = ours.step
    heard = Heard()
    with listening(heard, ours):
        of_other.step(other)
    assert heard.skips == [False]
    assert heard.scalers == [None]


def test_a_skip_stays_one_when_another_thread_steps_meanwhile() -> None:
    ours = torch.optim.SGD([one_weight(float("inf"))], 0.1)
    other = torch.optim.SGD([one_weight(1.0)], 0.1)
    of_ours = ready(CallsBefore("cpu"))
    of_ours.inside = other.step
    heard = Heard()
    with listening(heard, ours):
        of_ours.step(ours)
    assert heard.skips == [True]


class CallsBase(torch.optim.SGD):
    """Its step calls its base class's, or raises in its place."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ValueError("no step")
        return super().step(closure)


class Steps(StepListener):
    """Keeps whose steps begin and end."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []

    def before_step(self, optimizer: Optimizer, scaler: Any, *, has_closure: bool) -> None:
        self.heard.append(("before", id(optimizer)))

    def after_step(self, optimizer: Optimizer, scaler: Any) -> None:
        self.heard.append(("after", id(optimizer)))


def test_a_step_that_calls_its_base_classs_is_one_step() -> None:
    """torch wraps the step of each class of which an optimizer was made."""
    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    base, calling = torch.optim.SGD([weight], 0.1), CallsBase([weight], 0.1)
    steps = Steps()
    with StepEvents(steps):
        for optimizer in (calling, base):
            optimizer.step()
        calling.fails = True
        with pytest.raises(ValueError, match="no step"):
            calling.step()
        calling.fails = False
        calling.step()
    whole = [(when, id(o)) for o in (calling, base) for when in ("before", "after")]
    begun_anew = [("before", id(calling)), ("before", id(calling)), ("after", id(calling))]
    assert steps.heard == [*whole, *begun_anew]


@pytest.mark.parametrize("updates", [True, False])
def test_nothing_is_kept_of_steps_that_took_their_gradients_by_hand(updates: bool) -> None:
    model, heard, loss_scaler = small_net(), Heard(), scaler(1.0)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.01)
    with listening(heard, optimizer) as events:
        for _ in range(300):
            loss = model(torch.ones(2, 4)).square().mean()
            scaled = loss_scaler.scale(loss)
            grads = torch.autograd.grad(scaled, parameters)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            loss_scaler.step(optimizer)
            if updates:
                loss_scaler.update()
            else:
                loss_scaler._per_optimizer_states.clear()
        assert events._scaled == []
        del loss, scaled
        gc.collect()
        assert not any(one() is not None for one in heard.scaled)
    assert heard.taken == [(1, len(parameters))] * 300
    assert heard.skips == [False] * 300


def test_a_loop_without_steps_keeps_the_last_ones() -> None:
    weight, heard, loss_scaler = one_weight(1.0), Heard(), scaler(1.0)
    with listening(heard, torch.optim.SGD([weight], 0.1)) as events:
        for _ in range(300):
            torch.autograd.grad(loss_scaler.scale((weight * 2).sum()), [weight])
        assert len(events._scaled) == MOST_TAKEN
        loss_scaler.update(1.0)
        assert events._scaled == []
    assert max(heard.taken) == (MOST_TAKEN, 1)


def test_gradients_by_hand_without_a_step_are_bounded() -> None:
    step, one = OpenStep(0), torch.ones(1)
    for _ in range(300):
        step.take_gradients([one], [one])
    assert len(step._gradients) < 100


def test_a_loss_scaled_for_the_next_optimizer_outlives_this_ones_step() -> None:
    first, second = one_weight(1.0), one_weight(1.0)
    heard, loss_scaler = Heard(), scaler(8.0)
    optimizer = torch.optim.SGD([first], 0.1)
    with listening(heard, optimizer):
        torch.autograd.grad(loss_scaler.scale((first * 5).sum()), [first])
        waiting = loss_scaler.scale((second * 3).sum())
        loss_scaler.step(optimizer)
        waiting.backward()
    assert heard.losses == [3.0]


@pytest.mark.parametrize("number", range(1, len(PATCHED) + 1))
def test_entering_that_fails_leaves_nothing_behind(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_replace, calls = Patches.replace, []

    def replace(*args: Any) -> None:
        calls.append(args)
        if len(calls) == number:
            raise ZeroDivisionError
        plain_replace(*args)

    def state() -> list[object]:
        hooks = [len(one.subscribers) for one in (OPTIMIZER_PRE, OPTIMIZER_POST)]
        return [*(getattr(owner, name) for owner, name in PATCHED), hooks]

    before = state()
    monkeypatch.setattr(Patches, "replace", replace)
    monkeypatch.setattr(
        "ampscope.capture.training_events.scaler_classes",
        lambda scalers: iter([torch.amp.GradScaler]),
    )
    with pytest.raises(ZeroDivisionError):
        listening(Heard(), torch.optim.SGD([one_weight(1.0)], 0.1)).__enter__()
    assert state() == before


def test_a_replacement_that_cannot_be_made_is_forgotten() -> None:
    class Owner:
        def value(self) -> int:
            return 1

    def fails(original: Any) -> Any:
        raise ZeroDivisionError

    before, patches = Owner.value, Patches()
    with pytest.raises(ZeroDivisionError):
        patches.replace(Owner, "value", fails)
    patches.replace(Owner, "value", lambda original: lambda self: original(self) + 1)
    assert Owner().value() == 2
    patches.undo()
    assert Owner.value is before


def test_a_listener_that_raises_before_a_scalers_step_ends_it_for_those_before_it() -> None:
    told: list[str] = []

    class Tells(StepListener):
        def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
            told.append("begins")

        def after_scaler_step(
            self, optimizer: Any, scaler: Any, *, stepped: bool, raised: bool
        ) -> None:
            told.append(f"ended {stepped} {raised}")

    class Raises(StepListener):
        def before_scaler_step(self, optimizer: Any, scaler: Any) -> None:
            raise ZeroDivisionError

    with StepEvents(Tells(), Raises(), Tells()), pytest.raises(ZeroDivisionError):
        ready(scaler()).step(torch.optim.SGD([one_weight(1.0)], 0.1))
    assert told == ["begins", "ended False True"]


def test_calls_after_a_scalers_step_that_could_not_be_read_are_not_nested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*args: Any) -> None:
        raise ZeroDivisionError

    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with watched() as seen:
        monkeypatch.setattr(type(seen.steps), "before_scaler_step", fails)
        train(model, optimizer, scaler(), steps=1)  # goes on
        optimizer.zero_grad()
    assert "ZeroDivisionError" in seen.steps.failures.note
    assert [step.skipped for step in seen.steps.records] == [False]
    assert [(c.name, c.nested) for c in seen.log.calls][-1] == ("zero_grad", False)
