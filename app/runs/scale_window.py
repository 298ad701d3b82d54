"""Which loss scales suit every module of a run, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

from ampscope.analysis.scale_window import ScaleWindow, common_window
from ampscope.formats import NumberFormat
from ampscope.records import Frame
from app import layout


def say(frame: Frame, fmt: NumberFormat, names: Mapping[int, str], what: str) -> None:
    """The sentence, where the gradients of a frame allow one; ``what`` is what they are called."""
    window = common_window(frame, fmt) if frame.role.is_gradient else None
    if window is not None:
        layout.see(sentence(window, names, fmt.name, what))


def sentence(window: ScaleWindow, names: Mapping[int, str], format_name: str, what: str) -> str:
    """Which loss scales suit every module at this step, by ``what`` was looked at."""
    if window.spans:
        name = names.get(window.spans[0], "?")
        more = f" and {len(window.spans) - 1} more" if window.spans[1:] else ""
        return (
            f"No loss scale keeps the {what} of {name}{more} in {format_name}: they span more "
            "powers of two than it holds."
        )
    if window.low > window.high:
        return (
            f"No single loss scale suits every module: {names.get(window.lowest, '?')} needs at "
            f"least 2^{window.low}, {names.get(window.highest, '?')} bears at most 2^{window.high}."
        )
    return (
        f"At this step, loss scales from 2^{window.low} to 2^{window.high} keep the {what} of "
        f"every module in {format_name} (at most 0.1 % of a module too small, nothing too large)."
    )
