"""Which device a run uses, under which policy, what that machine is called, and who reads it beside
the run.

A script's process belongs to the script: nothing here starts CUDA in it. A process that has asked
the CUDA driver anything has CUDA_VISIBLE_DEVICES read for good and can fork no trainer that uses
CUDA, and one that has started CUDA holds memory on a GPU. So before the script has done that
itself, the GPUs are known from NVML.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from ampscope.errors import BadInput
from ampscope.hardware.capability import parse_capability
from ampscope.hardware.cpu import read_cpu
from ampscope.hardware.gpu import GpuSurvey, read_gpus
from ampscope.records import Machine, RunSpec
from ampscope.runner.child_frame import host_facts
from ampscope.telemetry.sampler_process import Readings, beside

NO_AMD = "An AMD GPU is not read beside a run: that needs NVIDIA's NVML."
UNDECIDED = torch.device("cuda")  # on one of this machine's GPUs: a script has not shown on which


def has_cuda() -> bool:
    """Whether torch finds a CUDA device here. It is answered without CUDA while that has not been
    started in this process, and follows CUDA_VISIBLE_DEVICES until then."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return torch.cuda.is_available()
    if not torch.cuda._is_compiled():
        return False
    if torch.version.hip:
        return torch.cuda.is_available()
    return _is_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))


@functools.cache
def _is_visible(listed: str | None) -> bool:
    """Whether a GPU is left by ``listed``, what CUDA_VISIBLE_DEVICES is now, under a driver that is
    new enough for this torch: drivers run every CUDA of their own major version and older ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where NVML does not start
        count = torch.cuda._device_count_nvml()
    if count < 0:  # there is no NVML, as in some containers, or MIG slices are listed
        return _driver_finds_one()
    driver, built = parse_capability(_survey().cuda_driver), parse_capability(torch.version.cuda)
    return count > 0 and not (driver and built and driver[0] < built[0])


@functools.cache
def _survey() -> GpuSurvey:
    return read_gpus()


_ASK_DRIVER = """
import ctypes
driver, count, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int()
calls = driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count))
calls += (driver.cuDriverGetVersion(ctypes.byref(version)),)
print(0 if any(calls) else count.value, version.value)
"""


def _driver_finds_one() -> bool:
    """As :func:`_is_visible`, answered by the CUDA driver in a process of its own."""
    command = [sys.executable, "-I", "-c", _ASK_DRIVER]
    try:
        ctypes.CDLL("libcuda.so.1")  # most machines without NVML have no driver either
        said = subprocess.run(command, capture_output=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return False
    built = parse_capability(torch.version.cuda)
    return int(said[0]) > 0 and not (built and int(said[1]) // 1000 < built[0])


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


def machine_of_script(spec: RunSpec, device: torch.device | None = None) -> Machine:
    """Where a script runs: on ``device``, which its parameters have shown, or, before that, on one
    of the GPUs, if there are any. CUDA's rules are rehearsed only where there are none."""
    place = device or (UNDECIDED if has_cuda() else torch.device("cpu"))
    rehearses = device is None and spec.policy == "cuda"
    policy = choose_policy("cuda" if rehearses else "native", place)
    return replace(describe(spec, place), policy=policy)


def choose_policy(requested: str, device: torch.device) -> str:
    """``cuda`` on CUDA; on a CPU ``rehearsal`` (CUDA's rules) unless ``native`` was asked for."""
    if device.type == "cuda":
        return "cuda"
    return "native" if requested == "native" else "rehearsal"


def describe(spec: RunSpec, device: torch.device) -> Machine:
    """The machine as recorded with the run. Of :data:`UNDECIDED` it has what all GPUs have in
    common, as NVML knows them."""
    here = host_facts()
    flags = read_cpu().flags
    capability = "" if flags is None else " ".join(flags) or "none"
    if device == UNDECIDED:
        name = _common(gpu.name for gpu in _survey().gpus)
        capability = _common(gpu.capability for gpu in _survey().gpus)
    elif device.type == "cuda":
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


def _common(names: Iterable[str | None]) -> str:
    """The one that all are; "" where they differ."""
    known = set(names)
    return (known.pop() or "") if len(known) == 1 else ""


def sample_telemetry(
    store: Path, run_id: str, device: torch.device, *, as_child: bool = True
) -> Readings:
    """Start reading beside the run of this process (see ampscope.telemetry.sampler_process)."""
    readings = beside(store, run_id, as_child=as_child)
    if device != UNDECIDED:
        read_too(readings, device)
    return readings


def read_too(readings: Readings, device: torch.device) -> None:
    """Have the run's GPU read from here on; a CPU is read from the start."""
    if device.type == "cuda" and torch.version.hip:
        readings.note = readings.note or NO_AMD
    elif device.type == "cuda":
        readings.add(str(device), uuid_of(device))


def uuid_of(device: torch.device) -> str:
    """What NVML knows the GPU by; empty for a CPU. torch's own number counts the GPUs that
    CUDA_VISIBLE_DEVICES leaves, in CUDA's order."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def limit_memory(limit_mib: int, device_type: str) -> None:
    """Bound the memory that a run may take on devices of a type, ``cpu`` or ``cuda``.

    On a CPU that is the process's private memory (RLIMIT_DATA; Linux counts anonymous mappings in
    it). RLIMIT_AS is not used: torch maps several GiB of address space that it never touches. CUDA
    does not start under either, so on GPUs torch's allocator is limited instead, on each of them,
    as soon as the script starts CUDA. Raises BadInput where the platform has no such limit.
    """
    if limit_mib <= 0:
        return
    if device_type == "cuda":
        torch.cuda._lazy_call(functools.partial(_limit_gpus, limit_mib * 2**20))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return
    if not sys.platform.startswith("linux"):
        raise BadInput("A memory limit needs Linux. Leave it out here.")
    limit = limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _limit_gpus(limit: int) -> None:
    """torch makes each GPU that it sets the fraction of the current one."""
    current = torch.cuda.current_device()
    try:
        for index in range(torch.cuda.device_count()):
            total = torch.cuda.get_device_properties(index).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)
    except RuntimeError as error:  # an allocator of the script's own knows no limit
        print(f"ampscope: the memory limit does not hold: {error}", file=sys.stderr)
    finally:
        torch.cuda.set_device(current)


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on CUDA, resident set on a CPU."""
    if device.type == "cuda":
        # torch.cuda.max_memory_allocated flattens and sorts 140 entries for it.
        found = torch.cuda.memory_stats_as_nested_dict(device)
        return int(found["allocated_bytes"]["all"]["peak"]) if found else 0
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
