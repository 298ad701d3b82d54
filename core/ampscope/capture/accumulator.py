"""Exponent counts of one step, all roles together: on a CPU at once, on CUDA with one transfer.

A row belongs to one (role, owner, dtype), the owner being a module's number or a parameter's
position; a module that is called several times in a step adds to its row.

    counts = Accumulator()
    counts.add(Role.ACTIVATION, 3, tensor)      # once for each tensor
    frames = counts.take(step=7, scale=65536.0) # {Role.ACTIVATION: Frame(...)}, and starts anew

On CUDA `take` waits until the counts have arrived. A training that must not wait calls `collect`,
and asks what that returned for its frames a step later.

Counting runs below every dispatch mode: the op trace must not see the instruments' own ops, and
a trip through a mode costs 3 us, half as much as counting a small tensor.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ampscope.capture.exponent_count import (
    DeviceCounter,
    PendingCounts,
    count_into,
    count_small_into,
    prepare,
)
from ampscope.capture.failures import Failures
from ampscope.capture.own_ops import own_ops
from ampscope.capture.tensors import (
    Unreadable,
    unreadable,
)
from ampscope.numerics.formats import dtype_name
from ampscope.numerics.histogram import RAW_LEN, Raw
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
        self._is_clean = True  # nothing was counted since the last take, in part or in whole
        self._counts: Raw = np.zeros((_FIRST_ROWS, RAW_LEN), np.int64)
        self._memory = self._counts, self._counts.ctypes.data
        self._devices: dict[torch.device, DeviceCounter] = {}
        self._uses_cpu = False  # whether a large or strided tensor of the CPU was counted

    def add(self, role: Role, owner: int, tensor: Tensor, *, stable: bool = False) -> None:
        """Count every element of ``tensor``. ``stable``: no code writes to it before the next
        :meth:`flush` or :meth:`take`, so that on CUDA one launch may serve many tensors."""
        row = self._row((role, owner, tensor.dtype))
        self._is_clean = False
        try:
            self._count(tensor, row, stable)
            self._touched.add(row)
        except Unreadable:
            return  # it holds nothing that could be counted
        except Exception as error:
            if self._failures is None:
                raise
            self._failures.add(f"the histograms of some tensors ({role.value})", error)

    @property
    def note(self) -> str:
        """Why counting was slow on the devices of the tensors so far, or nothing."""
        devices = [torch.device("cpu")] * self._uses_cpu + list(self._devices)
        return " ".join(filter(None, map(prepare, devices)))  # which have been prepared by now

    def flush(self) -> None:
        """Launch what waits, before any code writes to a tensor that was added as stable."""
        for device in self._devices.values():
            device.flush()

    def take(self, step: int, scale: float) -> dict[Role, Frame]:
        """A frame for each role that was counted. Starts anew. Waits for a device."""
        return self.collect(step, scale).frames()

    def collect(self, step: int, scale: float) -> PendingFrames:
        """As :meth:`take`, with counts that may be on their way from a device."""
        if self._is_clean:  # in most steps of a watch: nothing is asked of a device
            return PendingFrames(step, scale, [], np.zeros((0, RAW_LEN), np.int64), [])
        pending = []
        for device in self._devices.values():
            with own_ops():
                pending.append(device.collect())
        keys = [(row, self._keys[row]) for row in sorted(self._touched)]
        collected = PendingFrames(
            step, scale, keys, self._counts[[row for row, _ in keys]], pending
        )
        self._counts[: len(self._keys)] = 0
        self._touched.clear()
        self._is_clean = True
        return collected

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
        with own_ops():
            if tensor.device.type == "cpu":
                self._uses_cpu = True
                count_into(tensor, self._counts[row])
                return
            if reason := unreadable(tensor):
                raise Unreadable(reason)  # there may be no device to count on
            device = self._devices.get(tensor.device)
            if device is None:
                device = self._devices[tensor.device] = DeviceCounter(tensor.device)
            device.add(tensor, row, stable=stable)


class PendingFrames:
    """Counts of one step: those of a CPU are here, others may be on their way from a device."""

    def __init__(
        self, step: int, scale: float, keys: list[tuple[int, _Key]], counts: Raw,
        pending: list[PendingCounts],
    ) -> None:  # fmt: skip
        """``counts[i]`` belongs to the row and key ``keys[i]``; ``pending`` is to be added."""
        self._step, self._scale = step, scale
        self._keys, self._counts, self._pending = keys, counts, pending

    @property
    def roles(self) -> set[Role]:
        """What was counted."""
        return {role for _, (role, _, _) in self._keys}

    @property
    def is_here(self) -> bool:
        """Whether nothing comes from a device."""
        return not self._pending

    def frames(self) -> dict[Role, Frame]:
        """A frame for each role that was counted. Waits for a device whose counts have not
        arrived."""
        for one in self._pending:
            with own_ops():
                rows = one.rows()
            for place, (row, _) in enumerate(self._keys):
                if row < len(rows):
                    self._counts[place] += rows[row]
        self._pending = []
        frames = {}
        for role in Role:
            places = [place for place, (_, key) in enumerate(self._keys) if key[0] is role]
            if places:
                keys = [self._keys[place][1] for place in places]
                frames[role] = Frame(
                    step=self._step,
                    role=role,
                    modules=tuple(owner for _, owner, _ in keys),
                    dtypes=tuple(dtype_name(dtype) for _, _, dtype in keys),
                    rows=self._counts[places],
                    scale=self._scale if role.is_gradient else 1.0,
                )
        return frames
