"""One trial of a batch search: a few training steps with so many samples, in a process of its own.

Running out of memory ends this process and nothing else. On a CPU the process may allocate as
much as the user says above what it holds once torch is loaded (RLIMIT_DATA); on CUDA the device
decides. The answer goes back as one line of JSON, never as a pickle.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch._dynamo  # 30 MiB that every optimizer imports, before the limit is set

from ampscope.errors import AmpscopeError
from ampscope.measure.live_bytes import LiveBytes
from ampscope.measure.timing import summary
from ampscope.measure.training_steps import batch_of, batch_size, timed_step
from ampscope.records import BatchTrial, RunSpec
from ampscope.runner.device import limit_memory
from ampscope.runner.probe import prepare
from ampscope.runner.run_server import die_with_parent
from ampscope.runner.training import training_step

TIMED_S = 1.0  # of steps, after the one whose memory is followed
MOST_STEPS = 20
NO_MEMORY = "Out of memory."
# Of torch's CPU allocator, of the C++ library and of oneDNN, as they stand in a RuntimeError.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a primitive",
    "could not create a memory",
)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_SMALL, _USUAL = 2**16, 2**25  # the second is where glibc's own threshold ends up under torch


def in_child(
    answer: Connection, spec: RunSpec, device_name: str, samples: int, limit_bytes: int
) -> None:
    """Body of the child process: one JSON object into ``answer``."""
    die_with_parent(wanted=True)  # with the server process, which ends with the search
    content: dict[str, object]
    try:
        content = {"try": dataclasses.asdict(attempt(spec, device_name, samples, limit_bytes))}
    except AmpscopeError as error:
        content = {"wrong": str(error)}
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        what = f"With {samples:,} samples" if samples else "With the workload's own batch"
        content = {"wrong": f"{what} a step raised {text}"}
    _unlimited()  # the answer needs a little memory as well
    answer.send_bytes(json.dumps(content).encode())


def tell_free(answer: Connection, device_name: str) -> None:
    """Body of the child that asks a GPU for its free memory, its own context taken off."""
    free = torch.cuda.mem_get_info(torch.device(device_name))[0]
    answer.send_bytes(json.dumps(free).encode())


def attempt(spec: RunSpec, device_name: str, samples: int, limit_bytes: int) -> BatchTrial:
    """Two steps at least: an optimizer makes its state in the first. Raises BadInput for what is
    wrong with the workload itself."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    samples = samples or _own_samples(spec, device)
    if device.type == "cuda":
        limit_memory(spec.memory_limit_mib, "cuda")
    elif limit_bytes:
        _limit(limit_bytes)
    try:
        return _tried(spec, device, samples)
    except Exception as error:
        if _is_memory(error) or _is_memory(error.__cause__):
            return _failed(spec, samples)
        raise


def _own_samples(spec: RunSpec, device: torch.device) -> int:
    """As many as the workload gives; read before any limit holds, and let go again."""
    return batch_size(batch_of(prepare(spec, device), spec), spec.workload)


def _is_memory(error: BaseException | None) -> bool:
    """The CPU's allocator raises RuntimeError; libraries below it have words of their own."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(w in str(error).lower() for w in _NO_MEMORY)


def _tried(spec: RunSpec, device: torch.device, samples: int) -> BatchTrial:
    training = prepare(spec, device)
    batch = batch_of(training, spec, samples)
    training_step(training, batch)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training.optimizer.zero_grad(set_to_none=True)
    with LiveBytes(training.model, training.optimizer, batch) as live:
        training_step(training, batch)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    if device.type == "cpu":  # it fits: mapping every tensor anew costs time that training has not
        _unlimited()
        _allocate_with(_USUAL)
        training_step(training, batch)
    seconds: list[float] = []
    ends = time.monotonic() + TIMED_S
    while not seconds or (time.monotonic() < ends and len(seconds) < MOST_STEPS):
        seconds.append(timed_step(training, batch).step)
    step = summary(seconds)
    return BatchTrial(spec.precision, samples, True, live.peak, peak, step, "", time.time())


def _failed(spec: RunSpec, samples: int, why: str = NO_MEMORY) -> BatchTrial:
    return BatchTrial(spec.precision, samples, False, None, None, None, why, time.time())


def _limit(limit_bytes: int) -> None:
    """Above what the process holds once its threads run and matmuls were made. Linux counts
    private memory (VmData) against it, so freed tensors must not stay in malloc's heap: without a
    fixed threshold 8,192 samples failed where 16,384 fitted (measured, an MLP under 256 MiB)."""
    _allocate_with(_SMALL, arenas=1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = torch.ones(256, 256, dtype=dtype, requires_grad=True)
        torch.relu(weights @ weights).sum().backward()  # type: ignore[no-untyped-call]  # torch
    status = Path("/proc/self/status").read_text()
    held = next(int(line.split()[1]) * 1024 for line in status.splitlines() if "VmData" in line)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (held + limit_bytes, hard))


def _allocate_with(mmap_threshold: int, arenas: int = 0) -> None:
    """glibc's malloc maps and unmaps what is larger; 0 arenas are its default."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_threshold)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * mmap_threshold)
        libc.mallopt(_M_ARENA_MAX, arenas)


def _unlimited() -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
