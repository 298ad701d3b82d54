"""The exponent histogram on a CPU: the compiled kernel, spread over as many threads as torch uses.

The threads are a small pool of our own. numba's ``parallel=True`` is no choice: its workqueue layer
aborts the process when two threads enter it at once, and training calls hooks from several threads
(nn.DataParallel, pipelines, a user's own).
"""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ampscope.capture.exponent_kernel import Bits, Kernel, compile_kernel
from ampscope.capture.exponent_layout import LAYOUTS, BitLayout
from ampscope.exponents import RAW_LEN, Raw

PIECE = 1 << 17  # elements a thread takes at a time: about 40 us of work
SPLIT = 1 << 18  # below this many elements (80 us) waking a thread (20 to 30 us) does not pay
MAX_THREADS = 8  # more would wait for memory: one thread reads 6 to 13 GB/s

VIEWS: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.uint16,
    torch.bfloat16: torch.uint16,
    torch.float32: torch.uint32,
}

_Pieces: TypeAlias = deque[Bits]
_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def count_flat(flat: Tensor, multiplicity: int, row: Raw) -> None:
    """Add the counts of a flat, contiguous CPU tensor of a dtype in ``VIEWS`` to ``row``."""
    layout = LAYOUTS[flat.dtype]
    bits: Bits = flat.view(VIEWS[flat.dtype]).numpy()
    threads = 1 if bits.size < SPLIT else min(torch.get_num_threads(), MAX_THREADS)
    if threads == 1 and bits.size <= 1 << 31:
        _kernel()(bits, layout.mantissa, layout.rank_offset, row, multiplicity)
        return
    pieces = deque(bits[start : start + PIECE] for start in range(0, bits.size, PIECE))
    helpers = _start_helpers(threads - 1, pieces, layout)
    row += _drain(pieces, layout) * multiplicity
    for helper in helpers:
        if not helper.cancel():  # one that has not started yet is not waited for
            row += helper.result() * multiplicity


@cache
def _kernel() -> Kernel:
    return compile_kernel()


def _drain(pieces: _Pieces, layout: BitLayout) -> Raw:
    """Counts of the pieces that this thread got hold of."""
    kernel, row = _kernel(), np.zeros(RAW_LEN, np.int64)
    while True:
        try:
            bits = pieces.popleft()
        except IndexError:
            return row
        kernel(bits, layout.mantissa, layout.rank_offset, row, 1)


def _start_helpers(count: int, pieces: _Pieces, layout: BitLayout) -> list[Future[Raw]]:
    global _pool
    if count == 0:
        return []
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="ampscope-exponents")
        pool = _pool
    try:
        return [pool.submit(_drain, pieces, layout) for _ in range(count)]
    except RuntimeError:  # the interpreter is shutting down: the calling thread does it all
        return []


def _forget_pool() -> None:
    """A forked child has the pool's memory and none of its threads."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
