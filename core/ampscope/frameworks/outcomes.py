"""How a watched training ended, with what was seen of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampscope.observations import Attempt, Call, Outcome


def outcome_of(
    ended: str,
    steps: int,
    attempts: Sequence[Attempt],
    calls: Iterable[Call],
    half_seen: Iterable[str],
    notes: tuple[str, ...],
) -> Outcome:
    """``steps`` counts all attempts; ``attempts`` and ``calls`` are those that were kept."""
    return Outcome(
        ended=ended,
        attempts=steps,
        backwards=sum(c.name == "backward" for c in calls),
        optimizers=tuple(sorted({a.optimizer for a in attempts})),
        scalers=tuple(sorted({a.scaler for a in attempts} - {""})),
        uses_autocast="+".join(sorted(half_seen)),
        notes=notes,
        last_loss=attempts[-1].loss if attempts else None,
    )
