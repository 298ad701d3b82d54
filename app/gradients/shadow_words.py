"""What the fp32 shadow of one step says beside the histogram."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.records import ShadowRecord
from app.text import share


def lost_on_the_way(sampled: Sequence[ShadowRecord]) -> str:
    """What had become zero before it could be counted: the histogram alone cannot tell."""
    lost, total = sum(s.lost for s in sampled), sum(s.total for s in sampled)
    if not lost:
        return "Against the fp32 shadow of this step nothing was lost on the way."
    return (
        f"Against the fp32 shadow of this step {share(lost, total)} of all elements were lost "
        "on the way: zero as recorded, not zero in fp32. No histogram shows those, and no scale "
        "that is applied now brings them back."
    )
