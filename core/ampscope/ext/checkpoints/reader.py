"""Reads a checkpoint's tensors piece by piece, and counts what their numbers are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampscope.errors import BadInput
from ampscope.ext.checkpoints import counting
from ampscope.ext.checkpoints.files import StoredTensor, pieces

PIECE = 1 << 21  # bytes: with its copy from the page cache it stays in most L2 and L3 caches
THREADS = 2
# Times that a file is read: once, again where fp16 would overflow, and with the tensor that it is
# compared with. Tensors that overlap, or are named again and again, could ask for any number.
MOST_TIMES = 8
_LIMITS = {dtype: counting.bits_of(dtype) for dtype in counting.FLOATS}


@dataclass(frozen=True, slots=True)
class TensorCounts:
    """What the numbers of one tensor are. Of integers everything but ``elements`` is 0."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    size: int  # bytes
    nan: int = 0
    inf: int = 0  # of both signs
    zero: int = 0
    subnormal: int = 0  # in its own format
    negative: int = 0
    fp16_overflow: int = 0  # finite, and infinite in fp16
    fp16_zero: int = 0  # not zero, and zero in fp16
    fp16_subnormal: int = 0
    overflowing_rows: int = 0  # output channels with such an element


class TensorReader:
    """Reads tensors piece by piece, with a buffer for each thread: memory does not grow with the
    file, and a file that gets shorter meanwhile is an error and no signal."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._room = 0  # bytes that may still be read
        self._overflowing: dict[tuple[object, ...], int] = {}
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(THREADS)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        for descriptor in self._files.values():
            os.close(descriptor)

    def counts(self, tensors: Sequence[StoredTensor]) -> list[TensorCounts]:
        """Of each of these; tensors that share their memory are read once."""
        places = {_place(t): t for t in tensors if _format(t.dtype) in counting.FLOATS}
        jobs: list[tuple[StoredTensor, int, int]] = []
        for tensor in places.values():
            self._open(tensor.file)
            jobs += [(tensor, *piece) for piece in pieces(tensor, PIECE)]
        found = {place: np.zeros(counting.LENGTH, np.uint64) for place in places}
        lock = threading.Lock()
        at = iter(jobs)

        def work() -> None:
            while True:
                with lock:
                    job = next(at, None)
                if job is None:
                    return
                tensor, offset, size = job
                part = np.zeros(counting.LENGTH, np.uint64)
                limits = _LIMITS[_format(tensor.dtype)]
                counting.count(self._read(tensor, offset, size), limits, part)
                total = found[_place(tensor)]
                with lock:
                    total[: counting.LARGEST] += part[: counting.LARGEST]

        for future in [self._pool.submit(work) for _ in range(THREADS)]:
            future.result()
        return [self._counts_of(t, found.get(_place(t))) for t in tensors]

    def _counts_of(self, t: StoredTensor, found: NDArray[np.uint64] | None) -> TensorCounts:
        plain = TensorCounts(t.label, t.kind, t.dtype, t.shape, t.count, t.size)
        if found is None:
            return plain
        n = [int(x) for x in found]
        if t.dtype in counting.PARTS:  # fp16 and subnormals are asked of real weights alone
            infinite = n[counting.POS_INF] + n[counting.NEG_INF]
            return replace(plain, nan=n[counting.NAN], inf=infinite)
        return replace(
            plain,
            nan=n[counting.NAN],
            inf=n[counting.POS_INF] + n[counting.NEG_INF],
            zero=n[counting.ZERO],
            subnormal=n[counting.SUBNORMAL],
            negative=n[counting.NEGATIVE],
            fp16_overflow=n[counting.FP16_INF],
            fp16_zero=n[counting.FP16_ZERO],
            fp16_subnormal=n[counting.FP16_SUBNORMAL],
            overflowing_rows=self._rows(t) if n[counting.FP16_INF] else 0,
        )

    def _rows(self, tensor: StoredTensor) -> int:
        """Rows of the first dimension. A second look, only at tensors with such an element."""
        rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        what = (*_place(tensor), rows)
        if what not in self._overflowing:
            self._overflowing[what] = self._count_rows(tensor, rows)
        return self._overflowing[what]

    def _count_rows(self, tensor: StoredTensor, rows: int) -> int:
        width = tensor.size // rows
        together, item = max(1, PIECE // width), tensor.size // tensor.count
        limits, found = _LIMITS[tensor.dtype], 0
        if width > PIECE:  # a row of many pieces
            for row in range(rows):
                start = tensor.offset + row * width
                for at in range(0, width, PIECE):
                    bits = self._read(tensor, start + at, min(PIECE, width - at))
                    if counting.overflowing_rows(bits[None, :], limits):
                        found += 1
                        break
            return found
        for first in range(0, rows, together):
            count = min(together, rows - first)
            bits = self._read(tensor, tensor.offset + first * width, count * width)
            found += counting.overflowing_rows(bits.reshape(count, width // item), limits)
        return found

    def pairs(self, one: StoredTensor, other: StoredTensor) -> Iterable[tuple[Any, Any]]:
        """Both as fp32, in equal parts; they have the same shape."""
        elements = PIECE // 8
        sizes = [t.size // max(1, t.count) for t in (one, other)]
        for start in range(0, one.count, elements):
            length = min(elements, one.count - start)
            parts = []
            for tensor, size in zip((one, other), sizes, strict=True):
                self._open(tensor.file)
                bits = self._read(tensor, tensor.offset + start * size, length * size)
                parts.append(np.array(counting.as_fp32(bits, tensor.dtype)))
            yield parts[0], parts[1]

    def _open(self, path: Path) -> None:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._room += MOST_TIMES * os.fstat(self._files[path]).st_size

    def _read(self, tensor: StoredTensor, offset: int, size: int) -> NDArray[Any]:
        """Bits as unsigned integers, in this thread's buffer: valid until its next read."""
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = np.empty(PIECE + 8, np.uint8)
        self._room -= size
        if self._room < 0:
            raise BadInput(
                f"{tensor.file} is damaged: its tensors overlap, and claim many times its size."
            )
        view: memoryview = buffer[:size].data
        done = 0
        while done < size:
            got = os.preadv(self._files[tensor.file], [view[done:]], offset + done)
            if not got:
                raise BadInput(f"{tensor.file} became shorter while it was read: check it again.")
            done += got
        kind = counting.FLOATS[_format(tensor.dtype)][1]
        return buffer[:size].view(kind)


def _format(dtype: str) -> str:
    """Of the numbers that a tensor is read as."""
    return counting.PARTS.get(dtype, dtype)


def _place(tensor: StoredTensor) -> tuple[Path, int, int, str]:
    return tensor.file, tensor.offset, tensor.size, tensor.dtype
