"""What is wrong with a run, seen from outside: the things that a cured run no longer shows."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise

from ampscope.analysis.control_losses import divergence
from ampscope.analysis.half_tensors import KEPT, kept_motion, least_moved
from ampscope.analysis.repeatability import difference, incomparable
from ampscope.analysis.results import worse_results
from ampscope.analysis.run_view import TAIL_SHARE, RunView

# A dynamic scale that starts at 2^16 needs at most 16 skips to reach 1; a start at 2^24 needs 24.
MAX_SEARCH_SKIPS = 20
MIN_PHASE = 20  # steps after another optimizer took over, to judge them by themselves
MIN_AFTER_SEARCH = 3  # taken steps that must follow a search before it counts as ended
LATE_SKIP_SHARE = 0.1  # torch's growth interval of 2000 gives one skip in 2000 steps
LEARNS_SHARE = 0.03  # fp32 must have lowered its loss by this share for a comparison to mean much
BEHIND_SHARE = 0.5  # less than half of fp32's progress is worse learning
BEHIND_APART = 0.1  # the same for two runs that do not begin alike: nearly no progress
ENDED_SHARE = 0.5  # of fp32's steps and time; a script that stops early may do so a little earlier
DROPPED_SHARE, MIN_DROPPED = 0.1, 3  # a rounding may decide about single batches
MIN_REPLACED = 3  # steps
NEAR = 3  # taken steps before and after a skip that say how large its gradients were
AS_TAKEN = 2.0  # a scale halves
MORE_INF = 2.0  # outputs with infinities, against fp32; which ones those are may vary
TAIL_SCATTER = 2.0  # standard deviations
HEAVY = 10.0  # times the median of the losses around it
HABIT_SHARE = 0.25  # of the batches; a script that leaves out more trains on other data
UNLIKELY = 0.01  # that so many batches in a row are left out by their share alone
SLOWER = 0.85  # of fp32's progress: less is slower learning
LAGS = 0.1  # of fp32's progress; healthy bf16 weights lag by less than 0.01
SURE = 2.0  # standard errors
MORE_LEFT = 3.0  # times fp32's last losses
MORE_LEFT_APART = 10.0  # the same for two runs that do not begin alike
CONVERGED = 0.01  # of the first loss
MIN_BLOCK = 5  # losses in a row, whose median one batch does not move
GROUND = 1e-4  # of the first loss: below it is the noise of a loss that has converged
MIN_TAIL = 4  # losses in the last fifth, to tell how they scatter


class Symptom(StrEnum):
    """Each is seen without knowing any cause."""

    EXCEPTION = "the script raised"
    CAUGHT = "steps are lost to errors that the script catches and fp32 does not raise"
    LOSS = "the loss is not finite"
    GRADIENTS = "gradients are not finite although nothing skipped the step"
    WEIGHTS = "weights are not finite"
    SKIPS = "optimizer steps are skipped beyond a search for the scale"
    EVALUATION = "the evaluation is not finite"
    BUFFERS = "buffers are not finite"
    BEHIND = "the loss falls less than in fp32"
    FROZEN = "weights stand still"
    DIVERGED = "the loss grows without bound, or ends far above its start"
    ENDED = "the script ends itself before its fp32 control does"
    DROPPED = "batches are dropped that fp32 trains on"
    RESULTS = "what the script reports is worse than in fp32"


def symptoms(run: RunView, fp32: RunView | None) -> frozenset[Symptom]:
    """All symptoms of ``run``; the comparing ones need the fp32 control."""
    broken = any(a.grad_nonfinite and not a.skipped for a in run.steps)
    seen: dict[Symptom, object] = {
        Symptom.EXCEPTION: run.has_exception,
        Symptom.LOSS: _bad_losses(run, fp32),
        Symptom.GRADIENTS: broken or _ended_on_gradients(run),
        Symptom.WEIGHTS: run.weights_broken,
        Symptom.SKIPS: skips_too_often(run),
        Symptom.EVALUATION: evaluates_badly(run, fp32),
        Symptom.BUFFERS: run.broken_buffers,
        Symptom.DIVERGED: divergence(run, fp32) is not None,
    }
    if fp32 is not None:
        often = run.outcome.errors_caught and run.outcome.error_text
        seen |= {
            Symptom.GRADIENTS: seen[Symptom.GRADIENTS] or replaces_gradients(run, fp32),
            Symptom.CAUGHT: often and not fp32.outcome.errors_caught,
            Symptom.BEHIND: is_behind(run, fp32),
            Symptom.FROZEN: is_frozen(run, fp32),
            Symptom.ENDED: ends_early(run, fp32),
            Symptom.DROPPED: drops_batches(run, fp32),
            Symptom.RESULTS: worse_results(run, fp32),
        }
    return frozenset(symptom for symptom, is_there in seen.items() if is_there)


def symptoms_of_control(control: RunView, baseline: RunView) -> frozenset[Symptom]:
    """What is wrong with a control by itself. A few batches whose loss is not finite are none,
    where the script leaves them out at a line at which the baseline does."""
    found = symptoms(control, None)
    dropped = len(control.guarded_losses)
    if dropped > HABIT_SHARE * (dropped + len(control.steps)) or _bad_losses(control, baseline):
        return found
    return found - {Symptom.LOSS}


def _bad_losses(run: RunView, fp32: RunView | None) -> set[int]:
    """Steps with a loss that is not finite. What the script left out by itself is no symptom where
    it is a habit of the script's (:func:`_habits`)."""
    bad = {a.step for a in run.steps if a.loss is not None and not math.isfinite(a.loss)}
    bad -= _of_the_search(run, fp32)
    habits = set() if fp32 is None else _habits(run, fp32)
    return bad | {c.step for c in run.guarded_losses if c.line not in habits}


