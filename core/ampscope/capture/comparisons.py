"""Half against fp32, tensor by tensor: how many values became zero or subnormal, and how far apart
the values are.

    lost          zero in half, not zero in fp32
      below range the fp32 value is smaller than the format's smallest number above zero:
                  underflow
      the rest    the format has numbers of that size: a sum that cancelled, a ReLU that
                  switched otherwise, or values that were lost further up the pass
    subnormal     below the smallest normal number of the format
    zero in both   zero in both

All numbers of a step stay on the device until :meth:`Comparisons.records` fetches them in one
transfer. A tensor may have any layout; it is compared in pieces, because an fp32 sum of more
than 2^24 equal terms stops growing, and BLAS ends at 2^31 elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ampscope.capture.tensors import HALF, plain
from ampscope.records import Role, ShadowRecord

PIECE = 1 << 22  # elements compared at a time; 4 temporaries of 16 MiB
_FP32_MIN_NORMAL = torch.finfo(torch.float32).tiny
_LENGTH = 9  # numbers of a comparison
_Owner = tuple[int, Role]  # module, role


class Comparisons:
    """The comparisons of one step. ``computes_in`` is the half format of the training: what an fp32
    weight gradient was computed in before it was cast."""

    def __init__(self, step: int, computes_in: torch.dtype | None = None) -> None:
        self._step = step
        self._computes_in = computes_in
        self._owners: list[tuple[_Owner, int]] = []  # and the number of elements
        self._numbers: list[Tensor] = []

    def add(self, module: int, role: Role, half: Tensor, reference: Tensor, scale: float) -> None:
        """Compare ``half``, which is ``scale`` times as large, with its fp32 ``reference``. Tensors
        of different shapes are left out."""
        pair = _side_by_side(half, reference)
        if pair is None:
            return
        narrow = half.dtype
        if narrow not in HALF and narrow.itemsize > 1 and self._computes_in is not None:
            narrow = self._computes_in
        info = torch.finfo(narrow)
        below = info.tiny * info.eps / scale  # smallest subnormal, in the reference's unit
        self._owners.append(((module, role), pair[0].numel()))
        self._numbers.append(_numbers(*pair, scale, torch.finfo(half.dtype).tiny, below))

    def records(self) -> list[ShadowRecord]:
        """One record per module and role, over all its tensors and calls together."""
        if not self._numbers:
            return []
        device = self._numbers[0].device
        table = torch.stack([numbers.to(device) for numbers in self._numbers]).tolist()
        totals: dict[_Owner, int] = {}
        sums: dict[_Owner, list[float]] = {}
        for (owner, total), row in zip(self._owners, table, strict=True):
            totals[owner] = totals.get(owner, 0) + total
            sums[owner] = _added(sums[owner], row) if owner in sums else row
        return [_record(self._step, o, totals[o], row) for o, row in sums.items()]


def _side_by_side(half: Tensor, reference: Tensor) -> tuple[Tensor, Tensor] | None:
    """The numbers of both in the same order, flat; None where they do not have the same places."""
    if half.layout is torch.strided and not half.is_nested:
        if reference.layout is not torch.strided:
            reference = reference.to_dense()
        if half.shape != reference.shape:
            return None
        return plain(half).flatten(), plain(reference).flatten()
    if half.layout is not reference.layout or half.is_nested != reference.is_nested:
        return _side_by_side(half.to_dense(), reference)
    if half.is_nested or half.layout is torch._mkldnn:  # type: ignore[attr-defined]  # absent from torch's stubs
        one, other = plain(half), plain(reference)
        return (one.flatten(), other.flatten()) if one.shape == other.shape else None
    if half.shape != reference.shape:
        return None
    # Both sparse. What only one of them stores is zero in the other.
    one, other = half.detach().to_sparse().coalesce(), reference.detach().to_sparse().coalesce()
    if not torch.equal(one.indices(), other.indices()):
        one, other = _and_places_of(one, other), _and_places_of(other, one)
    return plain(one.values()).flatten(), plain(other.values()).flatten()


def _and_places_of(one: Tensor, other: Tensor) -> Tensor:
    """``one`` with stored zeros wherever ``other`` stores a value."""
    wide = torch.complex64 if one.is_complex() else torch.float32  # half has no sparse sum on a CPU
    places = torch.cat([one.indices(), other.indices()], 1)
    values = torch.cat([one.values().to(wide), torch.zeros_like(other.values(), dtype=wide)])
    return torch.sparse_coo_tensor(places, values, one.shape).coalesce()


def pieces(count: int, most: int) -> Iterator[slice]:
    """Parts of ``count`` elements in order, ``most`` at a time."""
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def _numbers(
    half: Tensor, reference: Tensor, scale: float, min_normal: float, smallest: float
) -> Tensor:
    """Of flat tensors: lost, below range, subnormal, zero in both, |reference|^2,
    |half - reference|^2, dot, |half|^2, max |reference|; in fp64, lengths in the reference's unit.

    ``min_normal`` is the smallest normal number of the half tensor, ``smallest`` the smallest above
    zero in the reference's unit.
    """
    parts = [
        _piece(half[part], reference[part], scale, min_normal, smallest)
        for part in pieces(half.numel(), PIECE)
    ]
    if not parts:
        return torch.zeros(_LENGTH, dtype=torch.float64, device=half.device)
    if len(parts) == 1:
        return parts[0]
    table = torch.stack(parts)
    return torch.cat([table[:, :-1].sum(0), table[:, -1:].amax(0)])


def _piece(
    half: Tensor, reference: Tensor, scale: float, min_normal: float, smallest: float
) -> Tensor:
    """:func:`_numbers` of a piece.

    The distances are in the unit of the reference's largest power of two, so that no square leaves
    fp32's range. Counts are exact in fp64 up to 2^53. About 3 ns an element on 2 cores; with fp64
    copies it took 30.
    """
    wanted, value = reference.float(), half.float()
    magnitude, wanted_magnitude = value.abs(), wanted.abs()
    zero = half.numel() - torch.count_nonzero(value)  # -0 counts as zero
    largest = wanted_magnitude.max()
    unit = _unit(largest)
    subnormal = _subnormal(magnitude, wanted_magnitude, zero, min_normal)
    below = _below_range(magnitude, wanted_magnitude, zero, smallest)
    zero_before = half.numel() - torch.count_nonzero(magnitude.add_(wanted_magnitude))
    value, wanted = value.mul(unit / scale), wanted * unit
    squares = [
        torch.linalg.vector_norm(wanted).double().square(),
        torch.linalg.vector_norm(value - wanted).double().square(),
        torch.dot(value, wanted).double(),
        torch.linalg.vector_norm(value).double().square(),
    ]
    back = unit.double().square()
    counts = (zero - zero_before, below, subnormal, zero_before)
    lengths = (square / back for square in squares)
    return torch.stack([*(count.double() for count in counts), *lengths, largest.double()])


def _below_range(magnitude: Tensor, wanted: Tensor, zero: Tensor, limit: float) -> Tensor:
    """How many are zero where the reference is above zero and below ``limit``."""
    if zero.device.type == "cpu" and not zero:
        return torch.zeros_like(zero)
    return torch.count_nonzero((magnitude == 0) & (wanted > 0) & (wanted < limit))


def _subnormal(magnitude: Tensor, wanted: Tensor, zero: Tensor, min_normal: float) -> Tensor:
    """How many are below the smallest normal number of their format, and not zero.

    A format with fp32's range has fp32's smallest normal number: there, what is subnormal in the
    reference as well is not the format's doing, and is left out.
    """
    below = magnitude < min_normal
    count = torch.count_nonzero(below) - zero
    if min_normal > _FP32_MIN_NORMAL or (count.device.type == "cpu" and not count):
        return count
    below &= (wanted >= _FP32_MIN_NORMAL) & (magnitude > 0)
    return torch.count_nonzero(below)


def _unit(largest: Tensor) -> Tensor:
    """A power of two that brings ``largest`` near 1; 1 where that is zero or not finite."""
    exponent = torch.floor(torch.log2(largest)).clamp(-126, 126)
    is_number = torch.isfinite(largest) & (largest > 0)
    return torch.where(is_number, torch.exp2(-exponent), 1.0)


def _added(one: list[float], other: list[float]) -> list[float]:
    """The numbers of both tensors together."""
    largest = other[-1] if math.isnan(other[-1]) else max(one[-1], other[-1])
    return [*(a + b for a, b in zip(one[:-1], other[:-1], strict=True)), largest]


def _record(step: int, owner: _Owner, total: int, row: list[float]) -> ShadowRecord:
    lost, below, subnormal, zero_before, square, error, dot, half_square, largest = row
    length = _root(square) * _root(half_square)
    return ShadowRecord(
        step=step,
        module=owner[0],
        role=owner[1],
        total=total,
        lost=int(lost),
        subnormal=int(subnormal),
        zero_before=int(zero_before),
        relative_error=_root(error) / _root(square) if square else None,
        cosine=dot / length if length else None,
        max_abs_fp32=largest if total else None,
        below_range=int(below),
    )


def _root(square: float) -> float:
    return math.sqrt(square) if square >= 0 else math.nan
