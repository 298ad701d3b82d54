"""The ranks of one distributed training, to choose from on a page."""

from __future__ import annotations

from collections.abc import Sequence

from ampscope.analysis.ranks import grouped, is_rank
from ampscope.records import RunInfo
from app import links, store
from app.text import plural

ALL = "all"


def ranks_of(run: RunInfo) -> tuple[RunInfo, ...]:
    """All ranks of the run's training by rank; of any other run itself alone."""
    if not is_rank(run):
        return (run,)
    found = grouped(store.group(run.spec.group))
    return next((ranks for ranks in found if any(r.id == run.id for r in ranks)), (run,))


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
