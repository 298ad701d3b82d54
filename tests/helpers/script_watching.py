"""The instruments of an untouched script around a test, and a small training to watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from ampscope.capture.script.call_log import CallLog
from ampscope.capture.script.calls import Calls
from ampscope.capture.script.module_paths import ModulePaths
from ampscope.capture.script.op_watch import OpWatch
from ampscope.capture.script.optimizer_steps import OptimizerSteps
from ampscope.source_lines import SourceLines


@dataclass(frozen=True, slots=True)
class Watched:
    """What was recorded."""

    watch: OpWatch
    steps: OptimizerSteps
    log: CallLog

    def names(self, *, nested: bool = False) -> list[str]:
        """Names of the logged calls, the nested ones only when asked for."""
        return [c.name for c in self.log.calls if nested or not c.nested]


@contextmanager
def watched(budget: int = 100_000) -> Iterator[Watched]:
    """Everything that watches a script, for the body."""
    lines, paths = SourceLines(), ModulePaths()
    watch = OpWatch(paths, lines, budget)
    calls = Calls(lines)
    steps = OptimizerSteps(calls, watch.taint_of, watch.writes, ended=watch.new_step)
    log = CallLog(calls, watch, steps)
    with paths, log, watch:
        yield Watched(watch, steps, log)


def scaler(scale: float = 1024.0, **settings: object) -> torch.amp.GradScaler:
    """A GradScaler for the CPU."""
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def batch(step: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Inputs [16, 4] and targets [16, 1] that differ from step to step."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=made)
    return x, size * (1 + step) * torch.randn(16, 1, generator=made)


def small_net(seed: int = 0) -> nn.Sequential:
    """4 -> 8 -> 1 with a ReLU."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, grad_scaler: torch.amp.GradScaler,
    before_step: Callable[[int], None] = lambda step: None, steps: int = 6,
) -> None:  # fmt: skip
    """The usual loop; ``before_step`` is the script's own code between backward and step."""
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        grad_scaler.scale(mse_loss(model(x), y)).backward()
        before_step(step)
        grad_scaler.step(optimizer)
        grad_scaler.update()


def weights_of(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
