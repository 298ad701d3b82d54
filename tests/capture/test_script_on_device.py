"""What the instruments of an untouched script do on a CUDA device, counted on a fake one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch
from torch.utils.checkpoint import checkpoint

from ampscope import zoo
from ampscope.capture import accumulator, own_ops
from ampscope.capture.script.optimizer_steps import gradient_facts
from ampscope.capture.tensors import are_finite
from ampscope.numerics.histogram import RAW_LEN, Raw
from ampscope.observations import LineUse, OptimizerStep
from ampscope.records import Cadence
from ampscope.runner.script_recorder import ScriptRecorder
from tests.helpers import script_watching
from tests.helpers.counted_device import CountedDevice

STEPS = 6
ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
)
MOST_WAITS = {False: 40, True: 56}  # beyond the training's own, by whether there is a scaler
EVERYTHING = Cadence(1, 1, 1)
ZOO = Path(zoo.__file__).parent / "scripts"
HERE = str(Path(__file__).parent)
Counts = tuple[Counter[str], Counter[str], int]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1))


def trained(
    watched: Callable[[pytest.MonkeyPatch], contextlib.AbstractContextManager[object]],
    optimizer: str = "Adam",
    captured: Collection[int] = (),
    scaled: bool = False,
    clipped: bool = True,
    model: Callable[[], nn.Module] = small,
    scale: float = 256.0,
    on_device: bool = True,
    capturable: bool = True,
) -> list[Counts]:
    """Counts of each step; those ``captured`` run while a CUDA graph is recorded."""
    counted = CountedDevice()
    fake = counted if on_device else contextlib.nullcontext(counted)
    with pytest.MonkeyPatch.context() as patches, fake as device:
        net = model()
        own = getattr(torch.optim, optimizer)(
            net.parameters(), lr=1e-3, foreach=True, capturable=capturable
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scaled)
        with watched(patches):
            device.take()
            found = []
            for device.step in range(STEPS):
                with capturing(device.step in captured):
                    own.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = net(torch.randn(4, 8)).float().square().mean()
                    scaler.scale(loss).backward()
                    scaler.unscale_(own)
                    if clipped:
                        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
                    scaler.step(own)
                    scaler.update()
                found.append(device.take())
    return found


class OneLaunch:
    """In place of the counters of exponents, which are counted elsewhere: a launch a tensor."""

    def __init__(self, device: torch.device) -> None: ...

    def add(self, tensor: Tensor, row: int, *, stable: bool = False) -> None:
        tensor.abs()

    def flush(self) -> None: ...

    def collect(self) -> OneLaunch:
        return self

    def rows(self) -> Raw:
        return np.zeros((0, RAW_LEN), np.int64)


@contextlib.contextmanager
def capturing(is_recorded: bool) -> Iterator[None]:
    """As inside ``torch.cuda.graph``, for what asks torch."""
    with pytest.MonkeyPatch.context() as patches:
        if is_recorded:
            patches.setattr(torch.cuda, "is_initialized", lambda: True)
            patches.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


def bare(patches: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


class Watched:
    """All instruments of a script, as the runner puts them on."""

    def __init__(self, op_step: int | None = None, cadence: Cadence = EVERYTHING) -> None:
        self.recorder = ScriptRecorder(HERE, cadence, lambda step: None, op_step=op_step)

    @contextlib.contextmanager
    def __call__(self, patches: pytest.MonkeyPatch) -> Iterator[None]:
        # Below the op watch and above the device that counts.
        watch = self.recorder.watch
        before: list[bool] = []

        def switch_off(here: object) -> None:
            before.append(watch.enabled)
            watch.enabled = False

        def switch_on(here: object) -> None:
            watch.enabled = before.pop()

        patches.setattr(accumulator, "DeviceCounter", OneLaunch)
        # Undone here: a device around this puts back what it has found, and leaves first.
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(own_ops._Here, "switch_off", switch_off)
            inner.setattr(own_ops._Here, "switch_on", switch_on)
            with self.recorder.watching():
                yield


@pytest.mark.parametrize(
    ("op_step", "scaled"), [(None, False), (None, True), (2, False)], ids=["", "scaled", "digested"]
)
def test_no_instrument_touches_a_step_that_a_cuda_graph_takes_up(
    op_step: int | None, scaled: bool
) -> None:
    """A wait ends the script's recording; a launch becomes part of its graph."""
    graphs = {2, 3}
    plain = trained(bare, captured=graphs, scaled=scaled)
    watched = Watched(op_step)
    seen = trained(watched, captured=graphs, scaled=scaled)
    for step in graphs:
        assert seen[step] == plain[step], seen[step][0] - plain[step][0]
    assert all(seen[step] != plain[step] for step in {0, 1, 4, 5})  # the others are looked at
    recorder = watched.recorder
    assert recorder.steps.count == STEPS - len(graphs)
    assert recorder.watch.captured_ops > 0
    assert f"{recorder.watch.captured_ops} ops" in recorder.watch.graph_note
    assert recorder.watch.failures.note == recorder.histograms.failures.note == ""


