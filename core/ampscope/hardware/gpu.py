"""NVIDIA GPUs as NVML reads them at this moment.

    survey = read_gpus()
    survey.gpus[0].name          "NVIDIA H100 80GB HBM3"
    survey.gpus[0].power_w       118.4, or None where NVML says "Not Supported"
    survey.message               "" or one sentence why nothing could be read

A GPU that vanishes while it is read keeps what it had answered before and carries the reason in
``problem``. Meaning and unit of every question: NVIDIA's NVML API reference
(docs.nvidia.com/deploy/nvml-api).

AMD's, Apple's and Intel's GPUs are named (:func:`find_accelerators`), and no more than that.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ampscope.hardware.capability import TensorCoreInfo, tensor_cores

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

# A container without the driver's "utility" part has CUDA without NVML, and so have Jetsons: the
# device file of the driver, and Tegra's.
DEVICE_FILES = ("nvidia[0-9]*", "nvhost-gpu")
UNREAD = " {} is here, so torch may see a GPU all the same; its readings are missing."

NO_GPU = "The NVIDIA driver is loaded, but it sees no GPU."
# The GPU is lost, requires a reset, or was not found: it answers nothing more.
GONE_CODES = frozenset({15, 16, 28})

NO_LIBRARY = 12
INIT_SENTENCES: dict[int, str] = {
    4: "The NVIDIA driver refuses access: this user, or this container, has no permission.",
    9: "The NVIDIA driver is installed but not loaded: load its kernel module or restart.",
    NO_LIBRARY: "No NVIDIA driver was found (no NVML library).",
    18: "The NVIDIA library and its kernel module differ in version: restart the machine.",
}


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """All NVIDIA GPUs of the machine, in NVML's order (CUDA_VISIBLE_DEVICES does not apply)."""

    gpus: tuple[GpuReading, ...] = ()
    driver: str | None = None  # "580.65.06"
    cuda_driver: str | None = None  # newest CUDA that the driver runs, "13.0"
    message: str = ""
    unread: str = ""  # device file of an NVIDIA GPU that there is no NVML to ask about


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
class MigSlice:
    """One MIG device: a hardware partition with its own memory, which CUDA sees as a GPU."""

    index: int
    name: str | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None


def read_gpus(nvml: Nvml | None = None, root: Path = Path("/")) -> GpuSurvey:
    """Ask NVML about every GPU; never raises. ``nvml`` takes the place of ``pynvml``; ``root`` is
    where /dev is."""
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
        file = _device_file(root) if reason.has_no_nvml else ""
        return GpuSurvey(message=f"{reason}{UNREAD.format(file) if file else ''}", unread=file)
    except GpuLostError as gone:
        return GpuSurvey(message=f"The NVIDIA driver stopped answering ({gone}).")


def _device_file(root: Path) -> str:
    """What CUDA opens to reach a GPU; "" where there is none."""
    found = sorted(path for name in DEVICE_FILES for path in (root / "dev").glob(name))
    return f"/dev/{found[0].name}" if found else ""


def cuda_version_text(number: int) -> str:
    """NVML's and CUDA's integer (1000 major + 10 minor) as text: 12040 -> "12.4"."""
    return f"{number // 1000}.{number % 1000 // 10}"


def read_gpu(talk: Conversation, index: int) -> GpuReading:
    """Everything about GPU ``index``, as far as it gets; never raises."""
    fields: dict[str, Any] = {}
    try:
        handle = talk.handle(index)
        for field in _QUESTIONS:
            fields[field] = answer(talk, handle, field)
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
        name, *memory = (
            answer(talk, part, field)
            for field in ("name", "memory_total_bytes", "memory_used_bytes")
        )
        slices.append(MigSlice(index, name, *memory))
    return tuple(slices)


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


# By field of GpuReading: the functions to try in order, their arguments after the handle,
# conversion of the answer.
_QUESTIONS: dict[str, tuple[tuple[str, ...], tuple[int, ...], Callable[[Any], object]]] = {
    "name": (("nvmlDeviceGetName",), (), _text),
    "capability": (("nvmlDeviceGetCudaComputeCapability",), (), lambda v: f"{v[0]}.{v[1]}"),
    "memory_total_bytes": (("nvmlDeviceGetMemoryInfo",), (), lambda v: int(v.total)),
    "memory_used_bytes": (("nvmlDeviceGetMemoryInfo",), (), lambda v: int(v.used)),
    "gpu_busy_percent": (("nvmlDeviceGetUtilizationRates",), (), lambda v: int(v.gpu)),
    "memory_busy_percent": (("nvmlDeviceGetUtilizationRates",), (), lambda v: int(v.memory)),
    "temperature_c": (("nvmlDeviceGetTemperature",), (TEMPERATURE_GPU,), int),
    "power_w": (("nvmlDeviceGetPowerUsage",), (), lambda milliwatts: milliwatts / 1000),
    "power_limit_w": (
        ("nvmlDeviceGetEnforcedPowerLimit",),
        (),
        lambda milliwatts: milliwatts / 1000,
    ),
    "sm_clock_mhz": (("nvmlDeviceGetClockInfo",), (CLOCK_SM,), int),
    "sm_clock_max_mhz": (("nvmlDeviceGetMaxClockInfo",), (CLOCK_SM,), int),
    "memory_clock_mhz": (("nvmlDeviceGetClockInfo",), (CLOCK_MEMORY,), int),
    "clock_reasons": (  # the second name is that of drivers before 535
        ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"),
        (),
        lambda mask: tuple(word for bit, word in CLOCK_REASONS if mask & bit),
    ),
    "mig_enabled": (("nvmlDeviceGetMigMode",), (), lambda v: v[0] == 1),  # [current, pending]
}


