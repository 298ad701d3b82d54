"""How long something takes: a median with its spread."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall time of one call: median and quartiles of ``repeats``, in seconds."""

    median_s: float
    low_s: float  # first quartile
    high_s: float  # third quartile
    repeats: int

    @property
    def spread(self) -> float:
        """Distance of the quartiles over the median."""
        return (self.high_s - self.low_s) / self.median_s