def _habits(run: RunView, fp32: RunView) -> set[str]:
    """Lines at which the script leaves out batches whose loss is not finite, in fp32 as well.

    Both runs come to the same end; or both go on after such batches, as a loop that ends by the
    clock or by its patience makes other numbers of steps. Then ``run`` leaves out hardly more of
    them than fp32 does, up to the step that both reach."""
    if run.outcome.exit_code:
        return set()
    lines = {c.line for c in fp32.guarded_losses}
    own_end, fp32_end = (
        (r.outcome.ended, r.outcome.exit_code, r.outcome.steps) for r in (run, fp32)
    )
    if own_end == fp32_end:
        return lines
    common = min(len(run.steps), len(fp32.steps))
    own, reference = (
        Counter(c.line for c in r.guarded_losses if c.step <= common) for r in (run, fp32)
    )
    chance = max(MIN_DROPPED, DROPPED_SHARE * common)
    ended = _ending_guards(run) | _ending_guards(fp32)
    return {line for line in lines - ended if own[line] < reference[line] + chance}


def _ending_guards(run: RunView) -> set[str]:
    """Lines at which leaving out a batch ended the training: a guard that breaks the loop, or that
    leaves out every batch from some point on. No step follows, and so many in a row are unlikely
    by the share of those before."""
    steps, found = len(run.steps), set()
    for line in {c.line for c in run.guarded_losses}:
        reads = [c.step for c in run.guarded_losses if c.line == line]
        before = sum(step < steps for step in reads)
        share = (before + 1) / (before + steps + 2)
        if len(reads) > before and (not before or share ** (len(reads) - before) < UNLIKELY):
            found.add(line)
    return found


def goes_on(run: RunView) -> bool:
    """Steps follow on the batches that the script leaves out for their loss."""
    return not _ending_guards(run)


def _of_the_search(run: RunView, fp32: RunView | None) -> set[int]:
    """Steps that a search for the scale left out, whose loss was finite in fp32: a gradient
    penalty, for one, is not finite at a scale that is too high. A search that does not end is a
    symptom of its own, and excuses nothing."""
    if fp32 is None or fp32.bad_loss_steps or skips_too_often(run):
        return set()
    if any(c.name == "grad" and c.scaled for c in run.calls):
        # Gradients of a scaled output enter the loss: it overflows with the scale at any time.
        return set(run.skips)
    return set(range(run.leading_skips))


def _ended_on_gradients(run: RunView) -> bool:
    """The script looked at gradients that were not finite, and ended with an error there."""
    if not run.guarded_gradients or not (run.has_exception or run.outcome.exit_code):
        return False
    return run.guarded_gradients[-1].step >= len(run.steps)


def replaces_gradients(run: RunView, fp32: RunView) -> bool:
    """At a good part of the steps the script put finite numbers in the place of gradients that were
    not finite, and in fp32 it did not: a formula without a derivative is one in any precision."""
    own, other = (len(r.replaced_steps) / max(len(r.steps), 1) for r in (run, fp32))
    return len(run.replaced_steps) >= MIN_REPLACED and own - other > LATE_SKIP_SHARE


