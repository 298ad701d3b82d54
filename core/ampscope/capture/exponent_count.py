"""Exponent histograms of tensors: the one entry to the counters, which picks the right one.

    count_into(activation, rows[3])                  # a CPU tensor: counted at once

    counter = DeviceCounter(torch.device("cuda"))
    counter.add(activation, 3)                       # a device tensor: counted on its device
    pending = counter.collect()                      # one transfer a step, not waited for
    rows = pending.rows()                            # a step later: it has arrived

Every element is counted, exactly: `ampscope.numerics.histogram` says what the bins of a row are.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampscope.capture import exponent_torch
from ampscope.capture.exponent_layout import LAYOUTS, pieces
from ampscope.capture.failures import in_words, wait_for
from ampscope.capture.tensors import is_dense
from ampscope.late_imports import is_installed, late_import, real_builtins
from ampscope.numerics.histogram import RAW_LEN, Raw

SLOW_S = 1.0  # a compilation that took longer deserves a line: the training began so much later
# What waiting tensors may hold back: at 1.5 TB/s as long to read (45 us) as a launch costs.
PENDING_BYTES = 64 << 20
FIRST_ROWS = 64
_CUDA_COUNTER = "ampscope.capture.exponent_cuda"
_Waiting = tuple[Tensor, int, int]  # contiguous tensor, row, multiplicity


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
        compiled = _numba()[0] if flat.device.type == "cpu" else None
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
    compiled = _numba()[0]
    if compiled is None or tensor.dtype not in compiled.DTYPES or tensor.numel() >= compiled.SPLIT:
        return False
    if tensor.numel():
        compiled.count_small(tensor, row)
    return True


def adopt_fork() -> None:
    """Say that this fork's parent never ran a parallel op, so that all cores may count here."""
    compiled = _numba()[0]
    if compiled is not None:
        compiled.adopt_fork()


@cache
def _numba() -> tuple[ModuleType | None, str]:
    """The numba counter, compiled; None and why, where numba is missing or does not fit the
    installed NumPy."""
    try:
        exponent_cpu = late_import("ampscope.capture.exponent_cpu")
        with real_builtins():
            exponent_cpu.compiled_kernel()
    except Exception as error:  # numba raises errors of many kinds where it does not fit
        return None, in_words(error)
    return exponent_cpu, ""


def prepare(device: torch.device) -> str:
    """Compile what counts the tensors of ``device``, which may take 20 s where no cache has it.

    Returns sentences for the notes of a run: that compiling took long, or why the compiled counter
    cannot be used and what that costs. "" where there is nothing to say. Raises nothing.
    """
    if device.type == "cpu":
        _, problem = _numba()
        return problem and (
            "Exponents of CPU tensors are counted by plain torch operations, which takes 15 to 80 "
            f"times as long: the counter that numba compiles cannot be used ({problem})."
        )
    if device.type != "cuda":
        return ""
    started = time.perf_counter()
    problem = triton_problem(device)
    took = time.perf_counter() - started
    if problem:
        return (
            f"Exponents on {device} are counted by plain torch operations, some 25 launches for "
            "each 2^20 elements: a step with histograms takes 10 to 50 times as long as with the "
            f"counter that Triton compiles, which cannot be used ({problem})."
        )
    if took < SLOW_S:
        return ""
    return f"The exponent counter was compiled for {device} in {took:.0f} s."


