"""How much memory a guest may take on the device of the training that it watches."""

from __future__ import annotations

import torch

MEMORY_SHARE = 0.005  # of the device's peak; two instruments hold that much at most
HOST_BYTES = 64 << 20  # where the peak is unknown (a CPU)


def free_bytes(device: torch.device) -> int:
    """What may be allocated without raising the device's peak by more than the share."""
    if device.type != "cuda":
        return HOST_BYTES
    peak = torch.cuda.max_memory_allocated(device)
    return peak - torch.cuda.memory_allocated(device) + int(MEMORY_SHARE * peak)


def held_bytes(device: torch.device) -> int:
    """What may be held on to through a backward pass, where the peak is."""
    if device.type != "cuda":
        return HOST_BYTES
    return int(MEMORY_SHARE * torch.cuda.max_memory_allocated(device))
