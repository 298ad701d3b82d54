"""The ranks of one distributed training. Each rank records a run of its own; all share a group.

A process may watch one training after the other under the same group: the first run of each rank
belongs together, then the second of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ampscope.records import RunInfo
from app import links, store
from app.text import plural

ALL = "all"


def is_rank(run: RunInfo) -> bool:
    """Whether the run is one of several ranks."""
    return run.spec.kind == "watch" and run.spec.world > 1 and bool(run.spec.group)


def ranks_of(run: RunInfo) -> tuple[RunInfo, ...]:
    """All ranks of the run's training by rank; of any other run itself alone."""
    if not is_rank(run):
        return (run,)
    found = grouped(store.group(run.spec.group))
    return next((ranks for ranks in found if any(r.id == run.id for r in ranks)), (run,))


def grouped(runs: Iterable[RunInfo]) -> list[tuple[RunInfo, ...]]:
    """Trainings in the order in which they first appear; each by rank. Other runs stand alone."""
    trainings: dict[tuple[str, int], list[RunInfo]] = {}
    seen: dict[tuple[str, int], int] = {}
    order: dict[str, tuple[str, int]] = {}
    listed = list(runs)
    for run in sorted(listed, key=lambda r: (r.created, r.id)):
        if is_rank(run):
            place = (run.spec.group, run.spec.rank)
            turn = seen[place] = seen.get(place, 0) + 1
            key = (run.spec.group, turn)
        else:
            key = (run.id, 0)
        order[run.id] = key
        trainings.setdefault(key, []).append(run)
    keys = dict.fromkeys(order[run.id] for run in listed)
    return [tuple(sorted(trainings[key], key=lambda r: r.spec.rank)) for key in keys]


def world_words(ranks: Sequence[RunInfo]) -> str:
    """``4 ranks``; ``3 of 4 ranks`` where some are not in this store."""
    world = ranks[0].spec.world
    return plural(world, "rank") if len(ranks) == world else f"{len(ranks)} of {world} ranks"


def pick(run: RunInfo, *, may_merge: bool) -> tuple[RunInfo, ...]:
    """The ranks to look at, all of them or one, bound to the URL's ``rank``; where only one can be
    shown, to ``one_rank``: to have looked at one there does not take the sum away elsewhere."""
    ranks = ranks_of(run)
    if len(ranks) == 1:
        return ranks
    named = {str(r.spec.rank): r for r in ranks}
    options = [ALL, *named] if may_merge else list(named)
    is_first = run.id == ranks[0].id
    chosen = links.pick(
        "Rank",
        "rank" if may_merge else "one_rank",
        options,
        default=options[0] if is_first else str(run.spec.rank),
        format_func=lambda o: "all merged" if o == ALL else o,
    )
    return ranks if chosen == ALL else (named[chosen],)
