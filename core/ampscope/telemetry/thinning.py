"""What is kept of the readings of a run that lasts.

Ten readings a second are 5 MB an hour. A run's first half hour is kept as it was read; after that a
minute keeps a reading every 10 s, a day later ten minutes keep one every minute, and of every such
window the extremes of each quantity and whatever held the clocks down. A week is then about 60,000
rows. Wherever readings are left out, shares of time are estimates.
"""

from __future__ import annotations

# After so many seconds of a run: seconds of a window, and readings kept of it besides extremes.
STAGES = ((1800.0, 60.0, 6), (86400.0, 600.0, 10))
ALL_OF = 1.0  # before that, a window is what one transaction holds


def window_s(age_s: float) -> float:
    """How many seconds of readings are written together."""
    return next((w for since, w, _ in reversed(STAGES) if age_s >= since), ALL_OF)


def regular(age_s: float) -> int:
    """How many readings of a window are kept whatever they say; 0 is all of them."""
    return next((kept for since, _, kept in reversed(STAGES) if age_s >= since), 0)