@pytest.mark.parametrize("where", ["fake", "cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("bad", [(), (math.nan, math.inf, -math.inf)])
def test_gradients_of_all_dtypes_are_read_together(where: str, bad: Sequence[float]) -> None:
    """Against NumPy on the finite elements of each."""
    kinds = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    gradients = [torch.randn(5, 7, dtype=torch.float64).to(kind) for kind in (*kinds, *kinds)]
    gradients += [torch.zeros(3), torch.zeros(0), torch.tensor(-2.5)]
    for gradient in gradients[:3]:
        gradient[0, : len(bad) + 2] = torch.tensor((*bad, 0.0, 60_000.0))
    if where == "cuda":
        gradients = [gradient.cuda() for gradient in gradients]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    expected = [gradient.double().flatten().cpu().numpy() for gradient in gradients]
    with CountedDevice() if where == "fake" else contextlib.nullcontext() as device:
        facts = gradient_facts(parameters, 4.0)
        seen = are_finite(gradients)
    if device is not None:
        assert device.waits == {"tolist": 3 if bad else 2}
    for values, (_, part), is_finite in zip(expected, facts.parts, seen, strict=True):
        kept = values[np.isfinite(values)]
        assert part.total == values.size
        assert part.zero == int((values == 0).sum())
        assert part.nonfinite == values.size - kept.size
        assert part.norm == pytest.approx(float(np.linalg.norm(kept)) / 4, rel=1e-7)
        assert part.largest == pytest.approx(np.abs(kept).max(initial=0.0) / 4, rel=1e-7)
        assert is_finite is (part.nonfinite == 0)


def steps_of(*, on_device: bool) -> list[OptimizerStep]:
    """A training whose first gradients overflow, as GradScaler's first steps do."""
    watched = Watched(cadence=Cadence(0, 0, 0))
    trained(watched, scaled=True, scale=2.0**127, on_device=on_device, capturable=False)
    return [dataclasses.replace(s, ended_at=0.0) for s in watched.recorder.steps.records]


def test_a_device_records_what_a_cpu_records() -> None:
    """Bit for bit, by other ways: gradients, state and weights are read together on a device."""
    found = steps_of(on_device=True)
    assert repr(found) == repr(steps_of(on_device=False))  # NaN included
    assert found[0].skipped
    assert found[0].grad_nonfinite > 0
    assert found[-1].update_norm


class Parameters(nn.Module):
    """Many parameters that few ops take."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.held = nn.ParameterList(torch.full((8,), 0.1) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * torch.cat(list(self.held))


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
def test_the_waits_of_a_step_do_not_grow_with_the_number_of_parameters(scaled: bool) -> None:
    """A list of tensors, as foreach optimizers take them, is one look; so are an optimizer's
    gradients, its state and the change of its weights."""
    found = []
    for count in (4, 40):
        kinds: dict[str, Any] = {"model": lambda count=count: Parameters(count), "scaled": scaled}
        plain = trained(bare, clipped=False, **kinds)[-1]
        seen = trained(Watched(cadence=Cadence(0, 0, 0)), clipped=False, **kinds)[-1]
        found.append((seen[1] - plain[1]).total())
    assert found[0] == found[1] <= MOST_WAITS[scaled]


@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=ON_CUDA)])
def test_a_watched_script_records_and_replays_a_cuda_graph(cuda: str) -> None:
    """As torch's own documentation does it: some steps on a side stream, then the recording."""
    recorder = ScriptRecorder(HERE, EVERYTHING, lambda step: None)
    with recorder.watching():
        net, x = small().to(cuda), torch.randn(4, 8, device=cuda)
        own = torch.optim.Adam(net.parameters(), capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                own.zero_grad()
                net(x).square().mean().backward()
                own.step()
        torch.cuda.current_stream().wait_stream(side)
        own.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = net(x).square().mean()
            loss.backward()
            own.step()
        losses = []
        for _ in range(3):
            graph.replay()
            losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    assert recorder.steps.count == 3
    assert recorder.watch.captured_ops > 0
    assert recorder.watch.failures.note == recorder.histograms.failures.note == ""


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("use", [lambda x: x.mul_(0.5), lambda x: x * 0.5, lambda x: x - x])
def test_no_op_is_blamed_for_what_a_replayed_graph_has_written(
    use: Callable[[Tensor], Tensor], value: float
) -> None:
    """The graph's ops were not seen: neither the op that reads its results, nor the data, is known
    to be the cause."""
    with script_watching.watched() as seen:
        with capturing(True):
            result = torch.ones(8) * 2
        with no_dispatch():  # a replay goes past torch
            result.fill_(value)
        assert not use(result).isfinite().all()
        assert seen.watch.records() == seen.watch.uses.records() == []
    assert seen.watch.graph_note.startswith("2 ops ran inside a CUDA graph")


# A thread of autograd's has the modes of the thread that calls backward, and none of its frames.
_THREAD = compile("def work(mode, run):\n    with mode:\n        run()\n", "<thread>", "exec")


@contextlib.contextmanager
def backward_in_a_thread(recorder: ScriptRecorder) -> Iterator[list[str]]:
    """Runs each backward pass as for a device; gives the names of the threads."""
    space: dict[str, Any] = {}
    exec(_THREAD, space)
    original, names = torch.autograd._engine_run_backward, list[str]()

    def moved(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(original(*args, **kwargs))
            except BaseException as error:
                found.append(error)

        run.__code__ = run.__code__.replace(co_filename="<thread>")
        thread = threading.Thread(target=space["work"], args=(recorder.watch._mode, run))
        names.append(thread.name)
        thread.start()
        thread.join()
        if isinstance(found[0], BaseException):
            raise found[0]
        return found[0]

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(torch.autograd, "_engine_run_backward", moved)
        yield names


def hooked() -> None:
    """Gradients of hooks, of a recomputed forward, and of a graph that is older than the watch."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for scale in (1.0, 1e-40):
        made = layer(torch.randn(2, 4))
        made.register_hook(lambda gradient: gradient * 2)  # a hook of the script's
        made.register_hook(torch.neg)  # and one without lines
        loss = checkpoint(layer, made, use_reentrant=False).square().mean()
        (loss * scale / scale).sqrt().backward()
        torch.autograd.grad(OLDER, LEAF, retain_graph=True)
        optimizer.step()


LEAF = torch.ones(3, requires_grad=True)
OLDER = (LEAF.bfloat16() * 2).float().exp().sum()
_BETWEEN = LEAF * 2  # so that the first op that is watched does not follow it


def zoo_script() -> None:
    runpy.run_path(str(ZOO / "c01_t5_ffn.py"), run_name="__main__")


def two_steps(count: int) -> None:
    if count == 2:
        sys.exit()


@pytest.mark.parametrize("script", [hooked, pytest.param(zoo_script, marks=pytest.mark.slow)])
def test_backward_ops_have_the_same_lines_in_a_thread_of_autograds(
    script: Callable[[], None],
) -> None:
    """On a device backward runs where the line that called it is not on the stack."""
    found = []
    for is_threaded in (False, True):
        recorder = ScriptRecorder(str(ZOO), Cadence(0, 1, 0), two_steps, op_step=0)
        threads: list[str] = []
        moved = backward_in_a_thread(recorder) if is_threaded else contextlib.nullcontext(threads)
        with recorder.watching(), moved as threads, contextlib.suppress(SystemExit):
            script()
        assert bool(threads) is is_threaded
        assert recorder.digests is not None
        digests = recorder.digests.records()
        found.append(
            (
                recorder._line_uses.records(),
                [(d.role, d.names, d.ops, d.lines) for d in digests],
                [(b.op, b.line, b.library, b.count) for b in recorder.watch.records()],
                [(u.name, u.line, u.count) for u in recorder.watch.uses.records()],
            )
        )
    assert found[0] == found[1]
    assert [use for use in found[0][0] if isinstance(use, LineUse) and use.backward]
