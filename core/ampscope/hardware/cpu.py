"""The CPU: model, cores, half-precision instructions, memory and load.

Flags come from /proc/cpuinfo on Linux and from ``sysctl`` on macOS; elsewhere they are unknown
(None, which is not the same as an empty tuple). A flag says that the instruction exists, not that
a given torch build uses it, and nothing about speed.

    >>> half_flags(("AVX2", "F16C", "AVX-512F", "AVX512-BF16"), "bf16")
    ('AVX512-BF16',)
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

# Word in /proc/cpuinfo -> name. x86: arch/x86/include/asm/cpufeatures.h; ARM: the kernel's
# Documentation/arch/arm64/elf_hwcaps.rst. F16C only converts fp16, it does not calculate in it.
X86_FLAGS: dict[str, str] = {
    "avx2": "AVX2",
    "f16c": "F16C",
    "avx512f": "AVX-512F",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "amx_int8": "AMX-INT8",
}
ARM_FLAGS: dict[str, str] = {
    "fphp": "FPHP",  # scalar fp16 arithmetic
    "asimdhp": "ASIMDHP",  # vector fp16 arithmetic
    "bf16": "BF16",  # BFDOT and BFMMLA
    "i8mm": "I8MM",
    "sve": "SVE",
}
# macOS: developer.apple.com/documentation/kernel/1387446-sysctlbyname ("hw.optional.arm.…").
# FEAT_FP16 is scalar and vector arithmetic at once. Intel Macs name flags as cpuid does.
SYSCTL_ARM: dict[str, tuple[str, ...]] = {
    "hw.optional.arm.FEAT_FP16": ("fphp", "asimdhp"),
    "hw.optional.arm.FEAT_BF16": ("bf16",),
    "hw.optional.arm.FEAT_I8MM": ("i8mm",),
}
# Flags that calculate matmuls in the dtype, the fastest first.
MATMUL_FLAGS: dict[str, tuple[str, ...]] = {
    "bf16": ("AMX-BF16", "AVX512-BF16", "BF16"),
    "fp16": ("AMX-FP16", "AVX512-FP16", "ASIMDHP"),
}
# (implementer, part) of ARM server cores, which have no "model name" in /proc/cpuinfo:
# arch/arm64/include/asm/cputype.h.
ARM_PARTS: dict[tuple[str, str], str] = {
    ("0x41", "0xd0c"): "Arm Neoverse-N1",
    ("0x41", "0xd40"): "Arm Neoverse-V1",
    ("0x41", "0xd49"): "Arm Neoverse-N2",
    ("0x41", "0xd4f"): "Arm Neoverse-V2",
    ("0x41", "0xd84"): "Arm Neoverse-V3",
    ("0x41", "0xd8e"): "Arm Neoverse-N3",
    ("0xc0", "0xac3"): "Ampere-1",
}
SYSCTL_TIMEOUT_S = 5.0  # it answers in milliseconds


@dataclass(frozen=True, slots=True)
class CpuReading:
    """The CPU now; None is unknown."""

    model: str | None
    architecture: str  # "x86_64", "aarch64", "arm64"
    physical_cores: int | None
    logical_cores: int | None
    usable_cores: int | None  # those that this process may run on
    flags: tuple[str, ...] | None  # values of X86_FLAGS or ARM_FLAGS; None where unreadable
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None  # of the control group (container); None without one
    load_1min: float | None  # runnable processes, averaged over a minute


def half_flags(flags: tuple[str, ...] | None, dtype: str) -> tuple[str, ...] | None:
    """Flags that calculate matmuls in "bf16" or "fp16"; empty: none, None: unknown."""
    if flags is None:
        return None
    return tuple(name for name in MATMUL_FLAGS[dtype] if name in flags)


def parse_cpuinfo(text: str) -> tuple[str | None, tuple[str, ...] | None]:
    """(model, flags) of the first processor in the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    implementer, part = fields.get("CPU implementer", ""), fields.get("CPU part", "")
    model = fields.get("model name") or ARM_PARTS.get((implementer.lower(), part.lower()))
    if model is None and implementer:
        model = f"ARM implementer {implementer}, part {part}"
    words = fields.get("flags", fields.get("Features"))  # x86 and ARM spell the key differently
    return model, None if words is None else _named(set(words.split()))


def parse_sysctl(text: str) -> tuple[str | None, tuple[str, ...] | None]:
    """(model, flags) in the output of macOS's ``sysctl machdep.cpu hw.optional``."""
    pairs = (line.partition(": ") for line in text.splitlines())
    fields = {key: value.strip() for key, _, value in pairs}
    words = {word for key, names in SYSCTL_ARM.items() if fields.get(key) == "1" for word in names}
    for key in ("machdep.cpu.features", "machdep.cpu.leaf7_features"):
        words |= set(fields.get(key, "").lower().split())
    known = words or any(key.startswith("hw.optional.arm.") for key in fields)
    return fields.get("machdep.cpu.brand_string"), _named(words) if known else None


def _named(words: set[str]) -> tuple[str, ...]:
    return tuple(name for word, name in (X86_FLAGS | ARM_FLAGS).items() if word in words)


def read_cpu(root: Path = Path("/")) -> CpuReading:
    """The CPU of this machine. ``root`` is where /proc and /sys are."""
    model, flags = _model_and_flags(root)
    memory = psutil.virtual_memory()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    load: float | None = None
    with contextlib.suppress(OSError):
        load = psutil.getloadavg()[0]
    return CpuReading(
        model=model or platform.processor() or None,
        architecture=platform.machine(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        usable_cores=None if usable is None else len(usable),
        flags=flags,
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=_memory_limit(root),
        load_1min=load,
    )


def _model_and_flags(root: Path) -> tuple[str | None, tuple[str, ...] | None]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if platform.system() == "Linux":
            return parse_cpuinfo((root / "proc/cpuinfo").read_text(errors="replace"))
        if platform.system() == "Darwin":
            command = ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"]
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=SYSCTL_TIMEOUT_S, check=False
            )
            return parse_sysctl(answer.stdout)
    return None, None


def _memory_limit(root: Path) -> int | None:
    """Limit of the own control group (cgroup v2, as a container sees it); "max" is no limit."""
    with contextlib.suppress(OSError, ValueError):
        return int((root / "sys/fs/cgroup/memory.max").read_text())
    return None
