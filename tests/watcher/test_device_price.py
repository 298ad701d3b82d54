"""What a watched step adds on a CUDA device, counted on a fake one: launches, copies and waits."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.analysis.ranks import SHARED
from ampscope.capture import exponent_count, weights
from ampscope.capture.exponent_count import DeviceCounter
from ampscope.capture.tensors import in_backward
from ampscope.records import Role
from ampscope.telemetry.sampler_process import Readings
from ampscope.watcher import flight, session
from ampscope.watcher.alarms import AmpscopeWarning
from ampscope.watcher.bad_steps import BadSteps
from ampscope.watcher.buffer_copies import CalledModule
from ampscope.watcher.capsule import load
from ampscope.watcher.gradient_norms import start_norms
from ampscope.watcher.guard import Guard
from ampscope.watcher.histograms import StepHistograms
from ampscope.watcher.models import WatchedModels
from ampscope.watcher.step import PendingFlag, StepNumbers
from tests.helpers import counted_device
from tests.helpers.counted_device import CUDA, HOST, PEAK, CountedDevice, Counts, net, steps
from tests.helpers.watched import recorded

MOST_LAUNCHES = 3
STEPS = 8


def added(model: Callable[[], nn.Module], store: Path, **kinds: Any) -> list[Counts]:
    """What each step has beyond that of the bare training, from the fourth on."""
    bare = steps(model(), None, **kinds)

    def watch(*args: object) -> object:
        return ampscope.watch(*(a for a in args if a is not None), store=store, every=0)

    seen = steps(model(), watch, **kinds)
    for one, other in zip(bare, seen, strict=True):
        assert not one[0] - other[0]  # the training itself launches what it launched without
    return [
        (more[0] - less[0], more[1] - less[1], more[2] - less[2])
        for less, more in list(zip(bare, seen, strict=True))[3:]
    ]


@pytest.mark.parametrize(
    ("optimizer", "clipped"), [("AdamW", False), ("SGD", True)], ids=["AdamW", "SGD, clipped"]
)
def test_a_quiet_step_waits_for_nothing(tmp_path: Path, optimizer: str, clipped: bool) -> None:
    """The copies of BatchNorm's buffers, the norms of all gradients and of some weights, and one
    tensor of all numbers."""
    path = tmp_path / "runs.db"
    for launches, waits, copies in added(net, path, optimizer=optimizer, clipped=clipped):
        assert launches.total() <= MOST_LAUNCHES, launches
        assert not waits
        assert copies == 1


def test_a_model_without_buffers_launches_two(tmp_path: Path) -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    for launches, waits, copies in added(plain, tmp_path / "runs.db"):
        assert launches == {"aten._foreach_norm": 1, "aten.stack": 1}
        assert not waits
        assert copies == 1


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clipped", [False, True])
def test_with_a_scaler_the_host_waits_no_more_than_without_watch(
    tmp_path: Path, fused: bool, clipped: bool
) -> None:
    """GradScaler waits inside its step, and not at all for a fused optimizer. Where the script
    itself unscales, as for a clip, the numbers are needed before; norms, loss, scale and growth
    counter then arrive together."""
    kinds = {"scaled": True, "fused": fused, "clipped": clipped}
    for launches, waits, copies in added(net, tmp_path / "runs.db", **kinds):
        assert launches.total() <= MOST_LAUNCHES, launches
        assert waits == ({"event": 1} if clipped and not fused else {})
        assert copies == 2 + fused  # the growth counter is an integer; what the optimizer found


def test_a_step_that_is_recorded_into_a_cuda_graph_is_left_alone(tmp_path: Path) -> None:
    """Nothing is launched into the graph and nothing waits, which would end its capture, also not
    for the step before. Every other step is recorded, and one note says what is not."""
    path, captured = tmp_path / "runs.db", (3, 4, 6)
    ids: list[str] = []

    def watch(model: nn.Module, own: torch.optim.Optimizer, scaler: object) -> ampscope.Watch:
        run = ampscope.watch(model, own, store=path, every=1, guard=True)
        ids.append(run.id)
        return run

    bare = steps(net(), None, captured=captured)
    with pytest.warns(AmpscopeWarning, match="CUDA graph"):
        seen = steps(net(), watch, captured=captured)
    for step in captured:
        assert seen[step] == bare[step]
    assert seen[5] != bare[5]
    found = recorded(path, ids[0])
    assert len(found.steps) == STEPS - len(captured)
    notes = [e.text for e in found.of("note") if e.name in ("cannot be seen", "stopped watching")]
    assert len(notes) == 1
    assert "CUDA graph" in notes[0]


@pytest.mark.parametrize("scaled", [False, True])
def test_statistics_of_the_allocator_are_read_ten_times_a_second(
    tmp_path: Path, scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take as long as several launches: the peak and what may be held come from one look."""
    now = [0.0]

    def watch(*args: object) -> ampscope.Watch:
        path = tmp_path / "runs.db"
        return ampscope.watch(*(a for a in args if a is not None), store=path, every=0)

    monkeypatch.setattr(flight, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    asked: list[int] = []
    steps(net(), watch, scaled=scaled, asked=asked)
    assert asked == [1] + [0] * (STEPS - 1)
    now[0], asked = 1.0, []
    steps(net(), watch, scaled=scaled, asked=asked, each=lambda: now.insert(0, now[0] + 0.11))
    assert asked == [1] * STEPS


def test_a_model_that_moves_after_watch_is_recorded_where_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``watch(model)`` before ``model.cuda()``: device, autocast rules, peak memory and readings
    of the machine are those of the first step."""
    path, ids, sampled = tmp_path / "runs.db", list[str](), list[torch.device]()

    def sample(store: Path, run: str, device: torch.device, *, as_child: bool) -> Readings:
        sampled.append(device)
        return Readings()

    def watch(model: nn.Module, own: object, scaler: object) -> ampscope.Watch:
        run = ampscope.watch(model, own, store=path)
        ids.append(run.id)
        return run

    monkeypatch.setattr(session, "sample_telemetry", sample)
    for fake, device in ((True, CUDA), (False, HOST)):
        steps(net(), watch, fake=fake)
        found = recorded(path, ids[-1])
        assert found.info.machine is not None
        assert found.info.machine.device == str(device)
        assert found.info.machine.policy == ("cuda" if fake else "native")
        assert {step.peak_bytes == PEAK for step in found.steps} == {fake}
    assert sampled == [CUDA]


def test_a_second_gpu_is_read_by_the_sampler_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that moves between GPUs before its first step: one sampler, which is stopped once."""
    started, more = list[Readings](), list[tuple[Readings, torch.device]]()

    def sample(store: Path, run: str, device: torch.device, *, as_child: bool) -> Readings:
        started.append(Readings())
        return started[-1]

    monkeypatch.setattr(session, "sample_telemetry", sample)
    monkeypatch.setattr(session, "read_too", lambda *args: more.append(args), raising=False)
    with ampscope.watch(nn.Linear(2, 2), store=tmp_path / "runs.db") as run:
        for number in range(2):
            run._session._device = torch.device("cuda", number)
            run._session._sample()
        assert run._session.recorder.readings is started[0]
    assert len(started) == 1
    assert more == [(started[0], torch.device("cuda", 1))]


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("kinds", [{}, {"scaled": True, "clipped": True}, {"scaled": True}])
def test_a_wait_for_the_device_is_time_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, Any], every: int
) -> None:
    """Where the device is behind the host, numbers are waited for: the device computes the
    training's own step meanwhile. On this clock nothing takes time but the training, 10 s a step,
    and each wait, 1 s."""
    now, path, ids = [0.0], tmp_path / "runs.db", list[str]()

    def watch(*args: object) -> ampscope.Watch:
        run = ampscope.watch(*(a for a in args if a is not None), store=path, every=every)
        ids.append(run.id)
        return run

    def pass_(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(counted_device._Event, "synchronize", lambda event: pass_(1.0))
    steps(net(), watch, each=lambda: pass_(10.0), **kinds)
    found = recorded(path, ids[0]).steps
    assert [step.overhead_s for step in found] == [0.0] * STEPS
    assert all(step.step_time_s >= 10.0 for step in found)
    assert sum(step.step_time_s for step in found) > 10.0 * STEPS


def test_time_that_histograms_take_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On this clock nothing takes time but the training, 10 s a step, and counting its gradients,
    1 s."""
    now, path, ids, count = [0.0], tmp_path / "runs.db", list[str](), weights.count_gradients

    def watch(*args: object) -> ampscope.Watch:
        run = ampscope.watch(*(a for a in args if a is not None), store=path, every=1)
        ids.append(run.id)
        return run

    def pass_(seconds: float) -> None:
        now[0] += seconds

    def counted(*args: Any) -> None:
        pass_(1.0)
        count(*args)

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(weights, "count_gradients", counted)
    steps(net(), watch, each=lambda: pass_(10.0))
    found = recorded(path, ids[0]).steps
    assert {(step.step_time_s, step.overhead_s) for step in found} == {(10.0, 1.0)}


@pytest.mark.parametrize("scaled", [False, True])
def test_a_learning_rate_on_the_device_is_not_waited_for(tmp_path: Path, scaled: bool) -> None:
    """That of a capturable optimizer, or a fused one, is a tensor: it travels with the norms."""
    path, ids = tmp_path / "runs.db", list[str]()

    def watch(*args: object) -> ampscope.Watch:
        run = ampscope.watch(*(a for a in args if a is not None), store=path, every=0)
        ids.append(run.id)
        return run

    kinds: dict[str, Any] = {"lr": torch.tensor(0.25), "fused": True, "scaled": scaled}
    bare, seen = steps(net(), None, **kinds), steps(net(), watch, **kinds)
    assert not any(one[1] - other[1] for one, other in zip(seen[3:], bare[3:], strict=True))
    assert {step.lr for step in recorded(path, ids[0]).steps} == {0.25}


@pytest.mark.parametrize(("peak", "is_held"), [(1 << 40, True), (1000, False)])
def test_large_inputs_are_let_go_when_their_step_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak: int, is_held: bool
) -> None:
    """Numbers that arrive a step later find the inputs of their step where these are small beside
    the peak. Larger ones would be one batch more at the next step's peak; the capsule says so, and
    the next step of the same streak is kept as well, with its inputs."""
    monkeypatch.setattr(counted_device, "PEAK", peak)
    model, runs, inputs, alive = net(), list[ampscope.Watch](), list[Any](), list[bool]()
    model.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0])))

    def watch(*args: object) -> ampscope.Watch:
        given = (a for a in args if a is not None)
        runs.append(ampscope.watch(*given, store=tmp_path / "runs.db", every=0, policy="ignore"))
        return runs[-1]

    def look() -> None:
        if len(inputs) == 4:  # step 4 begins; what step 3 was given is no one else's
            alive.append(inputs[3]() is not None)

    steps(model, watch, bad={3}, each=look)
    kept = [load(file) for file in runs[0].capsules]
    assert alive == [is_held]
    assert kept[0].about.step == 3
    assert len(kept[0].forwards) == is_held
    assert [c.about.step for c in kept if c.forwards] == [3 if is_held else 4]
    assert len(kept) == (1 if is_held else 2)
    assert any("too large to be held" in text for text in kept[0].about.left_out) == (not is_held)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("scaled", "own", "summed", "signs", "kept"),
    [
        (False, {3}, set(), [(3, "backward")], 3),
        (False, set(), {3}, [(3, SHARED)], 4),  # by then the weights are bad, and so is the loss
        (True, {3, 4, 5}, set(), [(3, "backward"), (5, "backward")], 5),
        (True, {6}, {3, 4, 5}, [(3, SHARED), (5, SHARED), (6, "backward")], 6),
    ],
)
def test_a_rank_judges_each_step_by_its_own_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool, scaled: bool, own: set[int],
    summed: set[int], signs: list[tuple[int, str]], kept: int,
) -> None:  # fmt: skip
    """One rank of two: gradients of its own overflow in the steps ``own``, in the steps ``summed``
    only their sum over the ranks does. A step whose numbers arrive while the next one runs is
    judged by its own backward, and the rank that is the cause keeps a capsule."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model, runs, step = net(), list[ampscope.Watch](), iter(range(STEPS))
    now = [0]

    def overflowing(gradient: Tensor, bad: set[int]) -> Tensor:
        return gradient * torch.inf if now[0] in bad else gradient

    model[6].register_full_backward_pre_hook(lambda module, got: (overflowing(got[0], own),))  # type: ignore[index]  # a Sequential
    weight = next(model.parameters())
    weight.register_hook(lambda gradient: overflowing(gradient, summed))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def watch(*args: object) -> ampscope.Watch:
        given = (a for a in args if a is not None)
        runs.append(ampscope.watch(*given, store=tmp_path / "runs.db", every=0, policy="ignore"))
        return runs[-1]

    steps(model, watch, each=lambda: now.insert(0, next(step)), scaled=scaled, fused=fused)
    events = recorded(tmp_path / "runs.db", runs[0].id).events
    found = [(e.step, e.name) for e in events if e.kind in ("nonfinite", "calibration")]
    assert found[: len(signs)] == signs
    assert load(runs[0].capsules[0]).about.step == kept


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_optimizers_of_one_step_left_it_out_where_one_of_them_did(found: float) -> None:
    """Each flag travels by itself, and its value counts, not that it is on its way."""
    pending = (start_norms({}, 1.0),)
    with CountedDevice() as device:
        flags = [PendingFlag(torch.tensor([value])) for value in (0.0, found)]
        assert not device.take()[1]
        device.step += 1
        parts = [StepNumbers(pending, skipped=flag) for flag in flags]
        assert StepNumbers.joined(parts).skipped is bool(found)
        assert not device.take()[1]
    assert StepNumbers.joined([StepNumbers(pending, skipped=False)]).skipped is False


def test_a_step_that_a_fused_optimizer_left_out_moved_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers were read before it stepped, as with another library's scaler: the record has no
    update, and no share of weights that moved."""
    monkeypatch.setattr(session, "scaler_numbers", lambda scaler: [])
    runs, path = list[ampscope.Watch](), tmp_path / "runs.db"

    def watch(*args: object) -> ampscope.Watch:
        given = (a for a in args if a is not None)
        runs.append(ampscope.watch(*given, store=path, every=1, policy="ignore"))
        return runs[-1]

    steps(net(), watch, scaled=True, fused=True, bad={5})
    found = recorded(path, runs[0].id)
    assert [step.step for step in found.steps if step.skipped] == [5]
    assert found.at(Role.UPDATE) == [step for step in range(STEPS) if step != 5]


def test_no_bad_step_is_examined_inside_a_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers that step in backward: a capsule is copied when the next backward is over, and not
    while autograd runs and the peak is near."""
    seen, examine = list[tuple[int, bool]](), BadSteps.examine

    def noted(bad: BadSteps, step: int, *args: Any, **kwargs: Any) -> Any:
        seen.append((step, in_backward()))
        return examine(bad, step, *args, **kwargs)

    monkeypatch.setattr(BadSteps, "examine", noted)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    run = ampscope.watch(model, [*own.values()], store=tmp_path / "runs.db", policy="ignore")
    with run, CountedDevice() as device:
        for parameter in own:
            parameter.register_post_accumulate_grad_hook(lambda p: own[p].step())  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for device.step in range(5):
            scale = torch.inf if device.step == 2 else 1.0
            (model(torch.ones(2, 4)) * scale).sum().backward()
    assert seen[0] == (2, False)
    assert not any(inside for _, inside in seen)


def test_copies_of_buffers_are_written_by_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream may still be writing to the copies of an earlier step: those that are spare
    serve the stream that wrote them."""
    model = net()
    root = WatchedModels({"model": model}).roots[0]
    with CountedDevice():
        current = ["first"]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: current[0])
        called = CalledModule(root, "", model)
        before = called.copies()
        model(torch.randn(4, 1, 8, 8))
        called.learn(before)
        mine = called.copies()
        called.reuse(mine)
        current[0] = "second"
        other = called.copies()
        called.reuse(other)
        assert other is not mine
        assert called.copies() is other
        current[0] = "first"
        assert called.copies() is mine
        monkeypatch.undo()


def test_gradients_that_were_unscaled_are_counted_as_such() -> None:
    """Those of a bad step are counted behind the wait of GradScaler, which has divided them."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counts = StepHistograms(WatchedModels({"model": model}), Guard(lambda reason: None))
    for step, is_unscaled in enumerate((False, True, False)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 if is_unscaled else 256.0)
        counts.start(step, histograms=False, weights=False)
        counts.count_bad(optimizer, is_unscaled=is_unscaled)
        frame = counts.take([optimizer], 256.0).frames[Role.WEIGHT_GRAD]
        assert frame.scale == (1.0 if is_unscaled else 256.0)
        assert frame.rows.sum() == 4 * 2 + 2


def test_counts_go_once_their_frames_are_made() -> None:
    """The recorder may keep many steps waiting: each holds its histograms once."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    histograms = StepHistograms(WatchedModels({"model": model}), Guard(lambda reason: None))
    histograms.start(0, histograms=True, weights=False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    histograms.gradients_complete(optimizer)
    counted = histograms.take([optimizer], 1.0)
    counts = [weakref.ref(part._counts) for part in counted._parts]
    assert counts
    assert counted.frames[Role.WEIGHT_GRAD].rows.sum() == 4 * 2 + 2
    assert all(one() is None for one in counts)
    assert counted.is_here


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize(
    "kinds",
    [
        {},
        {"scaled": True},
        {"scaled": True, "clipped": True},
        {"scaled": True, "fused": True},
        {"scaled": True, "fused": True, "clipped": True},
    ],
    ids=lambda kinds: ", ".join(kinds) or "plain",
)
def test_what_is_recorded_is_that_of_the_cpu(
    tmp_path: Path, kinds: dict[str, bool], every: int
) -> None:
    """What the device sends, now or later, is what the same training records without it, bad steps
    included; and a bad step that was skipped is kept with its weights."""
    path, runs = tmp_path / "runs.db", list[ampscope.Watch]()

    def watch(*args: object) -> ampscope.Watch:
        given = (a for a in args if a is not None)
        runs.append(ampscope.watch(*given, store=path, every=every, policy="ignore"))
        return runs[-1]

    bad = {5} if "scaled" in kinds else set()  # without a scaler the weights are bad from then on
    for fake in (True, False):
        torch.manual_seed(1)
        steps(net(), watch, fake=fake, bad=bad, **kinds)
    device, cpu = (recorded(path, run.id) for run in runs)
    assert len(device.steps) == len(cpu.steps) == STEPS
    assert [step.step for step in device.steps if step.skipped] == [*bad]
    for one, other in zip(device.steps, cpu.steps, strict=True):
        for name in ("loss", "scale", "growth_counter", "skipped", "grad_norm", "unclipped_norm"):
            seen, true = getattr(one, name), getattr(other, name)
            close = true if true is None else pytest.approx(true, rel=1e-6, nan_ok=True)
            assert seen == close, (one.step, name)
    kept = [[load(file) for file in run.capsules] for run in runs]
    assert [[c.about.step for c in some] for some in kept] == [[*bad], [*bad]]
    for one, other in zip(*kept, strict=True):
        assert one.about.where == other.about.where == "loss"
        assert one.checks == other.checks
        assert one.weights.keys() == other.weights.keys() != set()
        assert len(one.forwards) == len(other.forwards) == 1
        assert torch.equal(one.forwards[0].args[0], other.forwards[0].args[0])


@pytest.mark.parametrize(
    ("look", "name"),
    [
        (lambda x: x.sum().item(), "aten._local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "aten._local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "copy"),
        (lambda x: x.to("cpu"), "copy"),
        (lambda x: x.nonzero(), "aten.nonzero"),
        (lambda x: x[x > 0], "aten.index"),
        (lambda x: torch.equal(x, x + 1), "aten.equal"),
        (lambda x: torch.cuda.synchronize(), "synchronize"),
    ],
)  # fmt: skip
def test_the_fake_counts_what_waits(look: Callable[[torch.Tensor], object], name: str) -> None:
    with CountedDevice() as device:
        x = torch.randn(8)
        device.take()
        look(x)
        assert device.take()[1] == {name: 1}
        on_host = x.to("cpu", non_blocking=True)
        device.take()
        on_host.double().sum().item()
        assert device.take() == (Counter(), Counter(), 0)


@pytest.mark.parametrize("stable", [False, True])
def test_what_is_counted_on_the_current_stream_leaves_no_event_on_its_memory(
    stable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graph trees end a training that has events on memory of theirs."""
    recorded: list[object] = []
    current = [0]  # the handle of the current stream

    @contextlib.contextmanager
    def entered(stream: Any) -> Iterator[None]:
        before, current[0] = current[0], stream.cuda_stream
        yield
        current[0] = before

    with CountedDevice():
        monkeypatch.setattr(Tensor, "record_stream", lambda *given: recorded.append(given))
        monkeypatch.setattr(torch.cuda, "stream", entered)
        monkeypatch.setattr(exponent_count, "current_handle", lambda index: current[0])
        counter = DeviceCounter(torch.device("cuda", 0))
        for row in range(3):
            counter.add(torch.ones(4, 4), row, stable=stable)
        counter.collect()
        assert recorded == []
        counter.add(torch.ones(4, 4), 0, stable=True)
        current[0] = 1
        counter.flush()  # from another stream: the memory may be reused before it is counted
        assert len(recorded) == 1
        monkeypatch.undo()
