"""What an export wrote, for the one sentence that the command prints about it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampscope.exports.steps import ExportedStep


@dataclass(slots=True)
class ExportSummary:
    """Counts of what was written under ``folder``."""

    folder: Path
    steps: int = 0
    histograms: int = 0
    unusable: int = 0  # histograms left out: their loss scale is no positive finite number

    def count(self, step: ExportedStep) -> None:
        """Take in one step."""
        self.steps += 1
        self.histograms += sum(1 for h in step.histograms.values() if h.counts.size)
        self.unusable += sum(1 for h in step.histograms.values() if h.is_unusable)

    def sentence(self) -> str:
        """How much was written, and what could not be."""
        text = f"{self.steps:,} steps, {self.histograms:,} histograms -> {self.folder}"
        if self.unusable:
            text += (
                f"\n{self.unusable:,} histograms were left out: the loss scale recorded with them "
                "is no positive finite number, so they cannot be unscaled."
            )
        return text
