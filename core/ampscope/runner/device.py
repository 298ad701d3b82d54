"""Which device a run uses, under which policy, what that machine is called, and who reads it beside
the run.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from ampscope.errors import BadInput
from ampscope.hardware.cpu import read_cpu
from ampscope.records import Machine, RunSpec
from ampscope.runner.child_frame import host_facts
from ampscope.telemetry.sampler_process import Readings, beside


def choose_device(requested: str) -> torch.device:
    """``auto`` is CUDA where present, else the CPU. Raises BadInput for a device that is absent."""
    if requested == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError:
        raise BadInput(
            f"There is no device called {requested!r}. Use cpu, cuda or cuda:N."
        ) from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise BadInput(f"Probes run on cpu and cuda; {requested!r} is neither.")
    if not torch.cuda.is_available():
        raise BadInput("This machine has no CUDA device. Use --device cpu for a rehearsal.")
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise BadInput(f"cuda:{index} does not exist; there are {torch.cuda.device_count()}.")
    return torch.device("cuda", index)


def choose_policy(requested: str, device: torch.device) -> str:
    """``cuda`` on CUDA; on a CPU ``rehearsal`` (CUDA's rules) unless ``native`` was asked for."""
    if device.type == "cuda":
        return "cuda"
    return "native" if requested == "native" else "rehearsal"


def describe(spec: RunSpec, device: torch.device) -> Machine:
    """The machine as recorded with the run."""
    here = host_facts()
    flags = read_cpu().flags
    capability = "" if flags is None else " ".join(flags) or "none"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    else:
        name = here.cpu
    return Machine(
        device=str(device),
        device_name=name,
        # A rehearsal of CUDA's rules says nothing about what a machine reaches; a lesson's spec
        # says which of the two it is about.
        policy=choose_policy(
            spec.policy if spec.is_training or spec.kind == "lesson" else "native", device
        ),
        capability=capability,
        torch=torch.__version__,
        python=here.python,
        platform=here.platform,
        host=here.host,
    )


def limit_memory(limit_mib: int) -> None:
    """Bound the process's private memory (RLIMIT_DATA; Linux counts anonymous mappings in it).

    Raises BadInput where the platform has no such limit. RLIMIT_AS is not used: torch maps several
    GiB of address space that it never touches.
    """
    if limit_mib <= 0:
        return
    if not sys.platform.startswith("linux"):
        raise BadInput("A memory limit needs Linux. Leave it out here.")
    limit = limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on CUDA, resident set on a CPU."""
    if device.type == "cuda":
        # torch.cuda.max_memory_allocated flattens and sorts 140 entries for it.
        found = torch.cuda.memory_stats_as_nested_dict(device)
        return int(found["allocated_bytes"]["all"]["peak"]) if found else 0
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# The machine's readings beside a run on a torch device: which GPU that is, and who reads it.


NO_AMD = "An AMD GPU is not read beside a run: that needs NVIDIA's NVML."


def sample_telemetry(
    store: Path, run_id: str, device: torch.device, *, as_child: bool = True
) -> Readings:
    """Start reading beside the run of this process (see ampscope.telemetry.sampler_process)."""
    if device.type == "cuda" and torch.version.hip:
        readings = beside(store, run_id, "cpu", as_child=as_child)
        readings.note = readings.note or NO_AMD
        return readings
    return beside(store, run_id, str(device), uuid_of(device), as_child=as_child)


def uuid_of(device: torch.device) -> str:
    """What NVML knows the GPU by; empty for a CPU. torch's own number counts the GPUs that
    CUDA_VISIBLE_DEVICES leaves, in CUDA's order."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
