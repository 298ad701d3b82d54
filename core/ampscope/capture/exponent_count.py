"""Exponent histograms of tensors: the one entry to the counters, which picks the right one.

    count_into(activation, rows[3])                  # a CPU tensor: counted at once

    counter = DeviceCounter(torch.device("cuda"))
    counter.add(activation, 3)                       # a device tensor: counted on its device
    rows = counter.collect()                         # one transfer a step

Every element is counted, exactly: `ampscope.exponents` says what the bins of a row are.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import numpy as np
from torch import Tensor

from ampscope.capture import exponent_torch
from ampscope.capture.exponent_device import DeviceCounter
from ampscope.capture.exponent_layout import pieces
from ampscope.capture.tensors import is_dense
from ampscope.exponents import RAW_LEN, Raw

__all__ = ["DeviceCounter", "count_into", "count_small_into"]


def count_into(tensor: Tensor, row: Raw) -> None:
    """Add the counts of every element of ``tensor`` to ``row`` (int64, contiguous, RAW_LEN long).

    Several threads may count at once, each into a row of its own. A tensor on a device is counted
    there and waited for; a training step uses `DeviceCounter` instead.

    Raises:
        TypeError: integers, booleans, quantised numbers, packed formats (float4_e2m1fn_x2); a
            tensor without memory.
        ValueError: a row of another shape or dtype.
    """
    if row.dtype != np.int64 or row.shape != (RAW_LEN,) or not row.flags.c_contiguous:
        raise ValueError(
            f"a row is a contiguous int64 vector of {RAW_LEN} counts, not {row.dtype} {row.shape}"
        )
    for flat, multiplicity in pieces(tensor):
        compiled = _compiled() if flat.device.type == "cpu" else None
        if compiled is not None and flat.dtype in compiled.DTYPES:
            compiled.count_flat(flat, multiplicity, row)
        else:
            row += exponent_torch.count_flat(flat).cpu().numpy() * multiplicity


def count_small_into(tensor: Tensor, row: int) -> bool:
    """As :func:`count_into` with the address of the row, for what nearly always comes: a dense,
    contiguous CPU tensor that one thread counts. False, and nothing counted, for any other. Takes
    a third of the time, and no dispatch mode hears of it."""
    if not is_dense(tensor) or not tensor.is_cpu or not tensor.is_contiguous():
        return False
    compiled = _compiled()
    if compiled is None or tensor.dtype not in compiled.DTYPES or tensor.numel() >= compiled.SPLIT:
        return False
    if tensor.numel():
        compiled.count_small(tensor, row)
    return True


def adopt_fork() -> None:
    """Say that this fork's parent never ran a parallel op, so that all cores may count here."""
    compiled = _compiled()
    if compiled is not None:
        compiled.adopt_fork()


@cache
def _compiled() -> ModuleType | None:
    """The numba counter; None where numba is missing or does not fit the installed NumPy."""
    try:
        from ampscope.capture import exponent_cpu
    except ImportError:
        return None
    return exponent_cpu
