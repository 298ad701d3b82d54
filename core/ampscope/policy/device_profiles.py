"""Devices that a rehearsal can stand in for, by the words of ``--as``.

>>> profile_of("RTX 4090").capability
(8, 9)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from ampscope.errors import BadInput
from ampscope.hardware.capability import CAPABILITIES

_GIB: Final = 2**30
_UNKNOWN_GIB: Final = 16  # told to a script that asks how much memory a capability has


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What a script can ask about the device that is stood in for."""

    name: str
    capability: tuple[int, int]
    memory_gib: int | None  # None: not known
    multiprocessors: int

    @property
    def memory_bytes(self) -> int:
        """Of the whole device; 16 GiB where it is not known."""
        return (_UNKNOWN_GIB if self.memory_gib is None else self.memory_gib) * _GIB


class SimulatedDevice(Protocol):
    """What makes a script find the device."""

    on_half: Callable[[], bool] | None  # called when half precision takes part, until it is True
    was_used: bool  # something was put on the device
    rounded: dict[str, None]  # names of ops in half that were computed in fp32


# Names as the driver gives them; compute capabilities: developer.nvidia.com/cuda-gpus; memory and
# multiprocessors: NVIDIA's data sheets of each product.
PROFILES: Final = {
    "a100": DeviceProfile("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108),
    "a100-40gb": DeviceProfile("NVIDIA A100-SXM4-40GB", (8, 0), 40, 108),
    "a30": DeviceProfile("NVIDIA A30", (8, 0), 24, 56),
    "a10": DeviceProfile("NVIDIA A10", (8, 6), 24, 72),
    "a10g": DeviceProfile("NVIDIA A10G", (8, 6), 24, 80),
    "a40": DeviceProfile("NVIDIA A40", (8, 6), 48, 84),
    "rtxa4000": DeviceProfile("NVIDIA RTX A4000", (8, 6), 16, 48),
    "rtxa5000": DeviceProfile("NVIDIA RTX A5000", (8, 6), 24, 64),
    "rtxa6000": DeviceProfile("NVIDIA RTX A6000", (8, 6), 48, 84),
    "rtx3060": DeviceProfile("NVIDIA GeForce RTX 3060", (8, 6), 12, 28),
    "rtx3070": DeviceProfile("NVIDIA GeForce RTX 3070", (8, 6), 8, 46),
    "rtx3080": DeviceProfile("NVIDIA GeForce RTX 3080", (8, 6), 10, 68),
    "rtx3090": DeviceProfile("NVIDIA GeForce RTX 3090", (8, 6), 24, 82),
    "orin": DeviceProfile("Orin", (8, 7), None, 16),
    "l4": DeviceProfile("NVIDIA L4", (8, 9), 24, 58),
    "l40s": DeviceProfile("NVIDIA L40S", (8, 9), 48, 142),
    "rtx4060": DeviceProfile("NVIDIA GeForce RTX 4060", (8, 9), 8, 24),
    "rtx4070": DeviceProfile("NVIDIA GeForce RTX 4070", (8, 9), 12, 46),
    "rtx4080": DeviceProfile("NVIDIA GeForce RTX 4080", (8, 9), 16, 76),
    "rtx4090": DeviceProfile("NVIDIA GeForce RTX 4090", (8, 9), 24, 128),
    "rtx6000ada": DeviceProfile("NVIDIA RTX 6000 Ada Generation", (8, 9), 48, 142),
    "h100": DeviceProfile("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "h200": DeviceProfile("NVIDIA H200", (9, 0), 141, 132),
    "b200": DeviceProfile("NVIDIA B200", (10, 0), 180, 148),
    "rtx5080": DeviceProfile("NVIDIA GeForce RTX 5080", (12, 0), 16, 84),
    "rtx5090": DeviceProfile("NVIDIA GeForce RTX 5090", (12, 0), 32, 170),
    "p100": DeviceProfile("Tesla P100-PCIE-16GB", (6, 0), 16, 56),
    "gtx1080ti": DeviceProfile("NVIDIA GeForce GTX 1080 Ti", (6, 1), 11, 28),
    "v100": DeviceProfile("Tesla V100-SXM2-16GB", (7, 0), 16, 80),
    "v100-32gb": DeviceProfile("Tesla V100-SXM2-32GB", (7, 0), 32, 80),
    "t4": DeviceProfile("Tesla T4", (7, 5), 16, 40),
    "gtx1650": DeviceProfile("NVIDIA GeForce GTX 1650", (7, 5), 4, 14),
    "gtx1660": DeviceProfile("NVIDIA GeForce GTX 1660", (7, 5), 6, 22),
    "gtx1660ti": DeviceProfile("NVIDIA GeForce GTX 1660 Ti", (7, 5), 6, 24),
    "rtx2060": DeviceProfile("NVIDIA GeForce RTX 2060", (7, 5), 6, 30),
    "rtx2070": DeviceProfile("NVIDIA GeForce RTX 2070", (7, 5), 8, 36),
    "rtx2080": DeviceProfile("NVIDIA GeForce RTX 2080", (7, 5), 8, 46),
    "rtx2080ti": DeviceProfile("NVIDIA GeForce RTX 2080 Ti", (7, 5), 11, 68),
    "titanrtx": DeviceProfile("NVIDIA TITAN RTX", (7, 5), 24, 72),
}
USUAL: Final = "a100"
_MAKER: Final = re.compile(r"nvidia|geforce|tesla|[^a-z0-9.]")
_NUMBER: Final = re.compile(r"(?:sm_?)?(\d{1,2})\.?(\d)")


def key_of(words: str) -> str:
    """The word of ``--as`` for a device as people write it: a key of :data:`PROFILES`, the name
    that the driver gives, or a compute capability, such as ``8.6`` or ``sm_86``.

    Raises BadInput, which lists what there is.

    >>> key_of("NVIDIA GeForce RTX 3090"), key_of("sm_86"), key_of("Tesla T4")
    ('rtx3090', '8.6', 't4')
    """
    bare = _bare(words)
    for key, profile in PROFILES.items():
        if bare in (_bare(key), _bare(profile.name)):
            return key
    number = _NUMBER.fullmatch(words.strip().lower())
    if number is not None and _architecture(f"{number[1]}.{number[2]}"):
        return f"{number[1]}.{number[2]}"
    rows = ", ".join(row.capability for row in CAPABILITIES)
    raise BadInput(
        f"There is no device {words[:60]!r} to rehearse. Use one of: "
        f"{', '.join(sorted(PROFILES))}; "
        f"or a compute capability: {rows}."
    )


def profile_of(words: str) -> DeviceProfile:
    """The device that is meant by ``words`` (see :func:`key_of`); "" is the usual one.

    Raises BadInput.
    """
    key = key_of(words or USUAL)
    if key in PROFILES:
        return PROFILES[key]
    major, minor = map(int, key.split("."))
    name = f"NVIDIA GPU of compute capability {key} ({_architecture(key)})"
    return DeviceProfile(name, (major, minor), None, 64)


def _bare(words: str) -> str:
    return _MAKER.sub("", words.lower())


def _architecture(capability: str) -> str:
    """Of the table of Tensor Cores; "" where it has no such row."""
    for row in CAPABILITIES:
        if row.capability in (capability, f"{capability.partition('.')[0]}.x"):
            return row.architecture
    return ""
