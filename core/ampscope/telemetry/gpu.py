"""An NVIDIA GPU as NVML reads it. Units and meanings: NVIDIA's NVML API reference
(docs.nvidia.com/deploy/nvml-api).

torch's ``cuda:0`` is the first of CUDA_VISIBLE_DEVICES and, without CUDA_DEVICE_ORDER, the fastest;
NVML counts all GPUs in the order of the bus. Only the UUID names the same GPU to both.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ampscope.hardware.gpu import (
    IDLE,
    Conversation,
    GpuLostError,
    Nvml,
    NvmlStartError,
    answer,
    conversation,
)
from ampscope.telemetry.own_processes import descends
from ampscope.telemetry.values import SLOW_EVERY_S, DeviceLost, SampleValues

PCIE_TX, PCIE_RX = 0, 1  # nvmlPcieUtilCounter_t; TX is what the GPU sends
# The driver counts bytes for 20 ms and the caller waits, so the two directions are read at two
# readings, once a second each.
PCIE_APART_S = SLOW_EVERY_S / 2
KILO = 1000  # "in KB/s"


class GpuReader:
    """The GPU with ``uuid``, a slice of one too, under torch's name ``device``."""

    def __init__(
        self, device: str, uuid: str, pid: int, nvml: Nvml | None = None, *, pcie: bool = True
    ) -> None:
        """Raises DeviceLost when NVML or the GPU cannot be used."""
        self.device = device
        self._pid = pid
        self._slow: SampleValues = {}
        self._next_processes = 0.0
        self._next_pcie = 0.0 if pcie else float("inf")
        self._counter = PCIE_RX
        self._stack = contextlib.ExitStack()
        try:
            self._talk: Conversation = self._stack.enter_context(conversation(nvml))
            self._gpu = self._handle(uuid)
        except (NvmlStartError, GpuLostError) as error:
            self._stack.close()
            reason = str(error).rstrip(".")
            raise DeviceLost(f"{device} could not be read beside the run: {reason}.") from error

    def read(self, now: float) -> SampleValues:
        """One reading. Raises DeviceLost when the GPU has vanished."""
        try:
            if now >= self._next_processes:
                self._read_processes()
                self._next_processes = now + SLOW_EVERY_S
            if now >= self._next_pcie:
                self._read_pcie()
                self._next_pcie = now + PCIE_APART_S
            return {**self._read_fast(), **self._slow}
        except GpuLostError as gone:
            reason = str(gone).rstrip(".")
            raise DeviceLost(f"{self.device} stopped answering NVML ({reason}).") from gone

    def close(self) -> None:
        """End the conversation."""
        self._stack.close()

    def _handle(self, uuid: str) -> Any:
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        for name in names:
            handle = self._talk.ask(("nvmlDeviceGetHandleByUUID",), name)
            if handle is not None:
                return handle
        raise GpuLostError(f"NVML knows no GPU {uuid}" if uuid else "torch does not name the GPU")

    def _read_fast(self) -> SampleValues:
        def read(field: str) -> Any:
            return answer(self._talk, self._gpu, field)

        energy = self._talk.ask(("nvmlDeviceGetTotalEnergyConsumption",), self._gpu)
        return {
            "busy_percent": read("gpu_busy_percent"),
            "memory_used_bytes": read("memory_used_bytes"),
            "power_w": read("power_w"),
            "energy_j": None if energy is None else energy / 1000,
            "temperature_c": read("temperature_c"),
            "clock_mhz": read("sm_clock_mhz"),
            "memory_clock_mhz": read("memory_clock_mhz"),
            # Idleness is no reason that holds a clock down.
            "clock_reasons": ",".join(r for r in read("clock_reasons") or () if r != IDLE),
        }

    def _read_pcie(self) -> None:
        rate = self._talk.ask(("nvmlDeviceGetPcieThroughput",), self._gpu, self._counter)
        value = None if rate is None else float(rate * KILO)
        if self._counter == PCIE_RX:
            self._slow["pcie_rx_bytes_s"], self._counter = value, PCIE_TX
        else:
            self._slow["pcie_tx_bytes_s"], self._counter = value, PCIE_RX

    def _read_processes(self) -> None:
        """Who has memory on the GPU. In a container NVML names processes by numbers that mean
        nothing there; then the run's own is not among them, and nothing is claimed."""
        found = self._talk.ask(
            (
                "nvmlDeviceGetComputeRunningProcesses",
                "nvmlDeviceGetComputeRunningProcesses_v2",
            ),
            self._gpu,
        )
        own = [process for process in found or () if descends(process.pid, self._pid)]
        known = [process.usedGpuMemory for process in own if process.usedGpuMemory is not None]
        self._slow["own_memory_bytes"] = sum(known) if known else None
        if found is None or not own:
            self._slow["other_processes"] = None
        else:
            others = {p.pid for p in found} - {p.pid for p in own} - {os.getpid()}
            self._slow["other_processes"] = len(others)
