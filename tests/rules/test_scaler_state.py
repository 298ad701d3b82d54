"""A resume and its scaler: restored, lost, or never there."""

from __future__ import annotations

from dataclasses import replace

from ampscope.observations import Call
from ampscope.rules.verdict import Status
from tests.helpers.evidence_making import (
    FALLING,
    SCALE,
    SCALED_LOOP,
    STEPS,
    answers,
    evidence,
    log,
    run,
    search,
    status,
    steps,
)
from tests.helpers.evidence_of_runs import LOAD, state_lost


def resumed(*between: Call, init: float, skips: int, trained: bool = True) -> Status:
    """Half a run at a steady scale of 64, ``between``, and half a run from ``init``."""
    before = [replace(a, scale=64.0) for a in steps(FALLING)] if trained else []
    after = search(steps(FALLING), init, skips)
    first = log(SCALED_LOOP)[: 5 * len(before)]
    moved = [replace(a, step=a.step + len(before)) for a in after]
    link = [replace(c, seq=len(first) + n, step=len(before)) for n, c in enumerate(between)]
    rest = log(SCALED_LOOP, start=len(first) + len(link))
    second = [replace(c, step=c.step + len(before)) for c in rest]
    return status(
        "scaler_state_lost", evidence(run([*before, *moved], calls=[*first, *link, *second]))
    )


def test_a_restored_scaler_has_lost_nothing() -> None:
    # Not even where the state that was restored is too high for what follows.
    restored = replace(LOAD, name="scaler_load_state_dict", subject=SCALE.subject)
    assert resumed(LOAD, restored, init=65536.0, skips=10) is Status.PASSED


def test_a_state_that_another_scaler_got_is_lost() -> None:
    elsewhere = replace(LOAD, name="scaler_load_state_dict", subject="scaler1")
    assert resumed(LOAD, elsewhere, init=65536.0, skips=10) is Status.FOUND
    # A second scaler may well have a state of its own, beside the one that scales.
    own = replace(LOAD, name="scaler_load_state_dict", subject=SCALE.subject)
    assert resumed(LOAD, elsewhere, own, init=65536.0, skips=10) is Status.PASSED


def test_a_scaler_that_goes_on_after_weights_were_rolled_back_has_lost_nothing() -> None:
    rolled_back = replace(LOAD, note="with scaler state")
    assert resumed(rolled_back, init=64.0, skips=1) is Status.PASSED


def test_a_last_load_after_which_nothing_is_trained_hides_no_lost_state() -> None:
    last = log(SCALED_LOOP, start=10_000)[-1]
    link = [LOAD, replace(LOAD, name="scaler_load_state_dict", subject="scaler1")]
    again = replace(LOAD, seq=last.seq + 1, step=2 * STEPS)
    first, rest = log(SCALED_LOOP), log(SCALED_LOOP, start=5_000)
    resume = [replace(c, seq=4_000 + n, step=STEPS) for n, c in enumerate(link)]
    second = [replace(c, step=c.step + STEPS) for c in rest]
    all_steps = [replace(a, scale=64.0) for a in steps(FALLING)] + [
        replace(a, step=a.step + STEPS) for a in search(steps(FALLING), 65536.0, 10)
    ]
    calls = [*first, *resume, *second]
    for more in ([], [again]):
        made = evidence(run(all_steps, calls=[*calls, *more]))
        assert status("scaler_state_lost", made) is Status.FOUND


def test_files_of_one_checkpoint_are_one_resume() -> None:
    """Weights, the scaler's state and an average, each from a file of its own."""
    restored = replace(LOAD, name="scaler_load_state_dict", subject=SCALE.subject)
    assert resumed(LOAD, LOAD, restored, LOAD, init=65536.0, skips=10) is Status.PASSED


def test_weights_that_are_loaded_after_training_lose_no_scale() -> None:
    loop = log(SCALED_LOOP)
    load = replace(LOAD, seq=len(loop), step=STEPS)
    made = evidence(run(steps(), calls=[*loop, load]))
    assert status("scaler_state_lost", made) is Status.PASSED


def test_a_fresh_scale_that_fits_has_lost_nothing() -> None:
    assert resumed(LOAD, init=128.0, skips=0) is Status.PASSED


def test_the_jump_from_64_to_65536_is_found() -> None:
    assert resumed(LOAD, init=65536.0, skips=10) is Status.FOUND


def test_the_jump_and_the_burst_are_the_evidence() -> None:
    values = {m.name: m.value for m in answers(state_lost())["scaler_state_lost"].evidence}
    assert values["scale after the load over scale before"] == 2.0**16 / 2.0**-5
    assert values["skips right after the load"] == 21


def test_pretrained_weights_before_training_are_no_resume() -> None:
    # Six skips are the search from 2^24; nothing was trained that could have found a scale.
    assert resumed(LOAD, init=2.0**24, skips=6, trained=False) is not Status.FOUND


def test_a_checkpoint_with_the_scalers_state_that_is_ignored_is_found() -> None:
    ignored = replace(LOAD, note="with scaler state")
    assert resumed(ignored, init=65536.0, skips=10, trained=False) is Status.FOUND


def remade(skips: int, taken: int, optimizers: int = 1, line: str = "train.py:27") -> Status:
    """Four epochs, each with a scaler of its own that is made for it and takes ``skips`` skips to
    find its scale; ``taken`` steps follow."""
    loss = FALLING[-1]
    epochs, made, calls = range(4), [], []
    for epoch in epochs:
        begin = len(made)
        one = replace(SCALE, name="scaler_new", subject=f"scaler{epoch}", line=line)
        calls.append(replace(one, seq=len(calls), step=begin))
        calls.append(replace(SCALE, seq=len(calls), step=begin, subject=f"scaler{epoch}"))
        made += [
            replace(
                a,
                step=begin + a.step,
                scaler=f"scaler{epoch}",
                optimizer=f"optimizer{epoch % optimizers}",
            )
            for a in search(steps([loss] * (skips + taken)), 65536.0, skips)
        ]
    found = answers(evidence(run(made, calls=calls)))["scaler_state_lost"]
    assert found.status is not Status.FOUND or found.line == line
    return found.status


def test_a_scaler_that_every_epoch_makes_anew_loses_the_scale() -> None:
    assert remade(8, 0) is Status.FOUND  # no step of an epoch is left after its search
    assert remade(8, 4) is Status.FOUND


def test_new_scalers_whose_searches_cost_little_are_no_fault() -> None:
    assert remade(2, 100) is not Status.FOUND
    assert remade(0, 20) is not Status.FOUND


def test_each_fold_may_have_a_scaler_and_an_optimizer_of_its_own() -> None:
    assert remade(8, 4, optimizers=4) is not Status.FOUND
