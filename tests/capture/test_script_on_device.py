"""What the instruments of an untouched script do on a CUDA device, counted on a fake one."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from ampscope.capture import histograms
from ampscope.numerics.histogram import RAW_LEN, Raw
from ampscope.records import Cadence
from ampscope.runner.script_recorder import ScriptRecorder
from tests.helpers import script_watching
from tests.helpers.counted_device import CountedDevice

STEPS = 6
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
) -> list[Counts]:
    """Counts of each step; those ``captured`` run while a CUDA graph is recorded."""
    device = CountedDevice()
    with pytest.MonkeyPatch.context() as patches, device:
        model = small()
        own = getattr(torch.optim, optimizer)(
            model.parameters(), lr=1e-3, foreach=True, capturable=True
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        with watched(patches):
            device.take()
            found = []
            for device.step in range(STEPS):
                with capturing(device.step in captured):
                    own.zero_grad()
                    with torch.autocast("cpu", torch.bfloat16):
                        loss = model(torch.randn(4, 8)).float().square().mean()
                    scaler.scale(loss).backward()
                    scaler.unscale_(own)
                    if clipped:
                        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
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

    def collect(self) -> Raw:
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

    def __init__(self, op_step: int | None = None) -> None:
        self.recorder = ScriptRecorder(HERE, Cadence(1, 1, 1), lambda step: None, op_step=op_step)

    @contextlib.contextmanager
    def __call__(self, patches: pytest.MonkeyPatch) -> Iterator[None]:
        for name, module in list(sys.modules.items()):
            if name.startswith("ampscope.") and hasattr(module, "no_dispatch"):
                # Below the op watch and above the device that counts.
                patches.setattr(module, "no_dispatch", self.recorder._not_watched)
        patches.setattr(histograms, "DeviceCounter", OneLaunch)
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
