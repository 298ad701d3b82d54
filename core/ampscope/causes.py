"""The root causes that a diagnosis may name, as the rules say them, and "no fault".

Collected from about 190 public issues of frameworks and training codebases.
"""

from __future__ import annotations

from dataclasses import dataclass

from ampscope.errors import BadInput
from ampscope.rules.catalog import all_rules


@dataclass(frozen=True, slots=True)
class Cause:
    """One root cause: its code, and what is said of it everywhere."""

    code: str  # "AMP012"
    name: str
    title: str
    definition: str  # what it is, in one sentence

    @property
    def titled(self) -> str:
        """The title with its code, as every surface names a cause: "… (AMP012)"."""
        return f"{self.title} ({self.code})"

    @property
    def inside(self) -> str:
        """The title with its code inside a sentence: "the data holds NaN or infinity (AMP028)"."""
        keeps_case = self.title.startswith("BatchNorm")
        return self.titled if keeps_case else self.titled[0].lower() + self.titled[1:]


NO_FAULT = Cause(
    "AMP000",
    "no_fault",
    "No fault",
    "What was seen is expected: a scale search, structural zeros, a harmless intermediate "
    "infinity.",
)
_FOUND = [Cause(rule.code, rule.id, rule.title, rule.definition) for rule in all_rules()]
# By name, in the order of their codes.
CAUSES: dict[str, Cause] = {
    cause.name: cause for cause in (*sorted(_FOUND, key=lambda c: c.code), NO_FAULT)
}


@dataclass(frozen=True, slots=True)
class StableCode:
    """What is reported of a source that was not run."""

    code: str  # "PRE001", or that of a cause
    name: str
    title: str
    level: str  # SARIF's: error, warning or note
    evidence: str  # what in the source shows it
    remedy: str


def find_cause(text: str) -> Cause:
    """By code ("AMP012", "amp12", "12") or name. Raises BadInput for a text that is neither."""
    wanted = text.strip().lower()
    number = wanted.removeprefix("amp")
    code = f"AMP{int(number):03d}" if number.isdecimal() else ""
    for cause in CAUSES.values():
        if wanted == cause.name or code == cause.code:
            return cause
    raise BadInput(f"There is no cause {text!r}. `ampscope explain` lists them all.")
