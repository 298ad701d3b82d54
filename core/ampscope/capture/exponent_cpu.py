"""The exponent histogram on a CPU: the compiled kernel, run by the threads that torch works with.

Between two operations torch's OpenMP threads spin for some milliseconds, waiting for the next. A
pool of our own would compete with them for the cores: right after a matmul two such threads
took 0.47 ns an element where one alone took 0.40, and torch's own two take 0.26 (2^20 elements of
bf16, 2 cores of an EPYC). So the kernel is handed to the OpenMP runtime that torch is linked with,
by the call that a compiler emits for ``#pragma omp parallel``. Without that call (no GNU interface
to OpenMP, as on Windows) the calling thread counts alone.

numba's ``parallel=True`` is no choice: its workqueue layer aborts the process when two threads
enter it at once, and training calls hooks from several threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ampscope.capture.exponent_kernel import JOB, CompiledKernel, compile_kernel
from ampscope.capture.exponent_layout import LAYOUTS
from ampscope.numerics.histogram import RAW_LEN, Raw

SPLIT = 1 << 17  # elements: with 2^16 a team of 2 takes as long as one thread, with 2^17 0.6 times
_team_of = os.getpid()  # OpenMP's threads do not live on in a fork; waiting for them would hang
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_FACTS = {d: (LAYOUTS[d].width // 8, LAYOUTS[d].mantissa, LAYOUTS[d].rank_offset) for d in DTYPES}


class CountJob(ctypes.Structure):
    """One tensor to count, as the kernel reads it."""

    _fields_ = tuple((name, ctypes.c_int64) for name in JOB)


@dataclass(frozen=True, slots=True)
class _Machine:
    """The kernel and the two ways to run it."""

    kernel: CompiledKernel  # keeps the code alive
    alone: Callable[..., None]  # (job)
    together: Callable[..., None] | None  # (kernel's address, job, threads, flags)


def count_flat(flat: Tensor, multiplicity: int, row: Raw) -> None:
    """Add the counts of a flat, contiguous CPU tensor of one of the ``DTYPES`` to ``row``."""
    compiled, threads = compiled_kernel(), torch.get_num_threads()
    if flat.numel() < SPLIT or threads == 1 or compiled.together is None or os.getpid() != _team_of:
        count_small(flat, row.ctypes.data, multiplicity)
        return
    job = _job(flat, multiplicity, 0)
    rows = np.zeros((threads, RAW_LEN), np.int64)
    job.rows, job.threads = rows.ctypes.data, threads
    # 0 threads: as many as torch takes. With another number the runtime would end some and start
    # them again at torch's next operation.
    compiled.together(compiled.kernel.address, ctypes.byref(job), 0, 0)
    row += rows.sum(axis=0)


def count_small(dense: Tensor, row: int, multiplicity: int = 1) -> None:
    """Add the counts of a contiguous CPU tensor of one of the ``DTYPES`` to the row at the address
    ``row``, in this thread alone."""
    compiled_kernel().alone(ctypes.byref(_job(dense, multiplicity, row)))


def _job(dense: Tensor, multiplicity: int, row: int) -> CountJob:
    itemsize, mantissa, rank_offset = _FACTS[dense.dtype]
    return CountJob(
        0, 0, dense.data_ptr(), dense.numel(), itemsize, mantissa, rank_offset, multiplicity, row, 1
    )


def adopt_fork() -> None:
    """Count with several threads in this fork too: its parent never ran a parallel op."""
    global _team_of
    _team_of = os.getpid()


@cache
def compiled_kernel() -> _Machine:
    """The compiled kernel. The first call compiles it, or reads what was compiled before."""
    kernel = compile_kernel()
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)  # releases the GIL
    return _Machine(kernel, alone, _openmp())


def _openmp() -> Callable[..., None] | None:
    """`GOMP_parallel` of the runtime that torch uses; LLVM's and Intel's have it as well."""
    folder = Path(torch.__file__).parent / "lib"
    for library in (*folder.glob("libtorch_cpu.so"), *folder.glob("libtorch_cpu.dylib")):
        try:
            parallel = ctypes.CDLL(str(library)).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None
