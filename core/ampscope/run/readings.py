"""The machine's readings beside a run on a torch device: which GPU that is, and who reads it."""

from __future__ import annotations

from pathlib import Path

import torch

from ampscope.telemetry.beside import Readings, beside

NO_AMD = "An AMD GPU is not read beside a run: that needs NVIDIA's NVML."


def read_beside(
    store: Path, run_id: str, device: torch.device, *, as_child: bool = True
) -> Readings:
    """Start reading beside the run of this process (see ampscope.telemetry.beside)."""
    if device.type == "cuda" and torch.version.hip:
        readings = beside(store, run_id, "cpu", as_child=as_child)
        readings.note = readings.note or NO_AMD
        return readings
    return beside(store, run_id, str(device), uuid_of(device), as_child=as_child)


def uuid_of(device: torch.device) -> str:
    """What NVML knows the GPU by; empty for a CPU. torch's own number counts the GPUs that
    CUDA_VISIBLE_DEVICES leaves, in CUDA's order."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