def skips_too_often(run: RunView) -> bool:
    """More than a search at the start: it does not end, or skips come back again and again.

    A search ends when the scale holds, however long it was; one that goes below 1 does not end
    well. Skips with which the scale follows gradients that grow are a search that goes on.
    """
    search, total = run.leading_skips, len(run.steps)
    if not run.skips:
        return False
    late = [s for s in run.skips if s >= search]
    taken_after = total - search - len(late)
    if search and taken_after < MIN_AFTER_SEARCH:
        return True
    if search > MAX_SEARCH_SKIPS and run.steps[search].scale < 1:
        return True
    late = [s for s in late if s not in following_skips(run)]
    return len(late) >= 2 and len(late) > LATE_SKIP_SHARE * max(total - search, 1)


def following_skips(run: RunView) -> set[int]:
    """Skips with which the scale comes down as gradients grow: each at a scale below all earlier
    ones, and at a product of scale and gradients as large as that of any taken step. Gradients that
    overflow for another reason do so at products at which other steps were taken."""
    found: set[int] = set()
    for scaler in {a.scaler for a in run.steps if a.scaler}:
        own = [a for a in run.steps if a.scaler == scaler]
        taken = [a for a in own if not a.skipped and not a.grad_nonfinite and a.grad_norm]
        if not taken:
            continue
        largest = max(a.scale * (a.grad_norm or 0.0) for a in taken)
        lowest = math.inf
        for a in own:
            if not a.skipped:
                continue
            before = [t for t in taken if t.step < a.step][-NEAR:]
            near = before + [t for t in taken if t.step > a.step][:NEAR]
            norm = statistics.median([t.grad_norm or 0.0 for t in near])
            is_finite = a.loss is None or math.isfinite(a.loss)
            if is_finite and a.scale < lowest and a.scale * norm >= largest / AS_TAKEN:
                found.add(a.step)
            lowest = min(lowest, a.scale)
    return found


def evaluates_badly(run: RunView, fp32: RunView | None) -> bool:
    """Evaluation gave NaN or Inf, and more of it than in fp32: the logits of forbidden actions and
    the scores of dead beams are minus infinity in any precision."""
    own = run.outcome
    if not own.eval_nonfinite or fp32 is None or not fp32.outcome.eval_nonfinite:
        return own.eval_nonfinite
    reference = fp32.outcome
    more_inf = own.eval_inf > MORE_INF * max(reference.eval_inf, 1)
    only_here = own.eval_taint >= 0 > reference.eval_taint  # it descends from an op that overflowed
    return own.eval_nan > reference.eval_nan or more_inf or only_here


def ends_early(run: RunView, fp32: RunView) -> bool:
    """The script ends itself with an error status that its fp32 control does not have, or before
    its first step, or after less than half of the steps and of the time.

    A loop that ends after so many minutes makes other numbers of steps in other precisions, and one
    that stops when the loss rises may stop a little earlier.
    """
    own, reference = run.outcome, fp32.outcome
    if own.ended not in ("returned", "exit") or fp32.has_exception:
        return False
    if own.exit_code:
        return not (fp32.ended_itself and reference.exit_code == own.exit_code)
    if reference.exit_code or not reference.steps:
        return False
    return own.steps == 0 or (
        own.steps < ENDED_SHARE * reference.steps
        and own.elapsed_s < ENDED_SHARE * reference.elapsed_s
        and not incomparable(run, fp32)
    )


def drops_batches(run: RunView, fp32: RunView) -> bool:
    """Fewer of the batches that the model saw came to a backward than in fp32, or far fewer of the
    backward passes to an optimizer step than a search for the loss scale explains."""
    own, reference = run.outcome, fp32.outcome
    if incomparable(run, fp32):
        return False  # another seed draws other batches
    counts, all_counts = ((o.forwards, o.backwards, o.steps) for o in (own, reference))
    pairs = zip(pairwise(counts), pairwise(all_counts), strict=True)
    bounds = ((0, DROPPED_SHARE), (MAX_SEARCH_SKIPS, 0.5))
    for ((drawn, used), (all_drawn, all_used)), (excused, share) in zip(pairs, bounds, strict=True):
        if drawn and all_drawn:
            missing = drawn * all_used / all_drawn - used
            if missing >= max(MIN_DROPPED, share * drawn * all_used / all_drawn) + excused:
                return True
    return False