class DeviceCounter:
    """Rows of exponent counts on ``device`` (CUDA by Triton; anything else by plain torch): no
    synchronisation per tensor, one transfer at the end of a step.

    A tensor that is about to be overwritten (an activation before an in-place ReLU, a gradient
    before clipping) must be counted first: :meth:`add` launches at once, in order with the stream
    that made the tensor. Only a tensor that the caller declares ``stable`` waits for company, so
    that one launch serves many: weights, and gradients that no code changes before the next
    :meth:`flush` or :meth:`collect`. Waiting tensors are held, so a launch goes out when they pass
    :data:`PENDING_BYTES`. One that was changed nevertheless is an error and not a wrong count, as
    far as torch's version counter sees it (a write through ``.data`` escapes it).

    Any thread may call it: autograd runs hooks in threads of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._triton = not triton_problem(device)
        self._counts = self._new_counts(FIRST_ROWS)
        self._rows = 0  # rows in use
        self._waiting: list[_Waiting] = []
        self._versions: list[int] = []
        self._bytes = 0
        self._order = _StreamOrder(self._counts.device)

    def add(self, tensor: Tensor, row: int, *, stable: bool = False) -> None:
        """Count every element of ``tensor`` for ``row``; rows appear as they are named.

        Raises:
            TypeError: as `ampscope.capture.exponent_count.count_into`.
        """
        with self._lock:
            if self._order.is_elsewhere():
                self._flush()
                self._order.enter()
            self._reserve(row)
            if (
                self._triton
                and tensor.dtype in LAYOUTS
                and is_dense(tensor)
                and tensor.is_contiguous()
            ):  # the kernel wants an address alone
                if tensor.numel():
                    self._add_flat(tensor.detach(), row, 1, stable)
            else:
                for flat, multiplicity in pieces(tensor):
                    self._add_flat(flat, row, multiplicity, stable)
            if self._bytes > PENDING_BYTES:
                self._flush()

    def flush(self) -> None:
        """Launch for everything that waits.

        Raises:
            RuntimeError: a tensor that was added as stable has been changed since.
        """
        with self._lock:
            self._flush()

    def collect(self) -> PendingCounts:
        """Counts of all rows named since the last call, in one transfer; then starts anew."""
        with self._lock:
            self._flush()
            self._order.join()
            pending = PendingCounts(self._counts[: self._rows])
            self._counts[: self._rows].zero_()
            self._order.begin()
            self._rows = 0
        return pending

    def _new_counts(self, rows: int) -> Tensor:
        return torch.zeros(rows, RAW_LEN, dtype=torch.int64, device=self.device)

    def _reserve(self, row: int) -> None:
        if row >= self._counts.shape[0]:
            self._flush()
            self._order.join()
            old = self._counts
            self._counts = self._new_counts(max(row + 1, 2 * len(old)))
            self._counts[: len(old)] = old
            self._order.release(old)
            self._order.begin()
        self._rows = max(self._rows, row + 1)

    def _add_flat(self, flat: Tensor, row: int, multiplicity: int, stable: bool) -> None:
        if not self._triton or flat.dtype not in LAYOUTS:
            self._counts[row] += exponent_torch.count_flat(flat) * multiplicity
        elif stable and not flat.is_inference():  # a tensor made in inference mode has no version
            self._waiting.append((flat, row, multiplicity))
            self._versions.append(flat._version)  # which a view shares with its base
            self._bytes += flat.numel() * flat.element_size()
        else:
            self._launch([(flat, row, multiplicity)])

    def _flush(self) -> None:
        if not self._waiting:
            return
        waiting, versions = self._waiting, self._versions
        self._waiting, self._versions, self._bytes = [], [], 0
        changed = {
            row
            for (flat, row, _), version in zip(waiting, versions, strict=True)
            if flat._version != version
        }
        if changed:
            raise RuntimeError(
                f"tensors of the rows {sorted(changed)} were changed in place while they waited to "
                "be counted: flush() before the change, or add them without stable=True"
            )
        is_elsewhere = self._order.is_elsewhere()
        with self._order.launching():
            self._launch(waiting)
        if is_elsewhere:
            for tensor, _, _ in waiting:
                self._order.release_counted(tensor)

    def _launch(self, items: list[_Waiting]) -> None:
        exponent_cuda: Any = late_import(_CUDA_COUNTER)
        exponent_cuda.launch([exponent_cuda.Counted(*item) for item in items], self._counts)


class PendingCounts:
    """Rows of counts on their way from a device to pinned memory of the host."""

    def __init__(self, counts: Tensor) -> None:
        """``counts`` [rows, RAW_LEN] may be written again after this call, on the same stream."""
        self._event: torch.cuda.Event | None = None
        if counts.device.type == "cuda":
            self._counts = counts.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._event.record(torch.cuda.current_stream(counts.device))
        else:
            self._counts = counts.to("cpu", copy=True)

    def rows(self) -> Raw:
        """[highest row + 1, RAW_LEN]. Waits for the device where they have not arrived."""
        if self._event is not None:
            wait_for(self._event)
        rows: Raw = self._counts.numpy()
        return rows


def current_handle(index: int) -> int:
    """CUDA's own number of the current stream. `torch.cuda.current_stream` makes an object to hold
    it, at many times the price; builds without CUDA have nothing else."""
    raw: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    handle: int = torch.cuda.current_stream(index).cuda_stream if raw is None else raw(index)
    return handle


class _StreamOrder:
    """Order between the buffer of counts and every CUDA stream that adds to it.

    The buffer is cleared, grown and read on one stream. A stream that counts waits for that first
    (`enter`), and is waited for before the next time (`join`). Without CUDA there is no such thing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._used: set[torch.cuda.Stream] = set()
        self.begin()

    def begin(self) -> None:
        """The buffer was just written on the current stream: from here on it may be counted to."""
        if self._cuda:
            self._take_stream()
            self._ready = self._stream.record_event()
            self._used = {self._stream}

    def is_elsewhere(self) -> bool:
        """Whether the current stream is not the one that counted last."""
        return self._cuda and current_handle(self._device.index) != self._handle

    def enter(self) -> None:
        """The current stream, which is another one, is going to count."""
        self._take_stream()
        if self._stream not in self._used:
            self._stream.wait_event(self._ready)
            self._used.add(self._stream)

    def _take_stream(self) -> None:
        self._stream = torch.cuda.current_stream(self._device)
        self._handle = self._stream.cuda_stream

    def join(self) -> None:
        """The current stream waits for all that count."""
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            for stream in self._used:
                current.wait_stream(stream)

    def launching(self) -> AbstractContextManager[object]:
        """Launches for what waits go to the stream that was entered last."""
        return torch.cuda.stream(self._stream) if self._cuda else nullcontext()

    def release(self, buffer: Tensor) -> None:
        """The memory of a buffer of counts may be reused once every stream is through."""
        for stream in self._used:
            buffer.record_stream(stream)

    def release_counted(self, tensor: Tensor) -> None:
        """The same of a tensor that was counted on the stream entered last, which is not the
        current one. On the current stream that would be one more use in order, as the training's
        own are, and no `record_stream` is wanted: its event would stay on memory that CUDA graph
        trees manage, and they end the training where they find one."""
        tensor.record_stream(self._stream)


@cache
def triton_problem(device: torch.device) -> str:
    """Why tensors on ``device`` are counted by plain torch; "" where Triton's kernel counts them.

    The first call for a device compiles the kernel, or reads what Triton compiled before.
    """
    # Triton's interpreter reads host memory: it serves tests on a CPU, and never a GPU.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != ("cpu" if interpreted else "cuda"):
        return f"it does not serve devices of the type {device.type}"
    if torch.version.hip is not None:
        return "it is made for NVIDIA's GPUs"  # its 32 bins assume warps of 32 threads
    try:
        if not is_installed("triton"):
            return "Triton is not installed"
        exponent_cuda: Any = late_import(_CUDA_COUNTER)
        with real_builtins():  # Triton imports more as it compiles
            problem: str = exponent_cuda.problem(device)
    except Exception as error:  # of any kind: a Triton that does not fit this machine
        return in_words(error)
    return problem
