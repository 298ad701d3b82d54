"""Watching compiled models, optimizers and whole steps: no hook is traced, no bit changes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from watched import recorded

import ampscope
from ampscope.watcher.alarms import AmpscopeWarning

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own code
COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler"),
    ),
]


def train(kind: str, backend: str, store: Path | None) -> tuple[list[float], list[Tensor], object]:
    """Six steps of AdamW; ``kind`` says what of them is compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    model: Callable[[Tensor], Tensor] = plain
    update: Callable[[], object] = optimizer.step
    if kind in ("model", "fullgraph"):
        model = torch.compile(plain, backend=backend, fullgraph=kind == "fullgraph")
    if kind == "optimizer":
        update = torch.compile(optimizer.step, backend=backend)

    def step(inputs: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        update()
        return loss.detach()

    if kind == "whole step":
        step = torch.compile(step, backend=backend)
    run = ampscope.watch(model, optimizer, store=store, every=2) if store else None
    losses = [float(step(torch.randn(16, 8))) for _ in range(6)]
    if run is not None:
        run.close()
    return losses, [p.detach().clone() for p in plain.parameters()], run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["model", "fullgraph", "optimizer", "whole step"])
def test_compiled_training_is_bit_identical(kind: str, backend: str, tmp_path: Path) -> None:
    bare, weights, _ = train(kind, backend, None)
    if kind in ("model", "fullgraph"):
        losses, watched, run = train(kind, backend, tmp_path / "runs.db")
    else:  # compiled code calls no hook, and the watch says that it sees nothing
        with pytest.warns(AmpscopeWarning, match="no optimizer step is seen"):
            losses, watched, run = train(kind, backend, tmp_path / "runs.db")
    assert losses == bare
    assert all(map(torch.equal, weights, watched))
    found = recorded(run.store, run.id)
    if kind in ("model", "fullgraph"):
        assert [s.loss for s in found.steps] == bare
    else:
        assert any("no optimizer step is seen" in event.text for event in found.of("note"))
