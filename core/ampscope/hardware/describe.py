"""What mixed precision can and cannot give on this machine, in words.

    report = describe_machine()
    sentence(report)       what AMP can give here, and what stays unknown
    one_line(report)       for the head of the Home page
    unused_gpu(report)     a GPU that is here and that torch cannot use: why, and what to do

The words come from tables and flags, never from a measurement, and say so: a dtype that the
hardware accelerates *can* be faster; whether it is must be measured.

The report comes first, then what follows from it for torch, then the words.
"""

from __future__ import annotations

import ast
import itertools
import os
import platform
import re
import time
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path

from ampscope.hardware.capability import DTYPE_LABELS, Presence, TensorCoreInfo, parse_capability
from ampscope.hardware.cpu import CpuReading, half_flags, read_cpu
from ampscope.hardware.gpu import (
    Accelerator,
    GpuReading,
    GpuSurvey,
    Nvml,
    find_accelerators,
    read_gpus,
)
from ampscope.record_json import dumps

JSON_SCHEMA = 1
ORDINALS = {1: "1st", 2: "2nd", 3: "3rd", 4: "4th", 5: "5th"}
REHEARSAL = (
    "Probes run on the CPU and rehearse CUDA's rules: that shows what half precision does to the "
    "numbers, not what it does to the speed."
)
MAYBE = "Whether torch has a CUDA device here is unknown: a run that starts says on what it runs."
NOT_MEASURED = "This comes from tables and flags, not from a measurement."


@dataclass(frozen=True, slots=True)
class HardwareReport:
    """Everything that is known about this machine; the readings are those of ``read_at``."""

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
    """Look at this machine, which takes milliseconds; never raises. ``nvml`` takes the place of
    ``pynvml``."""
    return HardwareReport(
        read_at=time.time(),
        cpu=read_cpu(),
        nvidia=read_gpus(nvml),
        accelerators=find_accelerators(),
        software=read_software(),
    )


@dataclass(frozen=True, slots=True)
class Software:
    """What is installed; None is "not there" or, for cuDNN, unknown."""

    python: str
    torch: str | None  # "2.13.0+cpu"
    torch_cuda: str | None  # CUDA version that torch was built for
    torch_hip: str | None  # ROCm version that torch was built for
    torch_xpu: str | None  # oneAPI version that torch was built for
    cudnn: str | None
    visible_devices: str | None  # the environment's CUDA_VISIBLE_DEVICES; None when not set


def read_software() -> Software:
    """Versions in the running Python's environment, read from files, so that the dashboard never
    imports torch.

    torch writes its build into ``torch/version.py`` ("2.13.0+cu130", cuda "13.0"); cuDNN comes with
    it as the wheel nvidia-cudnn-cu13. A cuDNN that was installed otherwise (conda, the system) is
    unknown.
    """
    build = _torch_build()
    return Software(
        python=platform.python_version(),
        torch=build.get("__version__") or _package("torch"),
        torch_cuda=build.get("cuda"),
        torch_hip=build.get("hip"),
        torch_xpu=build.get("xpu"),
        cudnn=_cudnn(build.get("cuda")),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _torch_build() -> dict[str, str]:
    spec = util.find_spec("torch")  # of a top-level package: finds, does not import
    if spec is None or spec.origin is None:
        return {}
    try:
        return parse_version_file(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, SyntaxError):
        return {}


def parse_version_file(text: str) -> dict[str, str]:
    """Names with a text value at the top level of ``torch/version.py``."""
    found: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.AnnAssign):
            target: ast.expr = node.target
        elif isinstance(node, ast.Assign):
            target = node.targets[0]
        else:
            continue
        value = node.value.value if isinstance(node.value, ast.Constant) else None
        if isinstance(target, ast.Name) and isinstance(value, str):
            found[target.id] = value
    return found


CUDNN_WHEELS = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")


def _cudnn(torch_cuda: str | None) -> str | None:
    """The wheel that fits torch's CUDA first: several may be installed."""
    fitting = [f"nvidia-cudnn-cu{torch_cuda.partition('.')[0]}"] if torch_cuda else []
    versions = (_package(name) for name in (*fitting, *CUDNN_WHEELS))
    return next((version for version in versions if version is not None), None)


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def uses_cuda(report: HardwareReport) -> bool:
    """Whether runs take place on a GPU under CUDA, as far as can be told without torch."""
    return any(not gpu.problem for gpu in report.gpus) and not obstacles(report)


def may_use_cuda(report: HardwareReport) -> bool:
    """Whether torch may reach a GPU that there is no NVML to ask about."""
    return bool(report.nvidia.unread and report.software.torch_cuda)


