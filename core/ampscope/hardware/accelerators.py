"""AMD, Apple and Intel GPUs: named where they can be seen without torch, and no more than that.

ampscope reads no sensors of these devices and has no table of what they accelerate. It says so,
because a device that goes unmentioned looks like a device that is not there.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

AMD_VENDOR = 4098  # 0x1002, PCI vendor id as KFD's topology writes it
INTEL_VENDOR = "0x8086"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device; ``backend`` is torch's name for the way to it."""

    backend: str  # "ROCm" | "MPS" | "XPU"
    name: str


def gfx_name(target_version: int) -> str:
    """KFD's ``gfx_target_version`` as LLVM's target name: 90402 -> "gfx942", 90010 -> "gfx90a".

    The number is 10000 major + 100 minor + stepping (drivers/gpu/drm/amd/amdkfd/kfd_device.c); the
    name has minor and stepping as one hex digit each (LLVM's AMDGPU guide, "Processors").
    """
    major, rest = divmod(target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def find_accelerators(root: Path = Path("/")) -> tuple[Accelerator, ...]:
    """Every such device that the system shows. ``root`` is where /dev and /sys are."""
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
