"""Which device a run uses, under which policy, and what that machine is called."""

from __future__ import annotations

import resource
import sys

import torch

from ampscope.errors import BadInput
from ampscope.hardware.cpu import read_cpu
from ampscope.records import Machine, RunSpec
from ampscope.run.host import host_facts


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
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
