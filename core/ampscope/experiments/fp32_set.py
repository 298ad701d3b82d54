"""The smallest set of modules that must stay in fp32: delta debugging over the module tree.

Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002 (ddmin). Each
candidate is a real run; the result is 1-minimal: leaving out any one module brings the fault back,
unless the bound on runs was met first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def smallest_fp32_set(
    names: Sequence[str], cures: Callable[[tuple[str, ...]], bool], max_runs: int
) -> tuple[str, ...] | None:
    """A minimal subset of ``names`` for which ``cures`` is true; None when all of them do not."""
    left = max_runs

    def ask(candidate: Sequence[str]) -> bool:
        nonlocal left
        if left <= 0 or not candidate:
            return False
        left -= 1
        return cures(tuple(candidate))

    current = list(names)
    if not ask(current):
        return None
    parts = 2
    while len(current) > 1 and left > 0:
        size = max(1, -(-len(current) // parts))
        chunks = [current[i : i + size] for i in range(0, len(current), size)]
        for chunk in chunks:
            if ask(chunk):
                current, parts = chunk, 2
                break
        else:
            for chunk in chunks:
                rest = [n for n in current if n not in chunk]
                if len(chunks) > 2 and ask(rest):
                    current, parts = rest, max(parts - 1, 2)
                    break
            else:
                if parts >= len(current):
                    break
                parts = min(len(current), parts * 2)
    return tuple(current)
