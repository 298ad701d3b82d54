"""Where dtype conversions happen: module, phase, from what to what, how many a step.

Every cast reads and writes a whole tensor, so a model that casts back and forth pays in bandwidth
what it saves in arithmetic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ampscope.records import OpRecord


@dataclass(frozen=True, slots=True)
class CastSite:
    """Casts of one kind in one module and phase of one step."""

    module: int
    phase: str
    source: str
    target: str
    count: int


def cast_sites(ops: Iterable[OpRecord]) -> list[CastSite]:
    """Most casts first, then by module."""
    counts: dict[tuple[int, str, str, str], int] = defaultdict(int)
    for op in ops:
        if op.is_cast:
            counts[op.module, op.phase, op.inputs or "?", op.outputs or "?"] += op.count
    sites = [CastSite(*key, count) for key, count in counts.items()]
    return sorted(sites, key=lambda s: (-s.count, s.module, s.phase, s.source, s.target))


def cast_kinds(sites: Iterable[CastSite]) -> list[tuple[str, str, int]]:
    """(from, to, count) over all modules, most first."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for site in sites:
        counts[site.source, site.target] += site.count
    return sorted(((*key, n) for key, n in counts.items()), key=lambda kind: (-kind[2], kind[:2]))
