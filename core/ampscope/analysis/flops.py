"""How many of a step's floating-point operations ran in which dtype.

Only ops that have a FLOP formula count (matrix products, convolutions, attention): they are what
Tensor Cores speed up. An op belongs to the dtype of its floating-point inputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ampscope.analysis.dtypes import compute_dtype, is_half
from ampscope.records import OpRecord


@dataclass(frozen=True, slots=True)
class FlopShare:
    """FLOPs by dtype, most first; of one module or of the whole step."""

    by_dtype: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """FLOPs in every dtype."""
        return sum(n for _, n in self.by_dtype)

    @property
    def half(self) -> int:
        """FLOPs in fp16, bf16 and narrower formats."""
        return sum(n for dtype, n in self.by_dtype if is_half(dtype))

    @property
    def half_share(self) -> float | None:
        """0 … 1, or None when nothing with a FLOP formula ran."""
        return self.half / self.total if self.total else None


def flop_share(ops: Iterable[OpRecord]) -> FlopShare:
    """FLOPs of all ``ops``."""
    counts: dict[str, int] = defaultdict(int)
    for op in ops:
        if op.flops:
            counts[compute_dtype(op.inputs) or "other"] += op.flops
    return FlopShare(tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))))


def flops_by_module(ops: Iterable[OpRecord]) -> list[tuple[int, FlopShare]]:
    """(module, its share), the modules with most FLOPs first; modules without any are left out."""
    own: dict[int, list[OpRecord]] = defaultdict(list)
    for op in ops:
        if op.flops:
            own[op.module].append(op)
    shares = [(module, flop_share(found)) for module, found in own.items()]
    return sorted(shares, key=lambda item: (-item[1].total, item[0]))
