"""What a script reports of its training, beside what its fp32 control reports: the numbers that it
printed (:mod:`ampscope.analysis.printed_numbers`), aligned by their words and order, and the
learning rate that it ended with.

Two numbers are compared by what is left: an error of 0.24 against one of 0.014 is worse, though
both came down by more than nine tenths of the way.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ampscope.analysis.repeatability import difference
from ampscope.analysis.run_view import TAIL_SHARE, RunView

LESS, MORE, UNKNOWN = -1, 1, 0  # which is better
MOST_TOLD = 3
# Shares that a difference must exceed, see :func:`_is_beyond`.
LEFT_SHARE, COURSE_SHARE = 0.2, 0.05
LEFT_DELAYED = 0.3  # of a run that skipped steps, and is behind by as many
LEFT_APART, COURSE_APART = 0.6, 0.3  # of two runs that do not begin alike
SURE = 3.0  # standard errors
MIN_COURSE = 5  # values that show in which direction a number moves
MIN_SCATTER = 4  # values that show how far they scatter
OF_A_MEDIAN = 1.48  # standard deviations of normal numbers in their median distance
MOVES = 0.8  # rank correlation with the order
ALIKE = 0.25  # relative; the training's numbers begin alike in half and in fp32
SAME_TIME = 0.15  # relative, of two runs that may have trained until the clock said so
LEARNS_SHARE = 0.03  # of its first loss: what a control must have gained to show what is better
# Of the control's learning rate, and of its highest. A schedule that waits for a plateau may have
# come to three divisions by ten more.
LOST_RATE, SPENT_RATE = 5e-4, 1e-3
# A schedule that is kept in half stands still once its changes are below half a spacing; one that
# waits for a plateau has a few values alone, in either run.
STUCK_RATE, MIN_MOVED = 0.2, 10

_LESS = {
    "loss", "losses", "error", "err", "errors", "mse", "rmse", "mae", "mape", "nll", "ppl", "bce",
    "perplexity", "wer", "cer", "eer", "fid", "residual", "residuals", "lpips", "bpd", "bpc", "ce",
    "xent", "regret", "rmsd", "chamfer", "epe", "brier", "ece",
}  # fmt: skip
_MORE = {
    "acc", "accuracy", "f1", "auc", "auroc", "auprc", "map", "iou", "miou", "dice", "psnr", "ssim",
    "r2", "recall", "precision", "reward", "rewards", "return", "returns", "success", "bleu", "mrr",
    "rouge", "ndcg", "hits", "top", "top1", "top5", "correct", "kappa", "mcc", "pearson", "win",
    "spearman", "snr", "sdr", "accuracies",
}  # fmt: skip
_LOSSES = {"loss", "losses"}
_PERCENT = {"acc", "accuracy", "accuracies", "f1", "recall", "precision", "top", "map", "miou"}
# No result, whatever stands beside it.
_NONE = {
    "lr", "rate", "rates", "step", "steps", "epoch", "epochs", "iter", "iters", "iteration", "it",
    "iterations", "batch", "batches", "seed", "scale", "scales", "scaler", "params", "parameters",
    "trainable", "norm", "gnorm", "grad", "grads", "gradient", "gradients", "momentum", "decay",
    "wd", "temperature", "tau", "alpha", "beta", "eps", "epsilon", "size", "samples", "tokens",
    "count", "total", "support", "updates", "skipped", "skips", "weight", "weights", "dim", "bad",
    "width", "depth", "layers", "bits", "rank", "world", "fold", "round", "time", "max", "min",
    "std", "var", "ratio", "update", "scatter",
}  # fmt: skip
_PARTS = re.compile(r"[a-z]+\d*|\d+")


@dataclass(frozen=True, slots=True)
class ComparedResult:
    """Where a number that a script reports ended, in a run and in its control."""

    words: str  # "val acc"
    own: float
    reference: float
    better: int  # LESS, MORE or UNKNOWN
    beyond: bool  # the run's is worse by more than chance

    @property
    def text(self) -> str:
        """As a sentence tells it."""
        return f"{self.words} {self.own:.4g}, {self.reference:.4g} in fp32"


def worse_results(run: RunView, control: RunView) -> list[ComparedResult]:
    """What the script reports of ``run`` that is worse than its control's by more than chance, what
    differs most first."""
    found = [one for one in compared_results(run, control) if one.beyond]
    return sorted(found, key=_distance, reverse=True)


def _distance(one: ComparedResult) -> float:
    if not math.isfinite(one.own):
        return math.inf
    return abs(one.own - one.reference) / max(abs(one.own), abs(one.reference), 1e-300)


def compared_results(run: RunView, control: RunView) -> list[ComparedResult]:
    """All numbers that both runs printed behind the same words and that may be results; and the
    learning rate, where the run has lost it."""
    known = {printed.words: printed.values for printed in control.printed}
    same_steps = len(run.steps) == len(control.steps)
    plays = len({a.optimizer for a in control.steps}) > 1
    if _trains_by_the_clock(run, control):
        return []
    least = (LEFT_DELAYED if run.skips else LEFT_SHARE), COURSE_SHARE
    if difference(run, control):
        least = LEFT_APART, COURSE_APART
    learns = _learns(control)
    start = abs(control.head_loss or 0.0)
    found = []
    for printed in run.printed:
        count = min(len(printed.values), len(known.get(printed.words, ())))
        parts = set(_PARTS.findall(printed.words))
        if not count or parts & _NONE or not parts:
            continue
        if same_steps and len(printed.values) != len(known[printed.words]):
            continue  # printed at other steps: by the clock, or whenever one is the best so far
        own, reference = printed.values[:count], known[printed.words][:count]
        better = _better(parts, reference if learns else ())
        if plays and parts & _LOSSES:
            better = UNKNOWN  # the losses of several optimizers play against each other
        if not parts & (_LESS | _MORE) and not _begin_alike(own[0], reference[0]):
            better = UNKNOWN  # it may be the machine's: a speed, a share of its peak
        ends = _end(own), _end(reference)
        beyond = _is_beyond(own, reference, better, parts, start, least)
        found.append(ComparedResult(printed.words, *ends, better, beyond))
    return found + _learning_rate(run, control)


def _trains_by_the_clock(run: RunView, control: RunView) -> bool:
    """Whether both seem to have trained for a time: both came to their ends, at once, and the run
    made fewer steps."""
    own, reference = run.outcome, control.outcome
    if not (run.ended_itself and control.ended_itself) or own.steps >= reference.steps:
        return False
    return abs(own.elapsed_s - reference.elapsed_s) < SAME_TIME * reference.elapsed_s


def _begin_alike(own: float, reference: float) -> bool:
    return abs(own - reference) <= ALIKE * max(abs(own), abs(reference))


def _better(parts: set[str], course: Sequence[float]) -> int:
    """Which numbers are the better ones: those to which the control's move while it learns, where
    what the field calls so does not say otherwise."""
    named = LESS if parts & _LESS else MORE if parts & _MORE else UNKNOWN
    moved = _moves(course)
    return UNKNOWN if moved == -named else named or moved


def _moves(values: Sequence[float]) -> int:
    """MORE or LESS, where numbers rise or fall from first to last."""
    if len(values) < MIN_COURSE or not all(map(math.isfinite, values)):
        return UNKNOWN
    if len(set(values)) < MIN_COURSE:
        return UNKNOWN
    places = [sorted(values).index(value) for value in values]
    rank = statistics.correlation(places, range(len(places)))
    return (MORE if rank > 0 else LESS) if abs(rank) >= MOVES else UNKNOWN


def _learns(control: RunView) -> bool:
    head, tail = control.head_loss, control.tail_of(None)
    if head is None or tail is None or not math.isfinite(tail):
        return False
    return head - tail > LEARNS_SHARE * abs(head)


def _tail(values: Sequence[float]) -> Sequence[float]:
    return values[-max(1, int(len(values) * TAIL_SHARE)) :]


def _end(values: Sequence[float]) -> float:
    return statistics.fmean(_tail(values))


def _is_beyond(
    own: Sequence[float], reference: Sequence[float], better: int, parts: set[str], start: float,
    least: tuple[float, float],
) -> bool:  # fmt: skip
    """Whether ``own`` ends worse than chance makes it: by more than the shares ``least``.

    Measured on 45 healthy fp16 and bf16 scripts (of ``tests/healthy`` and the zoo), run to their
    ends: the 19 results that 18 of them name in words ended worse than fp32's by at most 19 % of
    what was left (a loss of 0.0210 against 0.0171, 0.1 % of its course) and by at most 4.2 % of
    their course (a loss of 2.079 against 2.064, 0.7 % of what was left); none had both above 1 %.
    Of 35 numbers that the 94 scripts print, with or without such a name, one had both at 13 %,
    and one at 24 % and 34 %, of a run that skips its first 14 steps.
    """
    ends = _end(own), _end(reference)
    if better == UNKNOWN or not math.isfinite(ends[1]):
        return False
    if not math.isfinite(ends[0]):
        return not math.isfinite(own[-1])
    left, course = shares(own, reference, better, start, in_percent=bool(parts & _PERCENT))
    if left <= least[0] or course <= least[1]:
        return False
    behind = [better * (b - a) for a, b in zip(own, reference, strict=True)]
    error = _scatter(behind) / math.sqrt(len(_tail(behind)))
    return _end(behind) > SURE * error


def _scatter(values: Sequence[float]) -> float:
    """Of the later half around its own course, as a standard deviation that one jump does not
    move; 0 of too few to show it."""
    later = values[-max(MIN_SCATTER, len(values) // 2) :]
    steps = [b - a for a, b in pairwise(later)]
    if len(later) < MIN_SCATTER or not all(map(math.isfinite, steps)):
        return 0.0
    usual = statistics.median(steps)
    return OF_A_MEDIAN * statistics.median(abs(s - usual) for s in steps) / math.sqrt(2)


def are_beyond(run: RunView, control: RunView, other: RunView, times: float) -> bool:
    """Whether some of :func:`worse_results` is worse by more than ``times`` the distance of
    ``other`` from the control: that is the control with one input moved a little, and its distance
    is chance. What ``other`` did not report counts as worse."""
    known = {one.words: one.own for one in compared_results(other, control)}
    return any(
        not abs(one.own - one.reference)
        <= times * abs(known.get(one.words, one.reference) - one.reference)
        for one in worse_results(run, control)
    )


def shares(
    own: Sequence[float], reference: Sequence[float], better: int, start: float = 0.0,
    *, in_percent: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """How much worse ``own`` ends: as a share of what is left to its best, and as a share of the
    control's whole course to its end; of a number with a highest value, of all up to that: a few
    of a hundred samples are chance, however good the first epoch was.

    The best is 0 for numbers of which less is better and that are not negative; 1, or 100 where
    they may be ``in_percent``, for shares of which more is better. Without such an end both are of
    the course; without a course, of the number itself, or of ``start``, the training's first loss,
    where that is larger: 0.0005 against 0.0002 is little of an error that began near 1.
    """
    ends = _end(own), _end(reference)
    worse = better * (ends[1] - ends[0])
    everything = (*own, *reference)
    finite = [value for value in everything if math.isfinite(value)]
    low, high = min(finite), max(finite)
    best = None
    if better == LESS and low >= 0:
        best = 0.0
    elif better == MORE and low >= 0 and (high <= 1 or (in_percent and high <= 100)):
        best = 1.0 if high <= 1 else 100.0
    whole = max(abs(reference[0] - ends[1]), abs(own[0] - ends[1])) if len(own) > 2 else 0.0
    if best is None:
        whole = whole or max(abs(ends[0]), abs(ends[1]))
        return (worse / whole, worse / whole) if whole else (0.0, 0.0)
    left = abs(best - ends[0])
    if better == MORE:
        whole = best
    elif not whole or len(set(reference)) == 1:
        whole = max(left, abs(best - ends[1]), start)
    return (worse / left if left else 0.0), (worse / whole if whole else 0.0)


def _learning_rate(run: RunView, control: RunView) -> list[ComparedResult]:
    """The rate of the last step that both made, where the run has lost nearly all of it, or where
    it stands still while the control's moves on."""
    count = min(len(run.steps), len(control.steps))
    if not count:
        return []
    own, reference = run.steps[count - 1], control.steps[count - 1]
    highest = max(step.lr for step in control.steps[:count])
    is_spent = reference.lr <= SPENT_RATE * highest
    is_other = own.optimizer != reference.optimizer or own.skipped  # a schedule that waits, too
    if is_other:
        return []
    if not is_spent and own.lr < LOST_RATE * reference.lr:
        return [ComparedResult("learning rate", own.lr, reference.lr, MORE, beyond=True)]
    later = range(count // 2, count)
    moved = {control.steps[n].lr for n in later if control.steps[n].optimizer == own.optimizer}
    stands = {run.steps[n].lr for n in later if run.steps[n].optimizer == own.optimizer}
    is_far = abs(own.lr - reference.lr) > STUCK_RATE * max(own.lr, reference.lr)
    if len(stands) == 1 and len(moved) >= MIN_MOVED and is_far and not run.skips:
        return [ComparedResult("learning rate", own.lr, reference.lr, UNKNOWN, beyond=True)]
    return []