def is_frozen(run: RunView, fp32: RunView) -> bool:
    """Taken steps leave most weights as they are, and fp32's do not; nor do the weights come as
    far over the run."""
    moved = least_moved(run, fp32)
    if moved is None or moved.own >= 0.5 * moved.reference:
        return False
    kept = kept_motion(run, fp32)
    return kept is None or kept < KEPT


def is_behind(run: RunView, fp32: RunView) -> bool:
    """fp32 learned clearly and this run learned less than half as much, in as many steps, or has a
    clear multiple of fp32's loss left; over the whole run, or since another optimizer took over.

    One of the two may have met its time limit earlier, so only what both did is compared. Batches
    whose loss is many times as large in fp32 too, because the script weights them, do not count.
    """
    behind = any(_is_behind(*p) or _has_more_left(*p) for p in _phases(run, fp32))
    return behind or _has_lost_ground(run, fp32)


def _phases(run: RunView, fp32: RunView) -> list[tuple[RunView, RunView]]:
    """Both runs whole, and since another optimizer took over at the same step; the latter where one
    did and enough followed."""
    own, other = run.last_phase, fp32.last_phase
    if own is run or other is fp32 or own.steps[0].step != other.steps[0].step:
        return [(run, fp32)]
    is_long = min(len(own.steps), len(other.steps)) >= MIN_PHASE
    return [(run, fp32), (own, other)] if is_long else [(run, fp32)]


def _is_behind(run: RunView, fp32: RunView) -> bool:
    count = min(len(run.losses), len(fp32.losses))
    if not count or fp32.head_loss is None:
        return False
    kept = _ordinary(fp32.losses[:count], fp32.head_loss)
    full, half = [fp32.losses[n] for n in kept], [run.losses[n] for n in kept]
    if not all(map(math.isfinite, full)):
        return False
    reference = fp32.head_loss - statistics.fmean(full)
    if reference <= LEARNS_SHARE * abs(fp32.head_loss):
        return False
    if len({a.optimizer for a in fp32.steps}) != 1:
        return False  # the losses of several optimizers play against each other
    if run.head_loss is None or not all(map(math.isfinite, half)):
        return True
    own = run.head_loss - statistics.fmean(half)
    # What a first step threw up and later ones brought down again is no progress.
    own -= max(run.head_loss - fp32.head_loss, 0.0)
    share = BEHIND_APART if incomparable(run, fp32) else BEHIND_SHARE
    # Mini-batch losses scatter: what is within the scatter of fp32's own tail is no difference.
    scatter = statistics.stdev(full) if len(full) > 1 else 0.0
    return own < share * reference and reference - own > TAIL_SCATTER * scatter


