"""Everything that is known about this machine, in one frozen report. Takes milliseconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ampscope.hardware.accelerators import Accelerator, find_accelerators
from ampscope.hardware.cpu import CpuReading, read_cpu
from ampscope.hardware.gpu import GpuReading, GpuSurvey, read_gpus
from ampscope.hardware.nvml import Nvml
from ampscope.hardware.software import Software, read_software


@dataclass(frozen=True, slots=True)
class HardwareReport:
    """One look at the machine; the readings are those of ``read_at``."""

    read_at: float  # seconds since the epoch
    cpu: CpuReading
    nvidia: GpuSurvey
    accelerators: tuple[Accelerator, ...]
    software: Software

    @property
    def gpus(self) -> tuple[GpuReading, ...]:
        """The NVIDIA GPUs."""
        return self.nvidia.gpus


def describe_machine(nvml: Nvml | None = None) -> HardwareReport:
    """Look at this machine; never raises. ``nvml`` takes the place of ``pynvml``."""
    return HardwareReport(
        read_at=time.time(),
        cpu=read_cpu(),
        nvidia=read_gpus(nvml),
        accelerators=find_accelerators(),
        software=read_software(),
    )
