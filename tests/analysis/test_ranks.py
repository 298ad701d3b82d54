"""Ranks of one training: sums against a loop over elements, and who went non-finite first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.analysis.ranks import FirstAtFault, first_at_fault, first_nonfinite, merged
from ampscope.analysis.run_view import RunView
from ampscope.numerics.histogram import RAW_LEN
from ampscope.records import Event, Frame, Role, RunInfo, RunSpec, State
from tests.helpers.evidence_making import FALLING, NAN, OVERFLOWED, bad_op, but, run, search, steps

KEY = st.tuples(st.integers(0, 4), st.sampled_from(["fp16", "fp32"]))


def frame(keys: list[tuple[int, str]], seed: int = 0) -> Frame:
    rows = np.random.default_rng(seed).integers(0, 2**40, (len(keys), RAW_LEN))
    modules, dtypes = tuple(m for m, _ in keys), tuple(d for _, d in keys)
    return Frame(10, Role.WEIGHT_GRAD, modules, dtypes, rows, 2.0**16, 30)


@given(st.lists(st.lists(KEY, max_size=6), min_size=1, max_size=4))
@settings(deadline=None)
def test_every_count_of_every_rank_is_in_the_sum(keys: list[list[tuple[int, str]]]) -> None:
    frames = [frame(k, seed) for seed, k in enumerate(keys)]
    expected: dict[tuple[int, str], list[int]] = {}
    for one in frames:
        for module, dtype, row in zip(one.modules, one.dtypes, one.rows.tolist(), strict=True):
            known = expected.get((module, dtype), [0] * RAW_LEN)
            expected[module, dtype] = [a + b for a, b in zip(known, row, strict=True)]
    total = merged(frames)
    found = zip(total.modules, total.dtypes, total.rows.tolist(), strict=True)
    assert {(module, dtype): row for module, dtype, row in found} == expected
    assert len(total.modules) == len(expected) or len(frames) == 1
    assert (total.step, total.last_step, total.role, total.scale) == (
        10,
        30,
        Role.WEIGHT_GRAD,
        2.0**16,
    )


@pytest.mark.parametrize(
    "other", [{"step": 11}, {"last_step": None}, {"role": Role.WEIGHT}, {"scale": 2.0**15}]
)
def test_what_cannot_be_added(other: dict[str, object]) -> None:
    one = frame([(0, "fp16")])
    with pytest.raises(ValueError, match=f"differ in {next(iter(other))}"):
        merged([one, replace(one, **other)])  # type: ignore[arg-type]  # fields of Frame
    with pytest.raises(ValueError, match="no frames"):
        merged([])


def bad(step: int, name: str) -> Event:
    return Event(step, "nonfinite", name, "…")


NOTE = Event(0, "note", "loss", "Not a sign.")


def test_nothing_was_seen() -> None:
    assert first_nonfinite({}) is None
    assert first_nonfinite({0: [NOTE], 1: []}) is None


def test_one_rank_saw_it_in_its_own_loss_and_all_in_the_gradients() -> None:
    shared = [NOTE, bad(7, "gradients"), bad(9, "loss")]
    found = first_nonfinite({0: shared, 2: shared, 1: [bad(7, "loss"), bad(7, "gradients")]})
    assert found is not None
    assert (found.step, found.ranks, found.places) == (7, (1,), ("loss",))
    assert (found.shared, found.silent) == ((0, 2), ())
    assert found.sentence == (
        "Rank 1 went non-finite first, at step 7 (seen in: loss). "
        "Ranks 0 and 2 saw it only in the gradients that all ranks share."
    )


def test_the_order_of_a_ranks_events_does_not_matter() -> None:
    late_first = [bad(90, "loss"), bad(7, "gradients"), bad(7, "backward")]
    found = first_nonfinite({0: [bad(8, "loss")], 1: late_first})
    assert found is not None
    assert (found.step, found.ranks, found.silent) == (7, (1,), (0,))


@pytest.mark.parametrize("place", ["loss", "forward", "output gradient", "backward"])
def test_ranks_that_saw_it_in_the_same_step_are_all_named(place: str) -> None:
    found = first_nonfinite({3: [bad(12_345, place)], 0: [bad(12_345, "loss")], 1: []})
    assert found is not None
    assert (found.ranks, found.places, found.silent) == ((0, 3), ("loss", place), (1,))
    assert found.sentence.startswith("Ranks 0 and 3 went non-finite first, at step 12,345")
    assert "which of them was first within that step is not recorded" in found.sentence


def test_no_rank_saw_a_sign_of_its_own() -> None:
    found = first_nonfinite({rank: [bad(5, "gradients"), bad(6, "loss")] for rank in range(3)})
    assert found is not None
    assert (found.step, found.ranks, found.shared) == (5, (), (0, 1, 2))
    assert "on ranks 0, 1 and 2" in found.sentence
    assert "may have overflowed, or what came before it was not watched" in found.sentence
    assert "nothing of this step" not in found.sentence


def test_a_rank_that_died_in_that_step_is_pointed_at() -> None:
    found = first_nonfinite({0: [bad(5, "gradients")], 1: [NOTE]})
    assert found is not None
    assert (found.ranks, found.shared, found.silent) == ((), (0,), (1,))
    assert "Rank 1 says nothing of this step: look there whether it died." in found.sentence


def test_a_rank_that_died_before_is_no_reason_to_doubt_the_others() -> None:
    """Ranks with different step counts: rank 0 ended at step 3, its own trouble came first."""
    found = first_nonfinite({0: [bad(3, "forward")], 1: [bad(400, "loss")]})
    assert found is not None
    assert (found.step, found.ranks, found.silent) == (3, (0,), (1,))


def test_a_single_rank_shares_with_nobody() -> None:
    found = first_nonfinite({0: [bad(5, "gradients")]})
    assert found is not None
    assert found.ranks == ()
    assert found.sentence == (
        "At step 5 the gradients were not finite on rank 0, and nothing before them was seen to be:"
        " it was not watched."
    )


# A script's ranks: whose observations are judged.


def judged(*views: RunView, ended: tuple[float, ...] = ()) -> FirstAtFault | None:
    """Of ranks 0, 1, …, which ended in that order unless told otherwise."""
    infos = [
        RunInfo(
            f"r{n}", RunSpec("train.py", rank=n, world=len(views)), State.FINISHED, 0.0, 0.0,
            ended[n] if ended else float(n), None, None, None, "", "", 30, None,
        )
        for n in range(len(views))
    ]  # fmt: skip
    return first_at_fault(list(zip(infos, views, strict=True)))


SKIPPED_LATE = but(steps(), range(4, 30), **OVERFLOWED)  # on all ranks, as gradients are summed
BAD_LOSS = [replace(a, loss=NAN) if a.step >= 4 else a for a in SKIPPED_LATE]


def test_the_rank_whose_own_op_overflowed_is_judged() -> None:
    found = judged(run(SKIPPED_LATE), run(BAD_LOSS, bad_op("aten.addmm", step=4)))
    assert found is not None
    assert (found.place, found.step) == (1, 4)
    assert "the skip at step 4 came from rank 1" in found.sentence


def test_an_op_is_a_clearer_sign_than_a_loss_in_the_same_step() -> None:
    """Ranks may exchange numbers in the forward pass, as synchronized batch norm does."""
    found = judged(run(BAD_LOSS), run(BAD_LOSS, bad_op("aten.addmm", step=4)))
    assert found is not None
    assert found.place == 1


def test_of_ranks_that_fail_in_the_same_step_the_first_of_them_is_judged() -> None:
    failing = run(BAD_LOSS, bad_op("aten.addmm", step=4))
    found = judged(run(SKIPPED_LATE), failing, failing)
    assert found is not None
    assert (found.place, found.sentence) == (
        1, "Several ranks computed the first value that is not finite, at step 4."
    )  # fmt: skip


def test_a_search_for_the_loss_scale_that_ends_is_no_sign() -> None:
    overflow = bad_op("aten.mm", phase="backward", reached_loss=False, count=2, last_step=1)
    searched = search(steps(), 2.0**24, 2)
    assert judged(run(searched), run(searched, overflow)) is None
    assert judged(run(steps()), run(steps())) is None


def test_the_rank_that_raised_first_is_judged() -> None:
    """The other one raises when the connection to it is closed."""
    cut = steps(FALLING[:5])
    waits = run(cut, ended="exception", error_type="RuntimeError")
    fails = run(cut, ended="exception", error_type="KeyError")
    found = judged(waits, fails, ended=(9.0, 8.0))
    assert found is not None
    assert (found.place, found.sentence) == (1, "It was the first to raise an error, at step 5.")


def test_a_rank_that_went_wrong_before_another_raised_is_judged() -> None:
    raising = run(SKIPPED_LATE, ended="exception", error_type="RuntimeError")
    found = judged(raising, run(BAD_LOSS, bad_op("aten.addmm", step=4)))
    assert found is not None
    assert found.place == 1
