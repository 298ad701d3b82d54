"""Looks at tensors outside the ops: parameters, buffers and batches at the start and at the end."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._mode_utils import no_dispatch

from ampscope.capture.script.op_facts import first_bad_index
from ampscope.capture.tensors import HALF, holds_numbers, plain
from ampscope.formats import dtype_name
from ampscope.observations import Scan

SAMPLE = 512  # values kept of a half-precision buffer: enough to see a table's coarse steps
PLACES = 64  # of a parameter, at which its way over the run is kept


def scan(
    moment: str,
    kind: str,
    name: str,
    tensor: Tensor,
    attempt: int = 0,
    first: Tensor | None = None,
) -> Scan:
    """Facts about one floating-point tensor; ``first`` is what it was at its first sight."""
    with no_dispatch():  # what ampscope computes is none of the script's ops
        return _scan(moment, kind, name, tensor, attempt, first)


def _scan(
    moment: str, kind: str, name: str, values: Tensor, attempt: int, first: Tensor | None
) -> Scan:
    numbers = plain(values).detach()
    finite = torch.isfinite(numbers)
    nan, infinite = int(torch.isnan(numbers).sum()), int(torch.isinf(numbers).sum())
    kept = numbers[finite].float()
    half_buffer = values.dtype in HALF and kind == "buffer" and values.numel() > 1
    return Scan(
        moment=moment,
        kind=kind,
        name=name,
        dtype=dtype_name(values.dtype),
        total=values.numel(),
        nan=nan,
        inf=infinite,
        max_abs=float(kept.abs().max()) if kept.numel() else None,
        attempt=attempt,
        change=None if first is None else relative_change(numbers, first),
        distinct=int(torch.unique(numbers).numel()) if half_buffer else None,
        sample=_sample(values) if kind == "buffer" and moment == "start" else (),
        std=float(kept.std()) if kept.numel() > 1 else None,
        index=first_bad_index(numbers) if nan or infinite else (),
        displacement=() if first is None else _displacement(numbers, first),
    )


def scan_model(moment: str, model: nn.Module, trained: set[int], attempt: int) -> list[Scan]:
    """Parameters (``frozen`` when no optimizer has them) and buffers of a model."""
    found = [
        scan(moment, "parameter" if id(p) in trained else "frozen", name, p, attempt)
        for name, p in model.named_parameters()
        if holds_numbers(p)
    ]
    found += [
        scan(moment, "buffer", name, b, attempt)
        for name, b in model.named_buffers()
        if b.is_floating_point() and b.numel() and holds_numbers(b)
    ]
    return found


def relative_change(now: Tensor, first: Tensor) -> float | None:
    """|now - first| / |first| in 2-norms; None when the first sight was zero."""
    before, after = plain(first).double(), plain(now.detach()).double()
    length = float(torch.linalg.vector_norm(before))
    return float(torch.linalg.vector_norm(after - before)) / length if length else None


def _displacement(now: Tensor, first: Tensor) -> tuple[float, ...]:
    """How far some of the values came, in five digits."""
    step = max(1, now.numel() // PLACES)
    ends = (plain(t).flatten()[::step][:PLACES].double() for t in (now, first))
    after, before = ends
    return tuple(float(f"{x:.4e}") for x in (after - before).tolist())


def _sample(values: Tensor) -> tuple[float, ...]:
    flat = plain(values).detach().flatten().float()
    step = max(1, flat.numel() // SAMPLE)
    return tuple(flat[::step][:SAMPLE].tolist())
