"""Why torch cannot use the NVIDIA GPUs that are here, as far as can be told without torch."""

from __future__ import annotations

from ampscope.hardware.capability import parse_capability
from ampscope.hardware.inventory import HardwareReport

# CUDA 13.0 dropped everything before Turing (its release notes, "Deprecated Architectures"), so a
# torch that was built with it holds no kernels for those GPUs.
CUDA13_FIRST_CAPABILITY = (7, 5)


def obstacles(report: HardwareReport) -> tuple[str, ...]:
    """Why torch cannot use the NVIDIA GPUs that are here; empty when nothing speaks against it."""
    software, found = report.software, []
    if not report.gpus:
        return ()
    if software.torch is None:
        return ("torch is not installed.",)
    if software.torch_cuda is None:
        return (f"torch {software.torch} was built without CUDA: install its CUDA wheel.",)
    if software.visible_devices is not None and software.visible_devices.strip() in ("", "-1"):
        found.append("CUDA_VISIBLE_DEVICES hides every GPU from torch.")
    torch_cuda = parse_capability(software.torch_cuda)  # both are "major.minor"
    driver_cuda = parse_capability(report.nvidia.cuda_driver)
    if torch_cuda and driver_cuda and driver_cuda[0] < torch_cuda[0]:
        found.append(
            f"torch needs a driver for CUDA {software.torch_cuda}; this one runs CUDA "
            f"{report.nvidia.cuda_driver}: update the driver, or install a torch for that CUDA."
        )
    capabilities = [parse_capability(gpu.capability) for gpu in report.gpus if gpu.capability]
    too_old = all(c is not None and c < CUDA13_FIRST_CAPABILITY for c in capabilities)
    if capabilities and too_old and torch_cuda and torch_cuda[0] >= 13:
        found.append(
            f"torch was built for CUDA {software.torch_cuda}, which dropped GPUs before compute "
            "capability 7.5: install a torch for CUDA 12."
        )
    return tuple(found)


def uses_cuda(report: HardwareReport) -> bool:
    """Whether runs take place on a GPU under CUDA, as far as can be told without torch."""
    return any(not gpu.problem for gpu in report.gpus) and not obstacles(report)
