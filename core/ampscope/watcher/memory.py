"""How much memory a guest may take on the device of the training that it watches."""

from __future__ import annotations

import torch

MEMORY_SHARE = 0.005  # of the device's peak; two instruments hold that much at most
HOST_BYTES = 64 << 20  # where the peak is unknown (a CPU)


def free_bytes(device: torch.device, step_bytes: int) -> int:
    """What may be allocated before an optimizer's step without raising the device's peak by more
    than the share; the step itself may take ``step_bytes`` besides (temporaries as large as the
    parameters, in torch's foreach optimizers)."""
    if device.type != "cuda":
        return HOST_BYTES
    peak = torch.cuda.max_memory_allocated(device)
    free = peak - torch.cuda.memory_allocated(device) - step_bytes
    return max(0, free) + int(MEMORY_SHARE * peak)


def held_bytes(device: torch.device) -> int:
    """What may be held on to through a backward pass, where the peak is."""
    if device.type != "cuda":
        return HOST_BYTES
    return int(MEMORY_SHARE * torch.cuda.max_memory_allocated(device))


def input_bytes(device: torch.device) -> int:
    """What inputs of earlier calls may be held on to besides the newest one's."""
    return 4 * held_bytes(device)
