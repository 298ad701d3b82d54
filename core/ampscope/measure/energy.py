"""Energy counters: NVML's total energy of a GPU, RAPL's of a CPU package (Linux powercap)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

RAPL = Path("/sys/class/powercap/intel-rapl:0")  # package 0, also of AMD's processors since Zen
TICK_WAIT_S = 0.5  # for a counter that stands still
NO_ENERGY = "Energy was not measured: no counter that may be read here."
NO_ENERGY_OF_A_SLICE = (
    "Energy was not measured: NVML counts that of a whole GPU, and this is a MIG slice of one."
)
Counter: TypeAlias = Callable[[], float]  # joules since some moment


def energy_counter(device: torch.device, rapl: Path = RAPL) -> tuple[str, Counter] | None:
    """Name and reading of the device's counter; None where there is none that may be read."""
    return _nvml(device) if device.type == "cuda" else _powercap(rapl)


def why_none(device: torch.device) -> str:
    """One sentence on a device without a counter."""
    is_slice = device.type == "cuda" and not _handle("GPU-", device) and _handle("MIG-", device)
    return NO_ENERGY_OF_A_SLICE if is_slice else NO_ENERGY


def _nvml(device: torch.device) -> tuple[str, Counter] | None:
    handle = _handle("GPU-", device)
    with contextlib.suppress(Exception):  # no such GPU for NVML, or no counter
        import pynvml

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


def _handle(prefix: str, device: torch.device) -> Any:
    """NVML's for the GPU or the slice; None where it knows no such one, or is not there."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    named = uuid if uuid.startswith(("GPU-", "MIG-")) else f"{prefix}{uuid}"
    if not named.startswith(prefix):
        return None
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(named.encode())
    return None


def energy_of(step: Callable[[], object], read: Counter, seconds: float) -> tuple[float, int]:
    """Joules and number of steps in at least so many seconds, from one tick of the counter to
    another: what it shows is up to 0.1 s old. What the device draws when idle is in it."""
    first, ends = read(), time.monotonic() + TICK_WAIT_S
    while read() == first and time.monotonic() < ends:
        time.sleep(0.001)
    before = last = read()
    began, steps = time.monotonic(), 0
    while True:
        step()
        steps += 1
        now, elapsed_s = read(), time.monotonic() - began
        if elapsed_s >= seconds and (now != last or elapsed_s >= seconds + TICK_WAIT_S):
            return now - before, steps
        last = now
