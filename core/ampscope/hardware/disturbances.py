"""What spoiled a measurement of rates, by the readings beside it, by the thresholds of
:mod:`ampscope.analysis.telemetry`: clocks that were held down, and others who used the device.
"""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.telemetry import LEAST_SHARE, OTHERS_PERCENT, by_device, held_back, usage
from ampscope.records import Sample


def held_down(samples: Sequence[Sample]) -> str:
    """What held the clocks of a device down, or nothing."""
    for device, readings in by_device(samples).items():
        often = {r: share for r, share in held_back(readings).items() if share >= LEAST_SHARE}
        if often:
            named = " and ".join(f"{r} in {share:.0%} of the time" for r, share in often.items())
            name = "the CPU" if device == "cpu" else device
            return f"The clocks of {name} were held down: {named}."
    return ""


def shared(samples: Sequence[Sample]) -> str:
    """Who else used the CPU, or held memory on the GPU, meanwhile; or nothing."""
    for device, readings in by_device(samples).items():
        others = usage(readings).others_percent if device == "cpu" else None
        if others is not None and others >= OTHERS_PERCENT:
            return (
                f"Other processes used {others:.0f} % of the CPU meanwhile, so these rates are too "
                "low: measure again when it is idle."
            )
        beside = [s for s in readings if s.other_processes]
        if beside and len(beside) >= LEAST_SHARE * len(readings):
            return f"Other processes held memory on {device} meanwhile: rates may be too low."
    return ""
