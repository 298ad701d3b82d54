"""Exponent counts of one step, all roles together: on a CPU at once, on CUDA with one transfer.

A row belongs to one (role, owner, dtype), the owner being a module's number or a parameter's
position; a module that is called several times in a step adds to its row.

    counts = Accumulator()
    counts.add(Role.ACTIVATION, 3, tensor)      # as often as tensors come by
    frames = counts.take(step=7, scale=65536.0) # {Role.ACTIVATION: Frame(...)}, and starts anew

Counting runs below every dispatch mode: the op trace must not see the instruments' own ops, and a
trip through a mode costs 3 us, half as much as counting a small tensor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch

from ampscope.capture.exponent_count import DeviceCounter, count_into, count_small_into
from ampscope.capture.failures import Failures
from ampscope.capture.tensors import Unreadable, unreadable
from ampscope.exponents import RAW_LEN, Raw
from ampscope.formats import dtype_name
from ampscope.records import Frame, Role

_Key = tuple[Role, int, torch.dtype]
_FIRST_ROWS = 256
_ROW_BYTES = 8 * RAW_LEN


class Accumulator:
    """Collects the histograms of a step; :meth:`take` returns them. A tensor that cannot be read is
    left out; one on which counting fails is left out and noted in ``failures``, without which it
    raises."""

    def __init__(self, failures: Failures | None = None) -> None:
        self._failures = failures
        self._rows: dict[_Key, int] = {}  # kept from step to step: the same tensors come again
        self._keys: list[_Key] = []
        self._touched: set[int] = set()
        self._counts: Raw = np.zeros((_FIRST_ROWS, RAW_LEN), np.int64)
        self._memory = self._counts, self._counts.ctypes.data
        self._devices: dict[torch.device, DeviceCounter] = {}

    def add(self, role: Role, owner: int, tensor: Tensor, *, stable: bool = False) -> None:
        """Count every element of ``tensor``. ``stable``: nobody writes to it before the next
        :meth:`flush` or :meth:`take`, so that on CUDA one launch may serve many tensors."""
        row = self._row((role, owner, tensor.dtype))
        try:
            self._count(tensor, row, stable)
            self._touched.add(row)
        except Unreadable:
            return  # it holds nothing that could be counted
        except Exception as error:
            if self._failures is None:
                raise
            self._failures.add(f"the histograms of some tensors ({role.value})", error)

    def flush(self) -> None:
        """Launch what waits, before somebody writes to a tensor that was added as stable."""
        for device in self._devices.values():
            device.flush()

    def take(self, step: int, scale: float) -> dict[Role, Frame]:
        """A frame for each role that was counted. Starts anew."""
        self._collect()
        frames = {}
        for role in Role:
            rows = [row for row in sorted(self._touched) if self._keys[row][0] is role]
            if rows:
                frames[role] = Frame(
                    step=step,
                    role=role,
                    modules=tuple(self._keys[row][1] for row in rows),
                    dtypes=tuple(dtype_name(self._keys[row][2]) for row in rows),
                    rows=self._counts[rows],
                    scale=scale if role.is_gradient else 1.0,
                )
        self._counts[: len(self._keys)] = 0
        self._touched.clear()
        return frames

    def _row(self, key: _Key) -> int:
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._keys)
            self._keys.append(key)
            if row == len(self._counts):
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._memory = self._counts, self._counts.ctypes.data
        return row

    def _count(self, tensor: Tensor, row: int, stable: bool) -> None:
        _held, address = self._memory  # another thread may make the table larger meanwhile
        if count_small_into(tensor, address + row * _ROW_BYTES):
            return
        with no_dispatch():
            if tensor.device.type == "cpu":
                count_into(tensor, self._counts[row])
                return
            if reason := unreadable(tensor):
                raise Unreadable(reason)  # there may be no device to count on
            device = self._devices.get(tensor.device)
            if device is None:
                device = self._devices[tensor.device] = DeviceCounter(tensor.device)
            device.add(tensor, row, stable=stable)

    def _collect(self) -> None:
        for device in self._devices.values():
            with no_dispatch():
                collected = device.collect()
            self._counts[: len(collected)] += collected
