"""Small trainings for the tests of ampscope.watch, and what they leave in the store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import ampscope
from ampscope.records import Event, Frame, NonFiniteRecord, Role, RunInfo, StepRecord
from ampscope.store.reader import Reader


@dataclass
class Seen:
    """What a training itself knows of its steps."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


@dataclass
class Recorded:
    """What the store holds of a run."""

    info: RunInfo
    steps: list[StepRecord]
    events: list[Event]
    frames: dict[Role, list[Frame]]
    nonfinite: list[NonFiniteRecord]
    paths: list[str]

    def at(self, role: Role) -> list[int]:
        return [frame.step for frame in self.frames[role]]

    def of(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


def recorded(store: Path, run_id: str) -> Recorded:
    with Reader(store) as reader:
        return Recorded(
            reader.run(run_id),
            reader.steps(run_id),
            reader.events(run_id),
            {role: list(reader.frames(run_id, role)) for role in Role},
            list(reader.nonfinite(run_id)),
            [module.path for module in reader.modules(run_id)],
        )


def small_net() -> nn.Sequential:
    """Random numbers, and buffers that a forward changes."""
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )


def train_fp16(
    steps: int,
    watched: Callable[[nn.Module, object, object], AbstractContextManager[object]] | None = None,
    *,
    bad_at: tuple[int, ...] = (),
    init_scale: float = 1024.0,
    penalized: bool = False,
) -> tuple[nn.Module, Seen]:
    """fp16 autocast with a GradScaler; an input of 1e30 at the steps of ``bad_at``. ``penalized``:
    with a penalty of a scaled gradient's norm, and a clip."""
    torch.manual_seed(0)
    model, seen = small_net(), Seen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with watched(model, optimizer, scaler) if watched else nullcontext():
        for step in range(steps):
            inputs = torch.randn(16, 8)
            if step in bad_at:
                inputs = inputs * 1e30
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = (model(inputs).float() - 1).square().mean()
            seen.losses.append(float(loss.detach()))
            seen.scales.append(scaler.get_scale())
            if penalized:
                scaled = torch.autograd.grad(scaler.scale(loss), model[4].weight, create_graph=True)
                loss = loss + 0.1 * (scaled[0] / scaler.get_scale()).square().sum()
            scaler.scale(loss).backward()
            if penalized:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    seen.weights = [p.detach().clone() for p in model.parameters()]
    return model, seen


def train_bf16(
    steps: int, model: nn.Module, watched: AbstractContextManager[object] | None = None
) -> list[float]:
    """bf16 autocast without a scaler, two micro-batches a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    with watched or nullcontext():
        for _ in range(steps):
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(torch.randn(16, 8)).float().square().mean() / 2
                loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def watching(store: Path, **options: object) -> tuple[Callable[..., ampscope.Watch], list[str]]:
    """A ``watched`` for :func:`train_fp16`, and a list that gets the run's id."""
    ids: list[str] = []

    def watched(model: nn.Module, optimizer: object, scaler: object) -> ampscope.Watch:
        run = ampscope.watch(model, optimizer, scaler, store=store, **options)
        ids.append(run.id)
        return run

    return watched, ids
