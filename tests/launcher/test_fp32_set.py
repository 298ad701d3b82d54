"""Delta debugging, against an oracle whose minimal sets are known beforehand."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.launcher.smallest_set import smallest_set

UNBOUNDED = 10_000
Cures = Callable[[tuple[str, ...]], bool]


def _names(count: int) -> list[str]:
    return [f"layer{n}" for n in range(count)]


def _counting(cures: Cures) -> tuple[Cures, list[tuple[str, ...]]]:
    asked: list[tuple[str, ...]] = []

    def ask(paths: tuple[str, ...]) -> bool:
        asked.append(paths)
        return cures(paths)

    return ask, asked


@st.composite
def one_minimal_set(draw: st.DrawFn) -> tuple[list[str], set[str]]:
    names = _names(draw(st.integers(1, 24)))
    return names, set(draw(st.lists(st.sampled_from(names), min_size=1, max_size=5)))


@settings(max_examples=150)
@given(one_minimal_set())
def test_the_one_minimal_set_is_found(case: tuple[list[str], set[str]]) -> None:
    names, needed = case
    ask, asked = _counting(lambda paths: needed <= set(paths))
    found = smallest_set(names, ask, UNBOUNDED)
    assert found == tuple(n for n in names if n in needed)
    assert len(asked) <= 1 + len(needed) * (math.ceil(math.log2(len(names))) + 1)


@settings(max_examples=60)
@given(st.integers(1, 64), st.data())
def test_one_culprit_is_found_by_halving(count: int, data: st.DataObject) -> None:
    names = _names(count)
    culprit = data.draw(st.sampled_from(names))
    ask, asked = _counting(lambda paths: culprit in paths)
    assert smallest_set(names, ask, UNBOUNDED) == (culprit,)
    assert len(asked) <= 2 + math.ceil(math.log2(count))


@settings(max_examples=150)
@given(st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=4), min_size=2, max_size=4))
def test_of_several_minimal_sets_one_is_found_and_nothing_in_it_can_be_left_out(
    alternatives: list[set[int]],
) -> None:
    names = _names(12)
    sets = [{names[n] for n in alternative} for alternative in alternatives]

    def cures(paths: tuple[str, ...]) -> bool:
        return any(s <= set(paths) for s in sets)

    found = smallest_set(names, cures, UNBOUNDED)
    assert found is not None
    assert cures(found)
    for left_out in found:
        assert not cures(tuple(n for n in found if n != left_out))


@settings(max_examples=80)
@given(one_minimal_set(), st.integers(0, 20))
def test_the_bound_on_runs_is_kept_and_what_is_returned_was_seen_to_cure(
    case: tuple[list[str], set[str]], bound: int
) -> None:
    names, needed = case
    ask, asked = _counting(lambda paths: needed <= set(paths))
    found = smallest_set(names, ask, bound)
    assert len(asked) <= bound
    if bound == 0:
        assert found is None
    else:
        assert found in asked
        assert needed <= set(found or ())


@settings(max_examples=100)
@given(st.integers(1, 10), st.integers(1, 40), st.randoms(use_true_random=False))
def test_a_fault_that_more_fp32_can_bring_back_still_ends_in_a_set_that_cured(
    count: int, bound: int, random: random.Random
) -> None:
    """No monotony at all: the answer of each set is a coin."""
    names = _names(count)
    answers: dict[tuple[str, ...], bool] = {tuple(names): True}
    ask, asked = _counting(lambda paths: answers.setdefault(paths, random.random() < 0.5))
    found = smallest_set(names, ask, bound)
    assert found is not None
    assert answers[found]
    assert len(asked) <= bound


def test_no_cure_is_one_run() -> None:
    ask, asked = _counting(lambda paths: False)
    assert smallest_set(_names(9), ask, UNBOUNDED) is None
    assert asked == [tuple(_names(9))]


def test_nothing_to_search() -> None:
    ask, asked = _counting(lambda paths: True)
    assert smallest_set([], ask, UNBOUNDED) is None
    assert asked == []


def test_no_set_is_run_twice() -> None:
    """Each run costs seconds: a set that was seen to fail is not run again."""
    names, needed = _names(8), {"layer1", "layer6"}
    ask, asked = _counting(lambda paths: needed <= set(paths))
    smallest_set(names, ask, UNBOUNDED)
    assert len(asked) == len(set(asked))


@settings(max_examples=150)
@given(one_minimal_set())
def test_the_likeliest_are_tried_first(case: tuple[list[str], set[str]]) -> None:
    names, needed = case
    ask, asked = _counting(lambda paths: needed <= set(paths))
    found = smallest_set(names, ask, UNBOUNDED, likely_first=True)
    assert found == tuple(n for n in names if n in needed)
    assert asked[0] == (names[0],)
    assert needed != {names[0]} or len(asked) == 1


@settings(max_examples=60)
@given(st.integers(3, 64), st.integers(0, 3))
def test_a_culprit_among_the_first_few_costs_few_runs(count: int, place: int) -> None:
    """Six runs, of which the first tries one name and the second all of them."""
    names = _names(count)
    culprit = names[min(place, count - 1)]
    found = smallest_set(names, lambda paths: culprit in paths, 6, likely_first=True)
    assert found is not None
    assert culprit in found
    assert len(found) <= 4
