"""Taps in each form of compilation: the modules' own numbers, and no graph, break or compilation
more than without.

The oracle is the training that is not compiled, whose modules are hooked one by one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

import ampscope
from ampscope.capture.exponent_count import count_into
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Role
from ampscope.watcher.alarms import AmpscopeWarning
from tests.helpers.inductor import needs_compiler
from tests.helpers.watched import Recorded, recorded

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch.compile warns of its own code
    pytest.mark.slow,
    needs_compiler,
]
STEPS, WIDTH = 4, 8
Rows = dict[tuple[Role, str, int], np.ndarray]


class Block(nn.Module):
    """A residual block, with a break of the graph or flex_attention inside where that is asked."""

    def __init__(self, special: str) -> None:
        super().__init__()
        self.up, self.act, self.special = nn.Linear(WIDTH, WIDTH), nn.Tanh(), special

    def forward(self, x: Tensor) -> Tensor:
        if self.special == "flex" and not x.requires_grad:  # it has no backward pass on a CPU
            heads = x.view(1, 1, *x.shape)
            x = flex_attention(heads, heads, heads).view_as(x)
        x = self.up(x)
        if self.special == "break":
            torch._dynamo.graph_break()
        return self.act(x)


class Net(nn.Module):
    def __init__(self, special: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(special) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        output: Tensor = self.head(self.blocks[1](x))
        return output


def whole(**options: Any) -> Callable[[Net], Callable[[Tensor], Tensor]]:
    return lambda net: torch.compile(net, **options)


def each(compile_one: Callable[[nn.ModuleList, int], None]) -> Callable[[Net], Net]:
    def compiled(net: Net) -> Net:
        for n in range(len(net.blocks)):
            compile_one(net.blocks, n)
        return net

    return compiled


def wrap(blocks: nn.ModuleList, n: int) -> None:
    blocks[n] = torch.compile(blocks[n])


def forward(blocks: nn.ModuleList, n: int) -> None:
    blocks[n].forward = torch.compile(blocks[n].forward)


@dataclass(frozen=True)
class Form:
    """What of a training is compiled, and how."""

    compiled: Callable[[Net], Callable[[Tensor], Tensor]] = torch.compile
    special: str = ""
    sizes: tuple[int, ...] = (4, 4, 4, 4)  # of the batches
    surroundings: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


FORMS = {
    "one graph": Form(whole(fullgraph=True)),
    "dynamic shapes": Form(whole(dynamic=True), sizes=(4, 6, 8, 6)),
    "shapes found to change": Form(sizes=(4, 6, 8, 6)),
    "breaks": Form(special="break"),
    "no cudagraphs": Form(whole(mode="max-autotune-no-cudagraphs")),
    "block.compile()": Form(each(lambda blocks, n: blocks[n].compile())),
    "wrapped blocks": Form(each(wrap)),
    "forwards of blocks": Form(each(forward)),
    "function": Form(lambda net: torch.compile(lambda x: net(x))),
    "flex_attention": Form(special="flex"),
}

COMPILED_AUTOGRAD = Form(
    surroundings=lambda: torch._dynamo.compiled_autograd._enable(torch.compile)
)


def train(
    form: Form, store: Path | None, *, is_compiled: bool = True, hooked: Rows | None = None
) -> tuple[list[float], Recorded | None]:
    """Losses, and what a watch recorded; ``hooked`` gets what hooks of an eager training see."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    net = Net(form.special)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = form.compiled(net) if is_compiled else net
    losses: list[float] = []
    if hooked is not None:
        for path, module in net.named_modules():
            module.register_forward_hook(counting(hooked, path, losses))
    watched = model if isinstance(model, nn.Module) else net
    with form.surroundings() if is_compiled else contextlib.nullcontext():
        run = ampscope.watch(watched, optimizer, store=store, every=2, taps=True) if store else None
        for size in form.sizes:
            loss = model(torch.randn(size, WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
        if run is None:
            return losses, None
        run.close()
    return losses, recorded(run.store, run.id)


def counting(rows: Rows, path: str, losses: list[float]) -> Callable[..., None]:
    def count(role: Role, numbers: Tensor) -> None:
        row = rows[role, path, len(losses)] = np.zeros(RAW_LEN, np.int64)
        count_into(numbers.detach().contiguous(), row)

    def after(module: nn.Module, inputs: object, output: Tensor) -> None:
        count(Role.ACTIVATION, output)
        output.register_hook(lambda gradient: count(Role.GRAD_OUTPUT, gradient))

    return after


@pytest.mark.parametrize("name", FORMS)
def test_taps_count_what_hooks_of_eager_code_do(name: str, tmp_path: Path) -> None:
    form, hooked = FORMS[name], Rows()
    train(form, None, is_compiled=False, hooked=hooked)
    bare, _ = train(form, None)
    compiled = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    losses, found = train(form, tmp_path / "runs.db")
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == compiled
    assert losses == pytest.approx(bare, rel=1e-6)
    assert found is not None
    leaves = {"blocks.0.up", "blocks.0.act", "blocks.1.up", "blocks.1.act"}
    for role in (Role.ACTIVATION, Role.GRAD_OUTPUT):
        assert found.at(role) == [0, 2], found.of("note")
        for frame in found.frames[role]:
            paths = [found.paths[m].replace("._orig_mod", "") for m in frame.modules]
            assert leaves <= set(paths), found.of("note")
            for path, row in zip(paths, frame.rows, strict=True):
                expected = hooked[role, path, frame.step]
                assert row.sum() == expected.sum(), path
                # Last bits differ: some numbers stand at a power of two.
                assert np.abs(row - expected).sum() <= 4, path


def test_of_compiled_autograd_gradients_are_not_seen_and_said(tmp_path: Path) -> None:
    bare, _ = train(COMPILED_AUTOGRAD, None)
    graphs, captures = counters["stats"]["unique_graphs"], counters["compiled_autograd"]["captures"]
    with pytest.warns(AmpscopeWarning, match="No gradient is counted in compiled code"):
        losses, found = train(COMPILED_AUTOGRAD, tmp_path / "runs.db")
    assert counters["stats"]["unique_graphs"] == graphs
    assert counters["compiled_autograd"]["captures"] == captures > 0
    assert losses == pytest.approx(bare, rel=1e-6)
    assert found is not None
    assert found.at(Role.ACTIVATION) == [0, 2]
    assert not found.at(Role.GRAD_OUTPUT)


def test_code_is_compiled_while_a_watch_with_taps_is_open(tmp_path: Path) -> None:
    """torch.compile copies inductor's configuration, taps included."""
    torch._dynamo.reset()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    run = ampscope.watch(net, optimizer, store=tmp_path / "runs.db", every=1, taps=True)
    model = torch.compile(net, options={"fallback_random": True})
    model(torch.randn(4, WIDTH)).square().mean().backward()
    optimizer.step()
    run.close()
    found = recorded(run.store, run.id)
    (frame,) = found.frames[Role.GRAD_OUTPUT]
    assert "blocks.1.up" in [found.paths[m] for m in frame.modules]


def test_a_compiled_optimizer_step_is_not_seen_and_said(tmp_path: Path) -> None:
    torch._dynamo.reset()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, update = torch.compile(net), torch.compile(optimizer.step)
    run = ampscope.watch(model, optimizer, store=tmp_path / "runs.db", every=2, taps=True)

    def training() -> None:
        for _ in range(STEPS):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            update()

    with pytest.warns(AmpscopeWarning, match="no optimizer step is seen"):
        training()
    run.close()
    found = recorded(run.store, run.id)
    assert not found.steps
    assert any("Call optimizer.step() outside" in event.text for event in found.of("note"))
