"""A model whose third step overflows in a known op, trained under ampscope.watch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import ampscope


class Overflowing(nn.Module):
    """Its second layer leaves fp16 when the input is large: 2^12 * 2^6 = 2^18 > 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.first.weight.copy_(torch.eye(4))
            self.second.weight.fill_(64.0)

    def forward(self, inputs: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        hidden = self.drop(self.norm(inputs)) * 0 + self.first(inputs) * factor
        return self.second(hidden)


def overflow(
    store: Path, **options: object
) -> tuple[ampscope.Watch, Overflowing, list[torch.Tensor]]:
    """Step 2 overflows in ``second``. Returns the outputs as well."""
    torch.manual_seed(0)
    model, outputs = Overflowing(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    run = ampscope.watch(model, optimizer, scaler, store=store, policy="ignore", **options)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            output = model(torch.ones(8, 4) + torch.rand(8, 4), factor=4096.0 if step == 2 else 1.0)
        outputs.append(output.detach().clone())
        scaler.scale(output.float().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return run, model, outputs
