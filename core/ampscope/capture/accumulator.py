"""Rows of exponent counts for one role and step: on the CPU at once, on CUDA with one transfer.

A row belongs to one (module, dtype); several calls of the module in a step add to it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ampscope.capture.exponent_count import DeviceCounter, count_into
from ampscope.exponents import RAW_LEN, Raw
from ampscope.formats import dtype_name
from ampscope.records import Frame, Role


class Accumulator:
    """Collects the histograms of one role; :meth:`take` returns them and starts anew."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self._rows: dict[tuple[int, torch.dtype], int] = {}
        self._counts: Raw = np.zeros((64, RAW_LEN), np.int64)
        self._device: DeviceCounter | None = None

    def add(self, module: int, tensor: Tensor) -> None:
        """Count every element of ``tensor`` for ``module``."""
        key = (module, tensor.dtype)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = len(self._rows)
            if row == len(self._counts):
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        if tensor.is_cuda:
            if self._device is None:
                self._device = DeviceCounter(tensor.device)
            self._device.add(tensor, row)
        else:
            count_into(tensor, self._counts[row])

    def take(self, step: int, scale: float) -> Frame | None:
        """The frame of this step, or None when nothing was counted."""
        if not self._rows:
            return None
        rows = self._counts[: len(self._rows)].copy()
        if self._device is not None:
            collected = self._device.collect()
            rows[: len(collected)] += collected
        keys = list(self._rows)
        frame = Frame(
            step=step,
            role=self.role,
            modules=tuple(module for module, _ in keys),
            dtypes=tuple(dtype_name(dtype) for _, dtype in keys),
            rows=rows,
            scale=scale if self.role.is_gradient else 1.0,
        )
        self._rows.clear()
        self._counts[: len(keys)] = 0
        return frame