def answer(talk: Conversation, gpu: Any, field: str) -> Any:
    """A field of GpuReading, by the GPU's handle; None where NVML refuses. Raises GpuLostError."""
    functions, arguments, convert = _QUESTIONS[field]
    found = talk.ask(functions, gpu, *arguments)
    return None if found is None else convert(found)


@contextlib.contextmanager
def conversation(nvml: Nvml | None = None) -> Iterator[Conversation]:
    """Start NVML and end it again; ``nvml`` replaces ``pynvml``. Raises NvmlStartError."""
    module = _pynvml() if nvml is None else nvml
    try:
        module.nvmlInit()
    except module.NVMLError as error:
        code = getattr(error, "value", 0)
        raise NvmlStartError(
            INIT_SENTENCES.get(code, f"NVML does not start ({error}). Try nvidia-smi."),
            has_no_nvml=code == NO_LIBRARY,
        ) from error
    try:
        yield Conversation(module)
    finally:
        with contextlib.suppress(module.NVMLError):
            module.nvmlShutdown()


def _pynvml() -> Nvml:
    try:
        import pynvml
    except ImportError as error:
        sentence = "GPUs cannot be read without nvidia-ml-py: pip install nvidia-ml-py"
        raise NvmlStartError(sentence, has_no_nvml=True) from error
    module: Nvml = pynvml
    return module


class Conversation:
    """NVML between nvmlInit and nvmlShutdown.

    NVML refuses a question with "Not Supported" on many consumer, virtual and integrated GPUs; that
    is an answer, and comes back as None. GpuLostError and NvmlStartError stay inside this file:
    what reads the GPUs turns them into sentences. Error codes are those of nvmlReturn_t in nvml.h.
    """

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml

    def ask(self, functions: tuple[str, ...], *arguments: object) -> Any:
        """Answer of the first function that has one, or None. Raises GpuLostError."""
        for function in functions:
            call = getattr(self._nvml, function, None)  # an older nvidia-ml-py may lack it
            try:
                if call is not None:
                    return call(*arguments)
            except self._nvml.NVMLError as error:
                if getattr(error, "value", None) in GONE_CODES:
                    raise GpuLostError(str(error)) from error
            except UnicodeDecodeError:  # a driver that returns garbage for a name
                continue
        return None

    def handle(self, index: int) -> Any:
        """Handle of GPU ``index``. Raises GpuLostError: without one nothing can be asked."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            raise GpuLostError(str(error)) from error


class Nvml(Protocol):
    """What is used of ``pynvml`` by name; all other functions are looked up when they are asked."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802  # NVML's own name

    def nvmlShutdown(self) -> None: ...  # noqa: N802  # NVML's own name

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any: ...  # noqa: N802  # NVML's own name


class GpuLostError(Exception):
    """The GPU stopped answering; the text is NVML's."""


class NvmlStartError(Exception):
    """NVML cannot be used; the text is one sentence for a person. ``has_no_nvml``: not for a fault
    of the driver, but because NVML itself is not there."""

    def __init__(self, sentence: str, *, has_no_nvml: bool = False) -> None:
        super().__init__(sentence)
        self.has_no_nvml = has_no_nvml


AMD_VENDOR = 4098  # 0x1002, PCI vendor id as KFD's topology writes it
INTEL_VENDOR = "0x8086"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device; ``backend`` is torch's name for the way to it."""

    backend: str  # "ROCm" | "MPS" | "XPU"
    name: str


def find_accelerators(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """Every AMD, Apple and Intel GPU that can be seen without torch. ampscope reads no sensors of
    these devices and has no table of what they accelerate. It says so, because a device that goes
    unmentioned looks like a device that is not there. ``root`` is where /dev and /sys are."""
    return (*_rocm(root), *_mps(), *_xpu(root))


def _rocm(root: Path) -> list[Accelerator]:
    """/dev/kfd is the compute interface of AMD's driver; its topology lists CPUs and GPUs."""
    if not (root / "dev/kfd").exists():
        return []
    nodes = root / "sys/class/kfd/kfd/topology/nodes"
    try:
        paths = sorted(nodes.iterdir(), key=lambda p: int(p.name) if p.name.isdigit() else 0)
        properties = [_numbers(path / "properties") for path in paths]
    except OSError:
        return [Accelerator("ROCm", "AMD GPU, model unknown")]
    return [
        Accelerator("ROCm", f"AMD GPU {gfx_name(node.get('gfx_target_version', 0))}")
        for node in properties
        if node.get("simd_count", 0) > 0 and node.get("vendor_id") == AMD_VENDOR
    ]


def gfx_name(target_version: int) -> str:
    """KFD's ``gfx_target_version`` as LLVM's target name: 90402 -> "gfx942", 90010 -> "gfx90a".

    The number is 10000 major + 100 minor + stepping (drivers/gpu/drm/amd/amdkfd/kfd_device.c); the
    name has minor and stepping as one hex digit each (LLVM's AMDGPU guide, "Processors").
    """
    major, rest = divmod(target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _numbers(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _mps() -> list[Accelerator]:
    """Every Mac with an Apple chip has a GPU that torch reaches as "mps"."""
    apple = platform.system() == "Darwin" and platform.machine() == "arm64"
    return [Accelerator("MPS", "Apple GPU")] if apple else []


def _xpu(root: Path) -> list[Accelerator]:
    """Intel's render nodes, integrated graphics included, which most torch builds cannot use."""
    found = []
    for device in sorted((root / "sys/class/drm").glob("renderD*/device")):
        try:
            if (device / "vendor").read_text().strip() == INTEL_VENDOR:
                model = (device / "device").read_text().strip()
                found.append(Accelerator("XPU", f"Intel GPU, device {model}"))
        except OSError:
            continue
    return found
