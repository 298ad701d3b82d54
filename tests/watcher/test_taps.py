"""A watch with taps counts inside compiled code, and breaks and compiles nothing more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ampscope
from ampscope.capture.exponent_count import count_into
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Role
from ampscope.watcher.alarms import AmpscopeWarning
from tests.helpers.inductor import needs_compiler
from tests.helpers.watched import Recorded, recorded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own code
STEPS = 4


def train(
    store: Path | None, *, taps: bool, backend: str = "inductor"
) -> tuple[list[float], list[Tensor], Recorded | None]:
    """Losses, the outputs of the first module, and what a watch recorded."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    model = torch.compile(plain, backend=backend)
    run = ampscope.watch(model, optimizer, store=store, every=2, taps=taps) if store else None
    losses, outputs = [], []
    for _ in range(STEPS):
        inputs = torch.randn(32, 8)
        with torch.no_grad():
            outputs.append(nn.functional.linear(inputs, plain[0].weight, plain[0].bias))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    if run is None:
        return losses, outputs, None
    run.close()
    return losses, outputs, recorded(run.store, run.id)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_module_outputs_and_gradients_are_counted_inside(tmp_path: Path, backend: str) -> None:
    bare, _, _ = train(None, taps=False, backend=backend)
    graphs = counters["stats"]["unique_graphs"]
    off, _, _ = train(tmp_path / "off.db", taps=False, backend=backend)
    assert off == bare
    losses, outputs, found = train(tmp_path / "on.db", taps=True, backend=backend)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs
    assert losses == pytest.approx(bare, rel=1e-6)
    assert found is not None
    for role in (Role.ACTIVATION, Role.GRAD_OUTPUT):
        assert found.at(role) == [0, 2]
        for frame in found.frames[role]:
            paths = [found.paths[m] for m in frame.modules]
            assert sorted(paths) == ["", "0", "1", "2", "3"]  # the model hands on what "3" gives
            assert (frame.rows.sum(axis=1) == 32 * 16).all()
    for frame in found.frames[Role.ACTIVATION]:
        expected = np.zeros(RAW_LEN, np.int64)
        count_into(outputs[frame.step], expected)
        first = [found.paths[m] for m in frame.modules].index("0")
        assert np.abs(frame.rows[first] - expected).sum() <= 2  # a last bit at a power of two
    assert any("with taps in its graphs" in event.text for event in found.of("note"))


def test_what_no_tap_reaches_is_said(tmp_path: Path) -> None:
    with pytest.warns(AmpscopeWarning, match="No tap was heard"):
        _, _, found = train(tmp_path / "runs.db", taps=True, backend="eager")
    assert found is not None
    assert not found.at(Role.ACTIVATION)


def test_without_taps_the_note_says_how_to_get_them(tmp_path: Path) -> None:
    _, _, found = train(tmp_path / "runs.db", taps=False, backend="aot_eager")
    assert found is not None
    assert any("taps=True" in event.text for event in found.of("note"))
