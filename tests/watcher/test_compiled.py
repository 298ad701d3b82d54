"""Watching compiled models, optimizers and whole steps: no hook is traced, no bit changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ampscope
from ampscope.watcher.alarms import AmpscopeWarning
from tests.helpers.inductor import needs_compiler
from tests.helpers.watched import recorded

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile warns of its own code
BACKENDS = ["aot_eager", pytest.param("inductor", marks=needs_compiler)]


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


class WithCompiledPart(nn.Module):
    """The watch is given a model of which only a part is compiled, as layers before FSDP2 are."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 16)
        self.block = torch.compile(nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), backend="aot_eager")
        self.last = nn.Linear(16, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.block(self.head(inputs)))


def train_in_part(
    kind: str, store: Path | None, every: int, nan_at: int = -1, watch_from: int = 0
) -> tuple[int, list[Tensor]]:
    """The number of graphs that torch.compile made, and the weights."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain = WithCompiledPart() if kind == "part" else nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    model = torch.compile(plain, backend="aot_eager") if kind == "model" else plain

    def loss_of(inputs: Tensor) -> Tensor:
        return model(inputs).square().mean()

    if kind == "loss function":  # as Lightning compiles training_step; the model tells nothing
        loss_of = torch.compile(loss_of, backend="aot_eager")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    run = None
    for step in range(10):
        if store is not None and step == watch_from:
            run = ampscope.watch(model, optimizer, store=store, every=every, policy="ignore")
        inputs = torch.randn(16, 8)
        if step == nan_at:
            inputs[0, 0] = float("nan")
        loss_of(inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], list(plain.parameters())


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Bit for bit, NaN at the same places included."""
    pairs = zip(one, other, strict=True)
    return all(
        torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in pairs
    )


@pytest.mark.parametrize("kind", ["part", "loss function"])
@pytest.mark.parametrize(("every", "nan_at"), [(2, -1), (1, -1), (0, 4)])
def test_a_watch_compiles_nothing_again(kind: str, every: int, nan_at: int, tmp_path: Path) -> None:
    """A global hook that comes and goes with the histograms would be in the guards of compiled
    code: each state of torch's table has a graph of its own, compiled in the midst of training."""
    graphs, bare = train_in_part(kind, None, every, nan_at)
    more, watched = train_in_part(kind, tmp_path / "runs.db", every, nan_at)
    assert equal(bare, watched)
    assert more == graphs


def test_a_compiled_model_may_be_watched_from_any_step(tmp_path: Path) -> None:
    graphs, bare = train_in_part("model", None, 2)
    more, watched = train_in_part("model", tmp_path / "runs.db", 2, watch_from=3)
    assert equal(bare, watched)
    assert more == graphs


def test_torch_warns_of_no_hook_of_ours(tmp_path: Path) -> None:
    """torch warns of any global hook when it calls what torch.compile made of a module. Where
    warnings are errors, that would end the training."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using `torch.compile")
        train_in_part("part", tmp_path / "runs.db", 1)
        found = [one[0] for one in warnings.filters if one[1] and "torch.compile" in one[1].pattern]
        assert found == ["error"]
