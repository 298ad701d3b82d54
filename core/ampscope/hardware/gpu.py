"""NVIDIA GPUs as NVML reads them at this moment.

    survey = read_gpus()
    survey.gpus[0].name          "NVIDIA H100 80GB HBM3"
    survey.gpus[0].power_w       118.4, or None where NVML says "Not Supported"
    survey.message               "" or one sentence why nothing could be read

A GPU that vanishes while it is read keeps what it had answered before and carries the reason in
``problem``. Meaning and unit of every question: NVIDIA's NVML API reference
(docs.nvidia.com/deploy/nvml-api).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ampscope.hardware.capability import TensorCoreInfo, tensor_cores
from ampscope.hardware.nvml import Conversation, GpuLostError, Nvml, NvmlStartError, conversation

# Constants of nvml.h, whose values are part of its ABI.
TEMPERATURE_GPU, CLOCK_SM, CLOCK_MEMORY = 0, 1, 2

# nvmlClocksEventReason*: why the clocks are not higher. Idle is a reason and no throttling.
IDLE = "idle"
CLOCK_REASONS: tuple[tuple[int, str], ...] = (
    (0x001, IDLE),
    (0x002, "application clocks setting"),
    (0x004, "power cap"),
    (0x008, "hardware slowdown"),
    (0x010, "sync boost"),
    (0x020, "software thermal slowdown"),
    (0x040, "hardware thermal slowdown"),
    (0x080, "power brake"),
    (0x100, "display clock setting"),
)

NO_GPU = "The NVIDIA driver is loaded, but it sees no GPU."


@dataclass(frozen=True, slots=True)
class MigSlice:
    """One MIG device: a hardware partition with its own memory, which CUDA sees as a GPU."""

    index: int
    name: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU; None means that NVML does not support or did not answer that question."""

    index: int
    name: str | None = None
    capability: str | None = None  # "9.0"
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    gpu_busy_percent: int | None = None  # share of the last sample period with a kernel running
    memory_busy_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_reasons: tuple[str, ...] | None = None  # words of CLOCK_REASONS
    mig_enabled: bool | None = None
    mig_slices: tuple[MigSlice, ...] = ()
    problem: str = ""  # one sentence when the GPU could not be read to the end

    @property
    def tensor_cores(self) -> TensorCoreInfo:
        """What the capability table says about it."""
        return tensor_cores(self.capability, self.name or "")

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """What holds the clocks down, idleness aside."""
        return tuple(reason for reason in self.clock_reasons or () if reason != IDLE)


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """All NVIDIA GPUs of the machine, in NVML's order (CUDA_VISIBLE_DEVICES does not apply)."""

    gpus: tuple[GpuReading, ...] = ()
    driver: str | None = None  # "580.65.06"
    cuda_driver: str | None = None  # newest CUDA that the driver runs, "13.0"
    message: str = ""


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _reasons(mask: int) -> tuple[str, ...]:
    return tuple(word for bit, word in CLOCK_REASONS if mask & bit)


# Field, the functions to try in order, their arguments after the handle, conversion of the answer.
_Question = tuple[str, tuple[str, ...], tuple[int, ...], Callable[[Any], object]]
_QUESTIONS: tuple[_Question, ...] = (
    ("name", ("nvmlDeviceGetName",), (), _text),
    ("capability", ("nvmlDeviceGetCudaComputeCapability",), (), lambda v: f"{v[0]}.{v[1]}"),
    ("memory_total_bytes", ("nvmlDeviceGetMemoryInfo",), (), lambda v: int(v.total)),
    ("memory_used_bytes", ("nvmlDeviceGetMemoryInfo",), (), lambda v: int(v.used)),
    ("gpu_busy_percent", ("nvmlDeviceGetUtilizationRates",), (), lambda v: int(v.gpu)),
    ("memory_busy_percent", ("nvmlDeviceGetUtilizationRates",), (), lambda v: int(v.memory)),
    ("temperature_c", ("nvmlDeviceGetTemperature",), (TEMPERATURE_GPU,), int),
    ("power_w", ("nvmlDeviceGetPowerUsage",), (), _watts),
    ("power_limit_w", ("nvmlDeviceGetEnforcedPowerLimit",), (), _watts),
    ("sm_clock_mhz", ("nvmlDeviceGetClockInfo",), (CLOCK_SM,), int),
    ("sm_clock_max_mhz", ("nvmlDeviceGetMaxClockInfo",), (CLOCK_SM,), int),
    ("memory_clock_mhz", ("nvmlDeviceGetClockInfo",), (CLOCK_MEMORY,), int),
    (
        "clock_reasons",  # the second name is that of drivers before 535
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        _reasons,
    ),
    ("mig_enabled", ("nvmlDeviceGetMigMode",), (), lambda v: v[0] == 1),  # [current, pending]
)


def cuda_version_text(number: int) -> str:
    """NVML's and CUDA's integer (1000 major + 10 minor) as text: 12040 -> "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def read_gpus(nvml: Nvml | None = None) -> GpuSurvey:
    """Ask NVML about every GPU; never raises. ``nvml`` takes the place of ``pynvml``."""
    try:
        with conversation(nvml) as talk:
            driver = talk.ask(("nvmlSystemGetDriverVersion",))
            cuda = talk.ask(("nvmlSystemGetCudaDriverVersion_v2", "nvmlSystemGetCudaDriverVersion"))
            count = talk.ask(("nvmlDeviceGetCount",)) or 0
            return GpuSurvey(
                gpus=tuple(read_gpu(talk, index) for index in range(count)),
                driver=None if driver is None else _text(driver),
                cuda_driver=None if cuda is None else cuda_version_text(cuda),
                message="" if count else NO_GPU,
            )
    except NvmlStartError as reason:
        return GpuSurvey(message=str(reason))
    except GpuLostError as gone:
        return GpuSurvey(message=f"The NVIDIA driver stopped answering ({gone}).")


def read_gpu(talk: Conversation, index: int) -> GpuReading:
    """Everything about GPU ``index``, as far as it gets; never raises."""
    fields: dict[str, Any] = {}
    try:
        handle = talk.handle(index)
        for field, functions, arguments, convert in _QUESTIONS:
            answer = talk.ask(functions, handle, *arguments)
            fields[field] = None if answer is None else convert(answer)
        if fields["mig_enabled"]:
            fields["mig_slices"] = _mig_slices(talk, handle)
    except GpuLostError as gone:
        fields["problem"] = f"GPU {index} does not answer ({gone}). Look at it with nvidia-smi."
    return GpuReading(index=index, **fields)


def _mig_slices(talk: Conversation, handle: Any) -> tuple[MigSlice, ...]:
    slices = []
    for index in range(talk.ask(("nvmlDeviceGetMaxMigDeviceCount",), handle) or 0):
        part = talk.ask(("nvmlDeviceGetMigDeviceHandleByIndex",), handle, index)
        if part is None:  # "Not Found": a place that no slice was made for
            continue
        name = talk.ask(("nvmlDeviceGetName",), part)
        memory = talk.ask(("nvmlDeviceGetMemoryInfo",), part)
        total, used = (None, None) if memory is None else (int(memory.total), int(memory.used))
        slices.append(MigSlice(index, None if name is None else _text(name), total, used))
    return tuple(slices)
