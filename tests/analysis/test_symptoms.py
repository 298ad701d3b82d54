"""What counts as a symptom, and what a search for the loss scale excuses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ampscope.analysis.gradient_loss import gradient_error
from ampscope.analysis.repeatability import beyond_floor, is_reproducible, wants_repeat
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.observations import READ_LOSS, Call, ParameterGradient
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    NAN,
    OVERFLOWED,
    WITHOUT_SCALER,
    but,
    evidence,
    fp32_run,
    run,
    scan,
    search,
    status,
    steps,
)


def seen(losses: list[float], fp32: list[float] | None, skips: int) -> frozenset[Symptom]:
    """Symptoms of a run that searches its scale for so many steps."""
    control = fp32_run(None if fp32 is None else steps(fp32))
    return symptoms(run(search(steps(losses), 65536.0, skips)), control)


def test_a_loss_that_only_the_search_spoiled_is_none() -> None:
    # The gradient penalty of a WGAN is infinite at 65,536, as its gradients are.
    assert Symptom.LOSS not in seen([NAN, *FALLING[1:]], None, 3)


def test_a_loss_that_is_nan_in_fp32_too_is_one() -> None:
    assert Symptom.LOSS in seen([NAN, *FALLING[1:]], [NAN, *FALLING[1:]], 3)


@pytest.mark.parametrize("skips", [0, 1])
def test_a_loss_that_is_nan_after_the_search_is_one(skips: int) -> None:
    losses = [*FALLING[:10], NAN, *FALLING[11:]]
    assert Symptom.LOSS in seen(losses, None, skips)


def test_a_search_that_does_not_end_excuses_nothing() -> None:
    losses = [NAN] * len(FALLING)
    assert Symptom.LOSS in seen(losses, None, len(FALLING))


def test_without_the_control_nothing_is_excused() -> None:
    made = but(search(steps([NAN, *FALLING[1:]]), 65536.0, 3), [])
    assert Symptom.LOSS in symptoms(run(made), None)


@pytest.mark.parametrize("skips", [22, 40])
def test_a_search_that_ended_is_none_however_long_it_was(skips: int) -> None:
    made = search(steps([2.0] * 60), 2.0**48, skips)
    assert Symptom.SKIPS not in symptoms(run(made), fp32_run(steps([2.0] * 60)))


def test_a_long_search_that_ends_below_1_is_one() -> None:
    assert Symptom.SKIPS in symptoms(run(search(steps([2.0] * 60), 65536.0, 22)), None)


def descending(norms: list[float], skipped: list[int]) -> RunView:
    """The scale is halved by each skip; the gradients have these norms."""
    made, scale = [], 65536.0
    for number, (step, norm) in enumerate(zip(steps([2.0] * 60), norms, strict=True)):
        made.append(replace(step, scale=scale, grad_norm=norm))
        scale /= 2.0 if number in skipped else 1.0
    return run(but(made, skipped, **OVERFLOWED))


def test_skips_with_which_the_scale_follows_growing_gradients_are_none() -> None:
    growing = [2.0 ** (n / 6) for n in range(60)]
    made = descending(growing, list(range(6, 60, 6)))
    assert Symptom.SKIPS not in symptoms(made, None)


def test_skips_at_steady_gradients_are_some() -> None:
    assert Symptom.SKIPS in symptoms(descending([1.0] * 60, list(range(6, 60, 6))), None)


@pytest.mark.parametrize(
    ("own", "full", "is_one"),
    [((0, 1), (0, 1), False), ((1, 0), (0, 1), True), ((0, 9), (0, 1), True), ((0, 1), None, True)],
)
def test_an_evaluation_that_is_not_finite_in_fp32_either_is_none(
    own: tuple[int, int], full: tuple[int, int] | None, is_one: bool
) -> None:
    # The logits of forbidden actions are minus infinity in any precision.
    made = run(steps(), eval_nonfinite=True, eval_nan=own[0], eval_inf=own[1])
    nan, inf = full or (0, 0)
    control = fp32_run(eval_nonfinite=full is not None, eval_nan=nan, eval_inf=inf)
    assert (Symptom.EVALUATION in symptoms(made, control)) is is_one


def test_an_infinity_of_an_op_that_fp32_does_not_have_is_one_beside_a_mask() -> None:
    both = {"eval_nonfinite": True, "eval_inf": 3}
    made = run(steps(), eval_taint=4, **both)
    assert Symptom.EVALUATION in symptoms(made, fp32_run(**both))
    assert Symptom.EVALUATION not in symptoms(made, fp32_run(eval_taint=7, **both))


@pytest.mark.parametrize(("share", "is_one"), [(-0.1, False), (-4.2, True)])
def test_a_loss_may_grow_where_its_steps_do_not_overshoot(share: float, is_one: bool) -> None:
    # The same losses; a step that expects to take off more than the whole loss made it grow.
    losses = [1.2**n for n in range(60)]
    made = [replace(a, expected_change=share * (a.loss or 0)) for a in steps(losses)]
    assert (Symptom.DIVERGED in symptoms(run(made), None)) is is_one
    assert (Symptom.DIVERGED in symptoms(run(made), fp32_run(made))) is is_one
    assert Symptom.DIVERGED in symptoms(run(made), fp32_run(steps([1.0] * 60)))


def weighted(losses: list[float], places: tuple[int, ...], weight: float = 3e4) -> list[float]:
    """The same losses, some multiplied by the weight of their batch."""
    return [weight * x if n in places else x for n, x in enumerate(losses)]


@pytest.mark.parametrize("places", [(15, 55), (53, 55, 57), (59,), (0,), (1, 58, 59)])
def test_batches_of_a_large_weight_are_no_divergence_and_no_slower_learning(
    places: tuple[int, ...],
) -> None:
    learned = [1.5 * 0.96**n for n in range(60)]
    half = but(steps(weighted([1.02 * x for x in learned], places)), places, **OVERFLOWED)
    control = fp32_run(steps(weighted(learned, places)))
    found = symptoms(run(half), control)
    assert not found & {Symptom.DIVERGED, Symptom.BEHIND}
    assert Symptom.DIVERGED not in symptoms(control, None)


def test_slower_learning_is_seen_between_batches_of_a_large_weight() -> None:
    places = (15, 35, 55)
    learned = [1.5 * 0.96**n for n in range(60)]
    control = fp32_run(steps(weighted(learned, places)))
    stuck = run(steps(weighted([1.5] * 60, places)))
    assert Symptom.BEHIND in symptoms(stuck, control)


def test_a_divergence_of_the_last_steps_is_seen_against_the_control() -> None:
    learned = [1.5 * 0.96**n for n in range(60)]
    late = [*learned[:55], 20.0, 400.0, 2e4, 1e6, 1e8]
    assert Symptom.DIVERGED in symptoms(run(steps(late)), fp32_run(steps(learned)))


def test_a_loss_that_rises_for_its_steps_counts_though_fp32_rises_as_well() -> None:
    # Between the jump and the end a batch of large weight hides neither.
    losses = weighted([1.4, 1.3, 1.3, 30.0, 19.0, *(19.0,) * 25], (1, 28), 1e3)
    made = steps(losses, grad_norm=1.0, update_norm=15.0)
    assert Symptom.DIVERGED in symptoms(run(made), fp32_run(made))
    assert Symptom.DIVERGED in symptoms(fp32_run(made), None)


@pytest.mark.parametrize(("kept", "is_one"), [(0.02, True), (0.9, False)])
def test_weights_that_come_as_far_over_many_steps_do_not_stand_still(
    kept: float, is_one: bool
) -> None:
    # Stochastic rounding and Kahan's compensation move few weights a step, and all in the end.
    way = (0.1, -0.2, 0.05)
    end = scan("end", "parameter", "w", dtype="bf16", displacement=tuple(kept * x for x in way))
    full = scan("end", "parameter", "w", displacement=way)
    half = {"weight_dtypes": "bf16", **WITHOUT_SCALER}
    made = evidence(run(steps(moved_share=0.1, **half), end), fp32_run(None, full))
    assert (Symptom.FROZEN in made.symptoms) is is_one
    assert (status("small_update_lost", made) is Status.FOUND) is is_one


WEIGHTS = [("a.weight", 64, (1.0, -2.0) * 32), ("b.weight", 640, (0.5,) * 64)]


def _first_gradients(factors: dict[str, float]) -> list[ParameterGradient]:
    return [
        ParameterGradient(0, "optimizer0", name, n, total, 0, 0, None,
                          tuple(factors.get(name, 1.0) * x for x in sample))
        for n, (name, total, sample) in enumerate(WEIGHTS)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("factors", "error"), [({}, 0.0), ({"b.weight": -1.0}, None), ({"a.weight": 1.2}, None)]
)
def test_how_far_first_gradients_are_from_fp32s(
    factors: dict[str, float], error: float | None
) -> None:
    """Against NumPy: each sampled entry stands for the entries that were left out."""
    full = np.concatenate([np.repeat(sample, total // 64) for _, total, sample in WEIGHTS])
    own = np.concatenate(
        [factors.get(n, 1.0) * np.repeat(sample, total // 64) for n, total, sample in WEIGHTS]
    )
    found = gradient_error(
        run(steps(), *_first_gradients(factors)), fp32_run(None, *_first_gradients({}))
    )
    assert found is not None
    assert found.error == pytest.approx(np.linalg.norm(own - full) / np.linalg.norm(full))
    assert (error is None) is (found.error > 0)
    assert not factors or found.parameter == next(iter(factors))


def test_gradients_of_other_random_numbers_are_not_compared() -> None:
    own = steps(tuple(1.5 * loss for loss in FALLING))
    gradients = _first_gradients({"b.weight": -1.0})
    assert gradient_error(run(own, *gradients), fp32_run(None, *_first_gradients({}))) is None
    bad = but(steps(), [0], grad_nonfinite=3)
    assert gradient_error(run(bad, *gradients), fp32_run(None, *_first_gradients({}))) is None


@pytest.mark.parametrize(
    ("dropped", "line", "is_wrong"),
    [(5, "train.py:81", False), (15, "train.py:81", True), (5, "train.py:99", True)],
)
def test_batches_that_the_script_leaves_out_in_every_precision_are_its_habit(
    dropped: int, line: str, is_wrong: bool
) -> None:
    """A few of them, at the same line in the baseline and in the control."""

    def reads(where: str) -> list[Call]:
        seen = Call(0, 3, "read", subject=READ_LOSS, line=where, note="-1")
        return [replace(seen, seq=100 + n) for n in range(dropped)]

    baseline = run(steps(), calls=reads("train.py:81"))
    control = run(steps(), calls=reads(line), control="fp32")
    assert (Symptom.LOSS in evidence(baseline, control).fp32_symptoms) is is_wrong
    assert Symptom.LOSS in symptoms(control, None)


def _reads(where: Iterable[int], line: str = "train.py:81") -> list[Call]:
    """Batches that the script left out before these steps, because it saw a loss of NaN."""
    seen = Call(0, 0, "read", subject=READ_LOSS, line=line, note="-1")
    return [replace(seen, seq=100 + n, step=step) for n, step in enumerate(where)]


RARE = (4, 11, 17, 26)


@pytest.mark.parametrize(
    ("own", "reference", "is_wrong"),
    [
        (RARE, (*RARE, 33, 38), (False, False)),
        ((*RARE, 30), RARE, (False, False)),  # the last batch before the clock stopped the loop
        (RARE, (), (True, False)),  # fp32 leaves out none
        ((*RARE, *range(5, 11)), RARE, (True, False)),  # half precision leaves out far more
        ((30,), (40,), (True, True)),  # a guard that breaks the loop
        ((*RARE, *(30,) * 9), (*RARE, *(40,) * 9), (True, True)),  # no step follows any more
    ],
)
def test_a_habit_needs_no_end_at_the_same_step(
    own: Sequence[int], reference: Sequence[int], is_wrong: tuple[bool, bool]
) -> None:
    """A loop that ends by the clock, or by its patience, makes other numbers of steps."""
    baseline = run(steps(), calls=_reads(own))
    control = run(steps([1.0] * 40), calls=_reads(reference), control="fp32")
    made = evidence(baseline, control)
    assert (Symptom.LOSS in made.symptoms, Symptom.LOSS in made.fp32_symptoms) == is_wrong


def decay(start: float, end: float, count: int = 100, floor: float = 0.0) -> list[float]:
    """A loss that falls by the same factor at each step, to ``floor`` at the least."""
    return [max(start * (end / start) ** (n / (count - 1)), floor) for n in range(count)]


LEARNED = decay(4.0, 0.014)


@pytest.mark.parametrize(
    ("own", "full", "is_one"),
    [
        (decay(4.0, 0.014, floor=0.24), LEARNED, True),  # 94 % of the way, and 99.6 %
        (decay(4.0, 0.02), LEARNED, False),
        (decay(4.0, 1e-9, floor=1e-5), decay(4.0, 1e-9), False),  # the floor of bf16
        (decay(4.0, 0.014, floor=0.03), decay(4.0, 0.001), False),  # both are converged
        ([4.0] * 12 + LEARNED[:88], LEARNED, False),  # later by 12 steps
        ([a - 4.0 for a in decay(4.0, 0.014, floor=0.24)], [a - 4.0 for a in LEARNED], False),
        # The largest of the losses repeats in both runs; batch by batch fp32 has less left.
        (
            [a * (1 + 9 * (n % 5 == 0)) for n, a in enumerate(decay(4.0, 0.05, floor=0.24))],
            [a * (1 + 9 * (n % 5 == 0)) for n, a in enumerate(decay(4.0, 0.02))],
            True,
        ),
    ],
    ids=["plateau", "near", "floor", "converged", "delay", "below_0", "scatter"],
)
def test_losses_are_compared_by_what_is_left_of_them(
    own: list[float], full: list[float], is_one: bool
) -> None:
    assert (Symptom.BEHIND in symptoms(run(steps(own)), fp32_run(steps(full)))) is is_one


@pytest.mark.parametrize(
    ("own", "fp32", "is_behind"),
    [
        (3e-3, 1e-5, True),  # weights went through a half file: half a percent of the first loss
        (3e-3, 2e-3, False),  # fp32 is as high: a harder task, a loss that grows
        (2e-5, 1e-5, False),
        (3e-3, 0.0, True),
    ],
)
def test_what_a_run_loses_that_it_had_itself(own: float, fp32: float, is_behind: bool) -> None:
    before = [0.5, *(0.1 / (n + 1) for n in range(9)), *(1e-5,) * 20]
    found = seen([*before, *(own,) * 20], [*before, *(fp32,) * 20], 0)
    assert (Symptom.BEHIND in found) is is_behind


def test_what_a_search_for_the_scale_has_cost_is_no_more_left() -> None:
    # 30 of 100 steps are skipped: the run is where fp32 was 30 steps before.
    late = run(search(steps([4.0] * 30 + LEARNED[:70]), 2.0**24, 30))
    assert Symptom.BEHIND not in symptoms(late, fp32_run(steps(LEARNED)))


def inputs(total: float) -> Call:
    return Call(0, 0, "inputs", value=total, dtype="fp32")


@pytest.mark.parametrize(("again", "is_one"), [(None, False), (3.0, False), (1.0, True)])
def test_an_unlike_beginning_is_chance_only_where_the_script_itself_repeats_it(
    again: float | None, is_one: bool
) -> None:
    half_way = [4.0 - 0.01 * n for n in range(100)]  # a third of fp32's progress
    full = [4.0 - 0.03 * n for n in range(100)]
    own = run(steps(half_way), inputs(1.0))
    controls = {} if again is None else {"repeat": run(steps(half_way), inputs(again))}
    made = evidence(own, fp32_run(steps(full), inputs(2.0)), **controls)
    assert (Symptom.BEHIND in made.symptoms) is is_one
    assert wants_repeat(own, made.runs["fp32"]) is (again is None)
    if again is not None:
        assert is_reproducible(own, made.runs["repeat"]) is (again == 1.0)


def test_a_script_whose_later_losses_differ_does_not_reproduce_itself() -> None:
    assert is_reproducible(run(steps(LEARNED)), run(steps(LEARNED)))
    assert not is_reproducible(run(steps(LEARNED)), run(steps([a * 1.1 for a in LEARNED])))


@pytest.mark.parametrize(
    ("moved", "is_beyond"), [(0.03, True), (0.5, False), (NAN, None)], ids=["near", "far", "nan"]
)
def test_a_loss_that_one_rounding_carries_as_far_is_no_slower_learning(
    moved: float, is_beyond: bool | None
) -> None:
    full = decay(2.0, 0.1)
    own, fp32 = run(steps([max(a, 1.2) for a in full])), fp32_run(steps(full))
    other = fp32_run(steps([a + moved for a in full]))
    assert beyond_floor(own, fp32, other) is is_beyond
    assert Symptom.BEHIND in evidence(own, fp32).symptoms
    made = evidence(own, fp32, **{"fp32;nudged": other})
    assert (Symptom.BEHIND in made.symptoms) is (is_beyond is not False)
