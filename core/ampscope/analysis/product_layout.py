"""How a product's operands lie in memory, in one word each."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.records import Operand


def layout(operand: Operand) -> str:
    """contiguous | channels_last | transposed | expanded | strided

    >>> layout(Operand((256, 1024), (1, 256), "bf16"))
    'transposed'
    """
    axes = [i for i, size in enumerate(operand.shape) if size > 1]
    if any(operand.stride[i] == 0 for i in axes):
        return "expanded"
    if _is_dense(operand, axes):
        return "contiguous"
    rank = len(operand.shape)
    if rank in (4, 5) and _is_dense(operand, [i for i in (0, *range(2, rank), 1) if i in axes]):
        return "channels_last"
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    if rank >= 2 and _is_dense(operand, [i for i in swapped if i in axes]):
        return "transposed"
    return "strided"


def shapes(operands: Sequence[Operand]) -> str:
    """``1024×256 · 256×96 transposed``; contiguous is not said."""
    parts = []
    for operand in operands:
        kind = layout(operand)
        size = "×".join(map(str, operand.shape)) or "scalar"
        parts.append(size if kind == "contiguous" else f"{size} {kind}")
    return " · ".join(parts)


def _is_dense(operand: Operand, order: Sequence[int]) -> bool:
    """Whether the axes lie in that order, the last one fastest, without gaps."""
    step = 1
    for axis in reversed(order):
        if operand.stride[axis] != step:
            return False
        step *= operand.shape[axis]
    return True
