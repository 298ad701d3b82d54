"""How fast the device copies within its own memory, from a size that fits a cache upwards."""

from __future__ import annotations

import time

import torch

from ampscope.measure.interleaving import Stop, first_time, interleaved
from ampscope.records import Rate
from ampscope.store.writer import RunWriter

SERIES = "copy"
MIB = 2**20
# The largest is eight times the last cache of a large server CPU (32 MiB a core complex) and 20
# times that of an H100 (50 MiB): what it reaches is the memory's rate, not a cache's.
SIZES = {"cpu": (4 * MIB, 32 * MIB, 256 * MIB), "cuda": (16 * MIB, 128 * MIB, 1024 * MIB)}
FLOAT_BYTES = 4


def copies(device: torch.device, budget_s: float, writer: RunWriter, stop: Stop) -> list[Rate]:
    """Bytes read plus bytes written; a CPU that also reads each line before it writes it moves
    half as much again, which is not counted."""
    rates = []
    for size in SIZES[device.type]:
        count = size // FLOAT_BYTES
        timing, note = None, ""
        try:
            source = torch.randn(count, device=device)
            target = torch.empty_like(source)
        except RuntimeError:
            note = f"There was no room for two blocks of {size // MIB} MiB."
        else:

            def call(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
                target.copy_(source)

            took = first_time(call, device)
            timing = interleaved([(call, took)], device, budget_s / len(SIZES), stop)[0]
        rates.append(
            Rate(SERIES, "copy", "fp32", (count,), 0, 2 * size, timing, time.time(), note=note)
        )
        writer.add_result(rates[-1])
    writer.flush()
    return rates
