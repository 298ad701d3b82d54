"""Packing of histogram frames: many rows of RAW_LEN counts into one small blob and back.

Layout, little endian, after one format byte: zlib of ::

    u32 rows · u32 module[rows] · u8 dtype[rows] · u16 occupied[rows]
    u16 column[sum(occupied)] · count[sum(occupied)], each byte plane apart

Only occupied bins are kept. Columns are stored as gaps within a row and counts as byte planes
(all low bytes, then all second bytes …): both make runs of equal bytes, which deflate well.
The count's width (1, 2, 4 or 8 bytes) is the format byte.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from ampscope.errors import StoreError
from ampscope.numerics.histogram import RAW_LEN, Raw

# Codes are part of the stored format: append, never reorder.
DTYPE_CODES = (
    "?", "fp64", "fp32", "bf16", "fp16", "e4m3", "e5m2", "complex64", "complex128",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(DTYPE_CODES)}
MAX_ROWS = 100_000  # of one frame: modules times dtypes; unpacked they take 227 MB
MAX_BODY = 128 * 2**20  # bytes: each of these rows with 130 occupied bins
ZLIB_LEVEL = 1  # level 6 saves 4 % of space for three times the time on recorded GPT frames


def pack(modules: tuple[int, ...], dtypes: tuple[str, ...], rows: Raw) -> bytes:
    """Blob of ``rows`` [n, RAW_LEN] of non-negative counts."""
    which, column = np.nonzero(rows)
    counts = rows[which, column].astype("<u8")
    occupied = np.bincount(which, minlength=len(modules)).astype("<u2")
    gaps = np.diff(column, prepend=0)
    first = np.diff(which, prepend=-1) > 0  # a row's first gap is its first column
    gaps[first] = column[first]
    largest = int(counts.max()) if counts.size else 0
    width = next(w for w in (1, 2, 4, 8) if largest < 1 << (8 * w))
    planes = counts.view(np.uint8).reshape(-1, 8)[:, :width].T
    codes = [_CODES.get(dtype, 0) for dtype in dtypes]
    body = b"".join(
        (
            np.array([len(modules)], "<u4").tobytes(),
            np.array(modules, "<u4").tobytes(),
            np.array(codes, np.uint8).tobytes(),
            occupied.tobytes(),
            _planes16(gaps),
            np.ascontiguousarray(planes).tobytes(),
        )
    )
    return bytes([width]) + zlib.compress(body, ZLIB_LEVEL)


def unpack(blob: bytes) -> tuple[tuple[int, ...], tuple[str, ...], Raw]:
    """Inverse of :func:`pack`. Raises StoreError for a blob that is not one."""
    try:
        width, body, count = _opened(blob)
        modules = np.frombuffer(body, "<u4", count, 4)
        codes = np.frombuffer(body, np.uint8, count, 4 + 4 * count)
        occupied = np.frombuffer(body, "<u2", count, 4 + 5 * count).astype(np.int64)
        cells, at = int(occupied.sum()), 4 + 7 * count
        low = np.frombuffer(body, np.uint8, cells, at).astype(np.int64)
        gaps = low + (np.frombuffer(body, np.uint8, cells, at + cells).astype(np.int64) << 8)
        planes = np.frombuffer(body, np.uint8, cells * width, at + 2 * cells)
        values = np.zeros((cells, 8), np.uint8)
        values[:, :width] = planes.reshape(width, cells).T
        which = np.repeat(np.arange(count), occupied)
        running = np.concatenate(([0], np.cumsum(gaps)))
        base = running[np.cumsum(occupied) - occupied]  # where the row before it ended
        rows = np.zeros((count, RAW_LEN), np.int64)
        rows[which, running[1:] - base[which]] = values.view("<u8").ravel().astype(np.int64)
        dtypes = tuple(DTYPE_CODES[code] for code in codes.tolist())
    except (IndexError, OverflowError, ValueError, zlib.error) as error:
        raise StoreError(f"A stored histogram is damaged ({error}); delete this run.") from error
    return tuple(modules.tolist()), dtypes, rows


def unpack_module(blob: bytes, module: int) -> Raw | None:
    """Sum of one module's rows, None when it has none: a quarter of the time of :func:`unpack`,
    for a series over many frames. Raises StoreError for a blob that is not one."""
    try:
        width, body, count = _opened(blob)
        hits = np.flatnonzero(np.frombuffer(body, "<u4", count, 4) == module).tolist()
        ends = np.cumsum(np.frombuffer(body, "<u2", count, 4 + 5 * count), dtype=np.int64)
        cells, at = int(ends[-1]) if count else 0, 4 + 7 * count
        out = np.zeros(RAW_LEN, np.int64)
        for hit in hits:
            start, end = int(ends[hit - 1]) if hit else 0, int(ends[hit])
            planes = [
                np.frombuffer(body, np.uint8, end - start, at + plane * cells + start)
                for plane in range(2 + width)
            ]
            gaps = planes[0].astype(np.int64) + (planes[1].astype(np.int64) << 8)
            values = sum(p.astype(np.int64) << (8 * i) for i, p in enumerate(planes[2:]))
            out[np.cumsum(gaps)] += values
    except (IndexError, OverflowError, ValueError, zlib.error) as error:
        raise StoreError(f"A stored histogram is damaged ({error}); delete this run.") from error
    return out if hits else None


def _opened(blob: bytes) -> tuple[int, bytes, int]:
    """Width of the counts, the body and its number of rows. Raises ValueError for a small blob that
    would be unpacked to much more than any frame of a model holds."""
    inflating = zlib.decompressobj()
    body = inflating.decompress(blob[1:], MAX_BODY)
    if inflating.unconsumed_tail or not inflating.eof:
        raise ValueError("it is cut off, or beyond bounds")
    count = int(np.frombuffer(body, "<u4", 1)[0])
    if count > MAX_ROWS or blob[0] not in (1, 2, 4, 8):
        raise ValueError(f"{count:,} rows are beyond bounds")
    return blob[0], body, count


def _planes16(values: NDArray[np.int64]) -> bytes:
    """Low bytes, then high bytes."""
    low, high = (values & 0xFF).astype(np.uint8), (values >> 8).astype(np.uint8)
    return bytes(low.tobytes() + high.tobytes())
