"""Energy counters: NVML's total energy of a GPU, RAPL's of a CPU package (Linux powercap)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

RAPL = Path("/sys/class/powercap/intel-rapl:0")  # package 0, also of AMD's processors since Zen
Counter: TypeAlias = Callable[[], float]  # joules since some moment


def energy_counter(device: torch.device, rapl: Path = RAPL) -> tuple[str, Counter] | None:
    """Name and reading of the device's counter; None where there is none that may be read."""
    return _nvml(device) if device.type == "cuda" else _powercap(rapl)


def _nvml(device: torch.device) -> tuple[str, Counter] | None:
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with contextlib.suppress(Exception):  # no NVML, no such GPU for it (MIG), or no counter
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)  # millijoules, from Volta on

        def read() -> float:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000

        return "NVML total energy", read
    return None


def _powercap(rapl: Path) -> tuple[str, Counter] | None:
    """Root alone may read it since Linux 5.10; the counter wraps, here at the range it states."""
    try:
        wraps_at = int((rapl / "max_energy_range_uj").read_text())
        last = int((rapl / "energy_uj").read_text())
    except (OSError, ValueError):
        return None
    wrapped = 0

    def read() -> float:
        nonlocal last, wrapped
        now = int((rapl / "energy_uj").read_text())
        wrapped += wraps_at if now < last else 0
        last = now
        return (wrapped + now) / 1e6

    return "RAPL, package 0", read