def _has_more_left(run: RunView, fp32: RunView) -> bool:
    """Whether a clear multiple of fp32's last losses is left, and more than a converged loss has.

    0.24 against 0.014 are 94 and 99.6 % of the way down from 4: nearly as far, and seventeen times
    as much left. Of what is left three things must hold. It is :data:`MORE_LEFT` times fp32's: of
    94 healthy scripts in fp16 or bf16 the most was 2.0, by steps that a search for the scale had
    skipped, and 1.25 without. The surplus is more than :data:`CONVERGED` of the first loss, below
    which a loss nears its floor: 1e-5 against 1e-9 is the rounding of bf16, and harmless. And it is
    more than fp32 had left a fifth of the run, and as many steps as were skipped, before: less is a
    delay. Surpluses are taken batch by batch where both runs drew the same batches, else beyond the
    scatter of both ends. Losses below 0 have no known floor, and are not compared so.
    """
    count = min(len(run.losses), len(fp32.losses))
    head, size = fp32.head_loss, int(count * TAIL_SHARE)
    if head is None or size < MIN_TAIL or len({a.optimizer for a in fp32.steps}) != 1:
        return False
    kept = _ordinary(fp32.losses[:count], head)
    full, half = [fp32.losses[n] for n in kept], [run.losses[n] for n in kept]
    if len(kept) < MIN_TAIL or not all(map(math.isfinite, (*full, *half))):
        return False
    if min(*fp32.losses[:count], *half) < 0 or statistics.fmean(full) >= head:
        return False
    lost = len(run.skips) * -(-len(run.losses) // max(len(run.steps), 1))
    before = fp32.losses[max(count - 2 * size - lost, 0) : max(count - size - lost, 1)]
    if statistics.median(half) <= statistics.median(before):
        return False
    surplus = [a - b for a, b in zip(half, full, strict=True)]
    apart = incomparable(run, fp32)
    if difference(run, fp32) or run.skips:
        least = TAIL_SCATTER * max(statistics.stdev(full), statistics.stdev(half))
    else:
        least = SURE * statistics.stdev(surplus) / math.sqrt(len(surplus))
    times = MORE_LEFT_APART if apart else MORE_LEFT
    is_more = statistics.median(half) > times * statistics.median(full)
    return is_more and statistics.fmean(surplus) - least > CONVERGED * head


def _has_lost_ground(run: RunView, fp32: RunView) -> bool:
    """Whether the run ends far above where it had been itself, and its control does not: weights
    that went through a file in half, with a loss a hundred times fp32's from there on, although
    little beside the first one. In medians of a twentieth of the losses each. Of 79 healthy scripts
    none rose by more than 1.05 times what its control did."""
    count = min(len(run.losses), len(fp32.losses))
    size = max(MIN_BLOCK, count // 20)
    both = run.losses[:count], fp32.losses[:count]
    if count < 4 * size or not all(0 <= loss < math.inf for loss in (*both[0], *both[1])):
        return False
    (best, last), (its_best, its_last) = (_best_and_last(losses, size) for losses in both)
    if not best or not its_best or last <= GROUND * (fp32.head_loss or 0.0):
        return False
    rose_more = last * its_best > MORE_LEFT * its_last * best
    return rose_more and last > MORE_LEFT * its_last


def _best_and_last(losses: Sequence[float], size: int) -> tuple[float, float]:
    """The lowest median of ``size`` losses in a row, and that of the last ones."""
    blocks = (losses[n : n + size] for n in range(0, len(losses) - size + 1, size))
    return min(map(statistics.median, blocks)), statistics.median(losses[-size:])


def _ordinary(losses: Sequence[float], head: float) -> list[int]:
    """Places in the last fifth whose loss is neither many times the others' nor above ``head``."""
    places = range(len(losses) - max(1, int(len(losses) * TAIL_SHARE)), len(losses))
    usual = statistics.median([abs(losses[n]) for n in places])
    return [n for n in places if not abs(losses[n]) > max(HEAVY * usual, abs(head))]


def learns_slower(run: RunView, fp32: RunView) -> bool:
    """fp32 made progress within the steps that both made, and this run clearly less; over the whole
    run, or since another optimizer took over."""
    return any(_learns_slower(*pair) for pair in _phases(run, fp32))


def _learns_slower(run: RunView, fp32: RunView) -> bool:
    count = min(len(run.losses), len(fp32.losses))
    own, reference = progress(run, count), progress(fp32, count)
    return bool(reference and reference > 0 and (own is None or own < SLOWER * reference))


def progress(run: RunView, count: int | None = None) -> float | None:
    """How far the loss fell within the first ``count`` losses, to the mean of their last fifth."""
    head, tail = run.head_loss, run.tail_of(count)
    if head is None or tail is None or not math.isfinite(tail):
        return None
    return head - tail


def lags(run: RunView, fp32: RunView, least: float = LAGS) -> bool:
    """Whether the loss is behind fp32's batch by batch, by ``least`` of what fp32 has learned and
    beyond chance. The same batches scatter alike in both runs, so their difference tells more than
    either course does. Over the whole run, or since another optimizer took over."""
    return any(_lags(*pair, least) for pair in _phases(run, fp32))


def _lags(run: RunView, fp32: RunView, least: float) -> bool:
    count = min(len(run.losses), len(fp32.losses))
    reference = progress(fp32, count)
    last = slice(count - int(count * TAIL_SHARE), count)
    behind = [a - b for a, b in zip(run.losses[last], fp32.losses[last], strict=True)]
    if not reference or reference <= 0 or len(behind) < 3 or not all(map(math.isfinite, behind)):
        return False
    if difference(run, fp32) or len({a.optimizer for a in fp32.steps}) != 1:
        return False
    error = statistics.stdev(behind) / math.sqrt(len(behind))
    return statistics.fmean(behind) - SURE * error > least * reference
