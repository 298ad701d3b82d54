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
    below = [s.below_range for s in sampled if s.below_range is not None]
    which = ""
    if len(below) == len(sampled):
        which = (
            f" {share(sum(below), lost)} of these are below the format's range; the others "
            "cancelled or flipped."
        )
    return (
        f"Against the fp32 shadow of this step {share(lost, total)} of all elements were lost "
        f"on the way: zero as recorded, not zero in fp32.{which} No histogram shows those, and no "
        "scale that is applied now brings them back."
    )
