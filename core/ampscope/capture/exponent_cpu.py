"""The exponent histogram on a CPU: the compiled kernel, spread over as many threads as torch uses.

A tensor is cut into pieces, and whoever is free takes the next one: the calling thread, and helpers
from a small pool of our own. The caller never waits for a helper that has not started. numba's
``parallel=True`` is no choice: its workqueue layer aborts the process when two threads enter it at
once, and training calls hooks from several threads.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ampscope.capture.exponent_kernel import Bits, Kernel, compile_kernel
from ampscope.capture.exponent_layout import LAYOUTS, BitLayout
from ampscope.exponents import RAW_LEN, Raw

PIECE = 1 << 17  # elements a thread takes at a time: about 45 us of work
# A helper costs about 35 us a tensor. With 2^18 elements two threads take as long as one, with 2^19
# 175 us against 200, with 2^20 275 against 380, with 2^22 890 against 1,600 (2 cores of an EPYC).
SPLIT = 1 << 19
MAX_THREADS = 8  # more would wait for memory: one thread reads 6 to 12 GB/s

VIEWS: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.uint16,
    torch.bfloat16: torch.uint16,
    torch.float32: torch.uint32,
}


@dataclass(frozen=True, slots=True)
class _Job:
    """A tensor in pieces. Taking one is a single operation of a deque, which is atomic."""

    layout: BitLayout
    pieces: deque[Bits]


def count_flat(flat: Tensor, multiplicity: int, row: Raw) -> None:
    """Add the counts of a flat, contiguous CPU tensor of a dtype in ``VIEWS`` to ``row``."""
    layout = LAYOUTS[flat.dtype]
    bits: Bits = flat.view(VIEWS[flat.dtype]).numpy()
    helpers = 0 if bits.size < SPLIT else min(torch.get_num_threads(), MAX_THREADS) - 1
    if helpers == 0 and bits.size <= 1 << 31:
        _kernel()(bits, layout.mantissa, layout.rank_offset, row, multiplicity)
        return
    job = _Job(layout, deque(bits[i : i + PIECE] for i in range(0, bits.size, PIECE)))
    results = _start_helpers(min(helpers, len(job.pieces) - 1), job)
    counts = _drain(job)
    for result in results:
        if not result.cancel():
            counts += result.result()
    row += counts * multiplicity


def _drain(job: _Job) -> Raw:
    """Counts of the pieces that this thread got hold of."""
    kernel, layout, row = _kernel(), job.layout, np.zeros(RAW_LEN, np.int64)
    while True:
        try:
            bits = job.pieces.popleft()
        except IndexError:
            return row
        kernel(bits, layout.mantissa, layout.rank_offset, row, 1)


def _start_helpers(count: int, job: _Job) -> list[Future[Raw]]:
    if count <= 0:
        return []
    try:
        return [_pool(count).submit(_drain, job) for _ in range(count)]
    except RuntimeError:  # the interpreter is shutting down: the calling thread does it all
        return []


@cache
def _pool(count: int) -> ThreadPoolExecutor:
    """Exactly ``count`` threads: with spare ones each call wakes another, cold one (40 us)."""
    return ThreadPoolExecutor(count, thread_name_prefix="ampscope-exponents")


@cache
def _kernel() -> Kernel:
    return compile_kernel()


if hasattr(os, "register_at_fork"):
    # A forked child has the memory of the pool's bookkeeping and none of its threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