# First compute capability by CUDA: CUDA 13.0 dropped everything before Turing (its release notes,
# "Deprecated Architectures"). PyTorch's own builds for 12.8 and 12.9 dropped more than CUDA did
# (torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC); a build from source may hold any.
FIRST_CAPABILITIES = (((13, 0), (7, 5)), ((12, 9), (7, 5)), ((12, 8), (7, 0)))
PYTORCHS_OWN = re.compile(r"[\d.]+(\+cu\d+)?")
# CUDA 12.8 is the first that knows Blackwell (its release notes, "New Features").
BLACKWELL, BLACKWELL_CUDA = (10, 0), (12, 8)


def obstacles(report: HardwareReport) -> tuple[str, ...]:
    """Why torch cannot use the NVIDIA GPUs that are here and what to do, each a clause without a
    full stop; empty when nothing speaks against it."""
    software, found = report.software, []
    if not report.gpus:
        return ()
    if software.torch is None:
        return ("torch is not installed",)
    if software.torch_cuda is None:
        return (f"torch {software.torch} was built without CUDA; install its CUDA build",)
    if software.visible_devices is not None and _hides_all(software.visible_devices, report.gpus):
        listed = software.visible_devices.strip()
        found.append(f"CUDA_VISIBLE_DEVICES ({listed or 'empty'}) hides every GPU; unset it")
    torch_cuda = parse_capability(software.torch_cuda)  # both are "major.minor"
    driver_cuda = parse_capability(report.nvidia.cuda_driver)
    if torch_cuda and driver_cuda and driver_cuda[0] < torch_cuda[0]:
        found.append(
            f"torch {software.torch} needs a driver for CUDA {torch_cuda[0]} and driver "
            f"{report.nvidia.driver or 'here'} runs CUDA {report.nvidia.cuda_driver}; update the "
            f"driver, or install a build of torch for CUDA {driver_cuda[0]}"
        )
    capabilities = [parse_capability(gpu.capability) for gpu in report.gpus if gpu.capability]
    known = [capability for capability in capabilities if capability]
    if not torch_cuda or len(known) < len(capabilities) or not known:
        return tuple(found)
    build = f"torch {software.torch} is built for CUDA {software.torch_cuda}, which"
    first = next((first for cuda, first in FIRST_CAPABILITIES if torch_cuda >= cuda), (0, 0))
    is_known = torch_cuda[0] >= 13 or PYTORCHS_OWN.fullmatch(software.torch)
    if is_known and max(known) < first:
        found.append(
            f"{build} dropped GPUs before compute capability {first[0]}.{first[1]}; install a "
            "build for CUDA 12.6"
        )
    if torch_cuda < BLACKWELL_CUDA and min(known) >= BLACKWELL:
        found.append(
            f"{build} does not know compute capability 10.0 and newer; install a build for CUDA "
            "12.8 or newer"
        )
    return tuple(found)


def _hides_all(listed: str, gpus: tuple[GpuReading, ...]) -> bool:
    """Whether CUDA finds no GPU under this list: it takes entries up to the first that it does not
    know, and none where one comes twice. UUIDs are left to CUDA."""
    entries = [entry.strip() for entry in listed.split(",")]
    if entries[0].upper().startswith(("GPU-", "MIG-")):
        return False
    known = {str(gpu.index) for gpu in gpus}
    valid = list(itertools.takewhile(known.__contains__, entries))
    return not valid or len(set(valid)) < len(valid)


def report_json(report: HardwareReport) -> str:
    """The whole report, the table's row for each GPU and the words, as JSON."""
    data = {"schema": JSON_SCHEMA, **asdict(report)}
    for entry, gpu in zip(data["nvidia"]["gpus"], report.gpus, strict=True):
        entry["tensor_cores"] = asdict(gpu.tensor_cores)
    data["obstacles"] = obstacles(report)
    data["one_line"], data["sentence"] = one_line(report), sentence(report)
    return dumps(data, indent=2, ensure_ascii=False)


def one_line(report: HardwareReport) -> str:
    """Device, capability, torch and policy: "CPU AMD EPYC, 2 cores · … · rehearses CUDA"."""
    torch = f"torch {report.software.torch}" if report.software.torch else "torch not installed"
    if may_use_cuda(report):
        return f"{_cpu_name(report.cpu)} · an NVIDIA GPU that cannot be read · {torch}"
    if not uses_cuda(report):
        return f"{_cpu_name(report.cpu)} · no CUDA · {torch} · probes rehearse CUDA's rules"
    return f"{_gpu_names(report)} · {torch} · runs follow CUDA's own rules"


def sentence(report: HardwareReport) -> str:
    """What AMP can and cannot give here: a few plain sentences."""
    parts = [gpu.problem for gpu in report.gpus if gpu.problem]
    if uses_cuda(report):
        parts += [_gpu_sentence(gpu, count) for gpu, count in _kinds(report).values()]
        parts += [_state_sentence(gpu) for gpu in report.gpus]
    else:
        parts += [report.nvidia.message, unused_gpu(report)]
        parts += [
            f"An {other.name} is here ({other.backend} in torch); what it accelerates is unknown "
            "to ampscope, which does not read it."
            for other in report.accelerators
        ]
        parts += [MAYBE if may_use_cuda(report) else REHEARSAL, _cpu_sentence(report.cpu)]
    return " ".join(part for part in (*parts, NOT_MEASURED) if part)


