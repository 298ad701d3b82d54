"""A small model, and what an op trace saw of it in a form that can be written down."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from ampscope.records import OpRecord

Seen = dict[tuple[str, str, str, str, str], int]  # path, phase, op, inputs, outputs -> count


class Two(nn.Module):
    """Linear, GELU, LayerNorm, Linear: 4 -> 3 -> 3 -> 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.last = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(F.gelu(self.first(x))))
        return out


def traced(model: nn.Module, run: Callable[[], object]) -> tuple[Seen, list[OpRecord]]:
    names = ModelMap(model)
    trace = OpTrace(names)
    with trace:
        run()
    _, records = trace.take()
    paths = {record.index: record.path for record in names.records()}
    seen = {(paths[r.module], r.phase, r.op, r.inputs, r.outputs): r.count for r in records}
    return seen, records


def step(model: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Callable[[], None]:
    def run() -> None:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x).float().sum()
        loss.backward()

    return run


def of(seen: Seen, op: str) -> Seen:
    return {key: count for key, count in seen.items() if key[2] == op}
