"""The ranks of one training: their histograms added up, and which of them went non-finite first,
from the events of a watch and from the observations of a script's ranks.

Each rank records for itself and counts only the parameters that it owns, so everything adds. Once
the gradients are reduced a NaN of one rank is in those of all; only what a rank saw before that, in
its own forward and backward, tells whose it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ampscope.analysis.root_op import Arrives, root_op
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import skips_too_often
from ampscope.numerics.histogram import summed
from ampscope.records import Event, Frame, RunInfo

SHARED = "gradients"  # only the reduced gradients were bad; every other place is the rank's own


@dataclass(frozen=True, slots=True)
class FirstNonFinite:
    """The earliest step at which any rank saw a value that is not finite."""

    step: int
    ranks: tuple[int, ...]  # saw it in their own forward or backward; () where none did
    places: tuple[str, ...]  # where, one for each of ``ranks``
    shared: tuple[int, ...]  # saw it in the reduced gradients alone
    silent: tuple[int, ...]  # said nothing of this step
    sentence: str


def is_rank(run: RunInfo) -> bool:
    """Whether the run is one of several ranks."""
    kinds = ("watch", "script")  # watched by itself, or started by a script that is run
    return run.spec.kind in kinds and run.spec.world > 1 and bool(run.spec.group)


def grouped(runs: Iterable[RunInfo]) -> list[tuple[RunInfo, ...]]:
    """Trainings in the order in which they first appear; each by rank. Other runs stand alone.

    A process may watch one training after the other under the same group: the first run of each
    rank belongs together, then the second of each.
    """
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


def merged(frames: Sequence[Frame]) -> Frame:
    """Frames of several ranks as one, added up by module and dtype. Raises ValueError unless they
    are of the same role, steps and loss scale: anything else cannot be added."""
    if not frames:
        raise ValueError("There are no frames to add up.")
    first = frames[0]
    for name in ("role", "step", "last_step", "scale"):
        found = {getattr(frame, name) for frame in frames}
        if len(found) > 1:
            raise ValueError(f"Frames that differ in {name} ({found}) cannot be added up.")
    modules, dtypes, rows = summed([(f.modules, f.dtypes, f.rows) for f in frames])
    return Frame(first.step, first.role, modules, dtypes, rows, first.scale, first.last_step)


def first_nonfinite(events_by_rank: Mapping[int, Sequence[Event]]) -> FirstNonFinite | None:
    """From the events of kind ``nonfinite`` of each rank, in any order; None where there are none.
    A rank that died says nothing of later steps, which is not held for a sign."""
    seen = {
        rank: [event for event in events if event.kind == "nonfinite"]
        for rank, events in sorted(events_by_rank.items())
    }
    steps = [event.step for events in seen.values() for event in events]
    if not steps:
        return None
    step = min(steps)
    names = {
        rank: [event.name for event in events if event.step == step]
        for rank, events in seen.items()
    }
    places = {
        rank: next((name for name in found if name != SHARED), None)
        for rank, found in names.items()
    }
    own = {rank: place for rank, place in places.items() if place is not None}
    shared = tuple(rank for rank, found in names.items() if found and rank not in own)
    silent = tuple(rank for rank, found in names.items() if not found)
    sentence = _of_own(step, own, shared) if own else _of_none(step, shared, silent)
    return FirstNonFinite(step, tuple(own), tuple(own.values()), shared, silent, sentence)


def _of_own(step: int, own: Mapping[int, str], shared: tuple[int, ...]) -> str:
    where = ", ".join(dict.fromkeys(own.values()))
    text = f"{_named(tuple(own))} went non-finite first, at step {step:,} (seen in: {where})"
    if len(own) > 1:
        text += "; which of them was first within that step is not recorded"
    if shared:
        text += f". {_named(shared)} saw it only in the gradients that all ranks share"
    return f"{text}."


def _of_none(step: int, shared: tuple[int, ...], silent: tuple[int, ...]) -> str:
    text = f"At step {step:,} the gradients were not finite on {_named(shared, 'rank', 'ranks')}"
    if len(shared) + len(silent) == 1:
        return f"{text}, and nothing before them was seen to be: it was not watched."
    text += (
        ", and none of these saw a sign in its own forward or backward: the sum over the ranks may "
        "have overflowed, or what came before it was not watched."
    )
    if silent:
        verb = "says" if len(silent) == 1 else "say"
        text += f" {_named(silent)} {verb} nothing of this step: look there whether it died."
    return text


def _named(ranks: tuple[int, ...], one: str = "Rank", several: str = "Ranks") -> str:
    """Rank 3; Ranks 0, 1 and 3."""
    *others, last = map(str, ranks)
    return f"{several} {', '.join(others)} and {last}" if others else f"{one} {last}"


@dataclass(frozen=True, slots=True)
class FirstAtFault:
    """Of an untouched script's ranks, whose ops, losses and errors are recorded: the one whose own
    forward, backward or code was the first to go wrong."""

    place: int  # in the sequence of ranks
    step: int
    sentence: str


def first_at_fault(ranks: Sequence[tuple[RunInfo, RunView]]) -> FirstAtFault | None:
    """None where no rank saw a sign of its own.

    A loss, an op's result and an error are a rank's own. Gradients are not: the sum over the ranks
    brings the infinity of one to all, in the step in which it was born.
    """
    signs = [_own_sign(view) for _, view in ranks]
    first = min((sign for sign in signs if sign is not None), default=None)
    if first is None:
        return _first_error(ranks)
    place, step = signs.index(first), first[0]
    info, view = ranks[place]
    if signs.count(first) > 1:
        text = f"Several ranks computed the first value that is not finite, at step {step:,}"
    else:
        text = f"It was the first to compute a value that is not finite, at step {step:,}"
        if step in view.skips:
            text += f": the skip at step {step:,} came from rank {info.spec.rank}"
    return FirstAtFault(place, step, f"{text}.")


def _own_sign(view: RunView) -> tuple[int, bool] | None:
    """First step with a non-finite value that no other rank can have sent, and whether no op of
    this rank is known to have made it: a loss alone may come from what the ranks exchange in their
    forward passes. A search for the loss scale that ends is no sign."""
    root = root_op(view)
    signs = [(step, True) for step in view.bad_loss_steps[:1]]
    if root is not None:
        born = root.op.step
        searched = root.arrives is Arrives.GRADIENT and born in view.skips
        if not searched or skips_too_often(view):
            signs.append((born, False))
    return min(signs, default=None)


def _first_error(ranks: Sequence[tuple[RunInfo, RunView]]) -> FirstAtFault | None:
    """The rank that raised first: those that wait for it raise when its connections are closed."""
    raised = [n for n, (_, view) in enumerate(ranks) if view.has_exception]
    if not raised:
        return None
    first = min(raised, key=lambda n: ranks[n][0].ended or 0.0)
    step = ranks[first][1].outcome.steps
    return FirstAtFault(first, step, f"It was the first to raise an error, at step {step:,}.")
