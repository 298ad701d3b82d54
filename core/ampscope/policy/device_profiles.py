"""Devices that a rehearsal can stand in for, by the words of ``--as``.

>>> PROFILES["t4"].capability
(7, 5)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What a script can ask about the device that is stood in for."""

    name: str
    capability: tuple[int, int]
    memory_gib: int
    multiprocessors: int


# Names as the driver gives them; compute capabilities: developer.nvidia.com/cuda-gpus; memory and
# multiprocessors: NVIDIA's data sheets of each product.
PROFILES: Final = {
    "a100": DeviceProfile("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108),
    "h100": DeviceProfile("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "l4": DeviceProfile("NVIDIA L4", (8, 9), 24, 58),
    "rtx3090": DeviceProfile("NVIDIA GeForce RTX 3090", (8, 6), 24, 82),
    "rtx4090": DeviceProfile("NVIDIA GeForce RTX 4090", (8, 9), 24, 128),
    "t4": DeviceProfile("Tesla T4", (7, 5), 16, 40),
    "v100": DeviceProfile("Tesla V100-SXM2-16GB", (7, 0), 16, 80),
    "gtx1660": DeviceProfile("NVIDIA GeForce GTX 1660", (7, 5), 6, 22),
}
USUAL: Final = "a100"