def unused_gpu(report: HardwareReport) -> str:
    """Why torch cannot use the GPUs that NVML lists, and what to do, in one sentence; "" where
    nothing speaks against them, or where none is here."""
    reasons = obstacles(report)
    if not reasons or not _kinds(report):
        return ""
    return f"{_gpu_names(report)} is here, but torch cannot use it: {'; '.join(reasons)}."


def torch_found_none(report: HardwareReport) -> str:
    """A sentence for a run that found no CUDA device although nothing speaks against one, or ""."""
    if not uses_cuda(report):
        return ""
    return (
        f"{_gpu_names(report)} is here, but torch found no CUDA device, so this runs on the CPU: "
        'python -c "import torch; torch.cuda.init()" says why.'
    )


def _gpu_sentence(gpu: GpuReading, count: int) -> str:
    info = gpu.tensor_cores
    named = _counted(gpu.name or "NVIDIA GPU", count)
    if info.presence is Presence.UNKNOWN:
        return f"{named}: whether it has Tensor Cores is unknown. {info.note}"
    if info.presence is Presence.ABSENT:
        return (
            f"{named} (compute capability {info.capability}) has no Tensor Cores. {info.note} AMP "
            "can save activation memory here, and shows half precision's numerics; matmuls "
            "have no Tensor Cores to gain from."
        )
    return (
        f"{named} (compute capability {info.capability}, {info.architecture}) has Tensor Cores of "
        f"the {ORDINALS[info.generation or 1]} generation for "
        f"{_joined(tuple(DTYPE_LABELS[d] for d in info.dtypes))} inputs. {_amp_sentence(info)}"
    )


def _amp_sentence(info: TensorCoreInfo) -> str:
    if info.accelerates("bf16"):
        return (
            "AMP can make matmuls faster in bf16, which needs no loss scale, and in fp16, "
            "which does."
        )
    return (
        "AMP can make matmuls faster in fp16, which needs a loss scale; bf16 has no Tensor "
        "Cores here, so expect no speed from it."
    )


def _state_sentence(gpu: GpuReading) -> str:
    parts = []
    if gpu.throttled_by:
        parts.append(f"GPU {gpu.index}'s clocks are held down now ({_joined(gpu.throttled_by)}).")
    if gpu.mig_enabled:
        parts.append(
            f"GPU {gpu.index} is in MIG mode with {len(gpu.mig_slices)} slices; a run sees one "
            "slice and its share of the memory and the Tensor Cores."
        )
    return " ".join(parts)


def _cpu_sentence(cpu: CpuReading) -> str:
    bf16, fp16 = half_flags(cpu.flags, "bf16"), half_flags(cpu.flags, "fp16")
    name = cpu.model or cpu.architecture
    if bf16 is None or fp16 is None:
        return f"Which half-precision instructions the CPU ({name}) has is unknown."
    if bf16 and fp16:
        return f"The CPU ({name}) multiplies bf16 ({_joined(bf16)}) and fp16 ({_joined(fp16)})."
    if not bf16 and not fp16:
        return f"The CPU ({name}) multiplies neither bf16 nor fp16: both go through fp32."
    have, flags, lack = ("bf16", bf16, "fp16") if bf16 else ("fp16", fp16, "bf16")
    return (
        f"The CPU ({name}) has instructions that multiply {have} ({_joined(flags)}) and none for "
        f"{lack}, which goes through fp32: expect no speed from {lack} in runs on this CPU."
    )


def _gpu_names(report: HardwareReport) -> str:
    return ", ".join(_counted(_gpu_line(gpu), count) for gpu, count in _kinds(report).values())


def _kinds(report: HardwareReport) -> dict[tuple[str, str], tuple[GpuReading, int]]:
    """(name, capability) -> the first such GPU and how many there are; lost ones left out."""
    kinds: dict[tuple[str, str], tuple[GpuReading, int]] = {}
    for gpu in report.gpus:
        if not gpu.problem:
            key = (gpu.name or "", gpu.capability or "")
            first, count = kinds.get(key, (gpu, 0))
            kinds[key] = (first, count + 1)
    return kinds


def _gpu_line(gpu: GpuReading) -> str:
    size = gpu.memory_total_bytes
    memory = "" if size is None else f", {size / 2**30:.1f} GiB"
    return f"{gpu.name or 'NVIDIA GPU'} (capability {gpu.capability or 'unknown'}{memory})"


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{count} × {name}"


def _joined(words: tuple[str, ...]) -> str:
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def _cpu_name(cpu: CpuReading) -> str:
    cores = cpu.usable_cores or cpu.logical_cores
    counted = "cores unknown" if cores is None else f"{cores} core{'' if cores == 1 else 's'}"
    return f"CPU {cpu.model or cpu.architecture}, {counted}"
