"""A stand-in for ``pynvml`` that answers from a table. **Not a recording of a real GPU**: units,
types and refusals are those that NVIDIA's NVML API reference documents for each call (power in mW,
memory in bytes, clocks in MHz, utilisation in percent), the magnitudes are plausible ones.

``Refusal(code)`` as an answer raises NVMLError with that code of nvmlReturn_t.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

NO_PERMISSION, NOT_FOUND, NOT_SUPPORTED, DRIVER_NOT_LOADED = 4, 6, 3, 9
LIBRARY_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 12, 15, 18, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass(frozen=True)
class Refusal:
    code: int


GIB = 2**30
H100: Mapping[str, object] = {
    "nvmlDeviceGetName": "NVIDIA H100 80GB HBM3",
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=80 * GIB, free=78 * GIB, used=2 * GIB),
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=37, memory=12),
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetPowerUsage": 118_400,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetClockInfo": {1: 1755, 2: 2619},
    "nvmlDeviceGetMaxClockInfo": {1: 1980},
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetMigMode": [0, 0],
}
# A GeForce in a laptop: no MIG, no power limit; bytes for text as nvidia-ml-py before 11.515 gave.
GTX_1660_TI: Mapping[str, object] = {
    **H100,
    "nvmlDeviceGetName": b"NVIDIA GeForce GTX 1660 Ti",
    "nvmlDeviceGetCudaComputeCapability": (7, 5),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=6 * GIB, free=5 * GIB, used=1 * GIB),
    "nvmlDeviceGetEnforcedPowerLimit": Refusal(NOT_SUPPORTED),
    "nvmlDeviceGetCurrentClocksEventReasons": Refusal(NOT_SUPPORTED),
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x1,
    "nvmlDeviceGetMigMode": Refusal(NOT_SUPPORTED),
}
# "Utilization … not supported on MIG-enabled devices" (NVML API reference); two of seven places.
_SLICE = {"nvmlDeviceGetName": "NVIDIA A100 MIG 3g.20gb"}
A100_MIG: Mapping[str, object] = {
    **H100,
    "nvmlDeviceGetName": "NVIDIA A100-SXM4-40GB",
    "nvmlDeviceGetCudaComputeCapability": (8, 0),
    "nvmlDeviceGetUtilizationRates": Refusal(NOT_SUPPORTED),
    "nvmlDeviceGetMigMode": [1, 1],
    "nvmlDeviceGetMaxMigDeviceCount": 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": {
        0: {**_SLICE, "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=20 * GIB, used=GIB)},
        2: {**_SLICE, "nvmlDeviceGetMemoryInfo": Refusal(NO_PERMISSION)},
    },
}
SYSTEM: Mapping[str, object] = {
    "nvmlSystemGetDriverVersion": "580.65.06",
    "nvmlSystemGetCudaDriverVersion_v2": 13000,
}


@dataclass
class ReplayedNvml:
    """``pynvml`` for the given GPUs; ``lost_at`` is (GPU, function) from which on it is lost."""

    gpus: tuple[Mapping[str, object], ...] = ()
    system: Mapping[str, object] = field(default_factory=lambda: SYSTEM)
    start: object = None
    lost_at: tuple[int, str] | None = None
    depth: int = 0  # nvmlInit minus nvmlShutdown
    NVMLError = NVMLError

    def nvmlInit(self) -> None:  # noqa: N802
        if isinstance(self.start, Refusal):
            raise NVMLError(self.start.code)
        self.depth += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.depth -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Mapping[str, object]:  # noqa: N802
        if self.lost_at == (index, "nvmlDeviceGetHandleByIndex"):
            raise NVMLError(GPU_IS_LOST)
        return self.gpus[index]

    def __getattr__(self, function: str) -> Callable[..., object]:
        known = {"nvmlDeviceGetCount", *self.system}.union(*self.gpus)
        if function not in known:
            raise AttributeError(function)  # as an nvidia-ml-py that lacks the function
        return lambda *arguments: self._answer(function, *arguments)

    def _answer(self, function: str, *arguments: object) -> object:
        assert self.depth == 1, "asked outside nvmlInit and nvmlShutdown"
        if function == "nvmlDeviceGetCount" and function not in self.system:
            return len(self.gpus)
        if not arguments:
            return _given(self.system[function])
        gpu = arguments[0]
        assert isinstance(gpu, Mapping)
        lost = self.lost_at is not None and gpu is self.gpus[self.lost_at[0]]
        if lost and function == self.lost_at[1]:
            raise NVMLError(GPU_IS_LOST)
        answer = gpu.get(function, Refusal(NOT_SUPPORTED))
        if len(arguments) == 2 and isinstance(answer, dict):
            answer = answer.get(arguments[1], Refusal(NOT_FOUND))
        return _given(answer)


def _given(answer: object) -> object:
    if isinstance(answer, Refusal):
        raise NVMLError(answer.code)
    return answer
