"""What counts as a cure: a measured symptom that went away, and a loss that follows the control."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from ampscope.analysis.evidence import Evidence
from ampscope.analysis.healing import follows
from ampscope.analysis.run_view import RunView
from ampscope.analysis.symptoms import Symptom, symptoms
from ampscope.control import Control
from ampscope.diagnosis.cure import by_trials, is_cured
from ampscope.diagnosis.findings import Diagnosis, Finding
from ampscope.diagnosis.result import price, trial_of
from ampscope.observations import Call, Outcome
from ampscope.render.contract import document
from ampscope.rules.verdict import FIX_KINDS, FP32_TRAINING, Fix, Status, Verdict
from ampscope.store.reader import Reader
from ampscope.story import fix_words
from tests.helpers import script_stores
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    HEALTHY_FP32,
    NAN,
    OVERFLOWED,
    WITHOUT_SCALER,
    but,
    fp32_run,
    run,
    scan,
    steps,
)

ANY = Finding("scaled_gradient_penalty", Verdict(Status.FOUND, fix=Fix("add_scaler", "")))
DIVERGENCE = Finding("not_amp_divergence", Verdict(Status.FOUND, fix=Fix("lower_lr", "")))
BROKEN = run(but(steps([NAN] * 30, **WITHOUT_SCALER), range(30), grad_nonfinite=9))


def evidence(baseline: object = BROKEN, fp32: object = HEALTHY_FP32) -> Evidence:
    return Evidence({"as_is": baseline, "fp32": fp32}, "native")  # type: ignore[dict-item]


def test_a_symptom_that_went_away_and_a_loss_that_follows_is_a_cure() -> None:
    assert evidence().symptoms
    assert is_cured(ANY, evidence(), run(steps()), None) is True


def test_a_loss_that_does_not_follow_the_control_is_no_cure() -> None:
    assert is_cured(ANY, evidence(), run(steps(FLAT)), None) is False
    rising = [1.5 + 0.5 * i for i in range(30)]
    assert is_cured(ANY, evidence(fp32=fp32_run(steps(FLAT))), run(steps(rising)), None) is False


def test_without_a_symptom_a_removed_pattern_is_not_measurable() -> None:
    healthy = evidence(run(steps()))
    assert not healthy.symptoms
    assert is_cured(ANY, healthy, run(steps()), None) is None
    assert is_cured(ANY, evidence(), BROKEN, None) is False


def test_a_divergence_that_is_only_smaller_is_no_cure() -> None:
    """Learning rate 30 to 3: the loss goes 2.3, 334, 23, and so it does in fp32."""
    wild = [2.3, 334.0, 120.0, *([40.0] * 20), *([23.0] * 7)]
    slower, reference = run(steps(wild)), fp32_run(steps(wild))
    before = evidence(fp32=fp32_run(steps([2.3 * 10.0**i for i in range(30)])))
    assert is_cured(DIVERGENCE, before, slower, reference) is False
    assert is_cured(DIVERGENCE, before, run(steps()), HEALTHY_FP32) is True


@pytest.mark.parametrize("count", [8, 12, 14, 30, 200])
def test_a_search_for_the_scale_in_a_short_run_is_no_failed_fix(count: int) -> None:
    """The fixed run begins with eleven skips. However few steps are left after them, it is not
    "not cured"; with enough of them it is cured."""
    losses = [1.5 - 1.2 * i / count for i in range(count)]
    fixed = run(but(steps(losses), range(11), **OVERFLOWED))
    fixed = run([replace(a, scale=2.0 ** max(16 - i, 5)) for i, a in enumerate(fixed.steps)])
    before = evidence(run(but(steps([NAN] * count, **OVERFLOWED), ())), fp32_run(steps(losses)))
    found = is_cured(ANY, before, fixed, None)
    assert found is (True if count >= 30 else None)


def searched(count: int, after: list[float]) -> RunView:
    """Eleven steps are skipped, at the loss of the start; ``after`` are the losses that follow."""
    losses = [*([1.5] * 11), *after, *([after[-1]] * 30)][:count]
    made = but(steps(losses), range(11), **OVERFLOWED)
    return run([replace(a, scale=2.0 ** max(16 - i, 5)) for i, a in enumerate(made)])


@pytest.mark.parametrize(
    ("count", "after", "cured"),
    [
        (12, FALLING, None),  # one step was taken
        (11, FALLING, None),  # none
        (15, FALLING, None),
        (30, FALLING, True),
        (30, FLAT, False),  # it does not learn
    ],
)
def test_steps_that_a_search_has_cost_are_not_held_against_a_fix(
    count: int, after: list[float], cured: bool | None
) -> None:
    """With 12 steps the fixed run's loss stands where it began, and fp32's has fallen."""
    before = run(but(steps([NAN] * count, **OVERFLOWED), ()))
    seen = evidence(before, fp32_run(steps(FALLING[:count])))
    fixed = searched(count, after)
    if count == 12:
        assert Symptom.BEHIND in symptoms(fixed, seen.fp32) & seen.symptoms
    assert is_cured(ANY, seen, fixed, None) is cured


def test_too_few_steps_are_said_with_the_option_that_gives_more(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    with Reader(path) as reader:
        from ampscope.diagnosis.load import load_diagnosis

        report = load_diagnosis(reader, head)
    short = tuple(replace(t, cured=None, compared=3) for t in report.trials)
    assert fix_words.outcome(short[0]) == (
        "inconclusive: the cause is found no more, but 3 taken steps are too few to tell"
    )
    for cut_short, option in (("steps", "--steps 48"), ("time", "--time-limit"), ("", "--steps")):
        unsure = replace(report, trials=short, cut_short=cut_short)
        said = fix_words.seen(unsure)
        assert said.startswith("Inconclusive: too few steps to tell.")
        assert option in said
        fix = document(unsure)["findings"][0]["fix"]
        assert (fix["verified"], fix["verification"]) == (None, said)
        assert fix_words.state(unsure) == "inconclusive"


def test_a_control_that_does_not_train_proves_nothing() -> None:
    wild = steps([2.3, *([334.0] * 9), *([23.0] * 20)])
    assert is_cured(ANY, evidence(fp32=fp32_run(wild)), run(wild), None) is None


def test_several_optimizers_are_not_compared_by_their_losses() -> None:
    two = [replace(a, optimizer=f"optimizer{a.step % 2}") for a in steps(FLAT)]
    assert follows(run(two), fp32_run(two)) is True
    assert follows(run(steps(FALLING)), None) is None


@pytest.mark.parametrize(("norms", "cured"), [((inf, 3.0, 4.0), None), ((inf, 1e5, 1.2e5), False)])
def test_a_clip_is_judged_by_its_first_finite_norm(
    norms: tuple[float, ...], cured: bool | None
) -> None:
    """The first step is a search for the scale, whose norm is infinite in both runs. None: the
    pattern is gone, in runs that show no effect."""

    def clipped(losses: list[float], values: tuple[float, ...]) -> RunView:
        calls = [Call(n, n, "clip", value=value) for n, value in enumerate(values)]
        return run(steps(losses), calls=calls)

    before, after = clipped(FLAT, (inf, 1e5, 1.1e5)), clipped(FALLING, norms)
    finding = Finding("clip_before_unscale", Verdict(Status.FOUND, fix=Fix("unscale_first", "")))
    seen = evidence(before, fp32_run(steps(FALLING)))
    assert is_cured(finding, seen, after, None) is cured


def test_what_is_written_where_nothing_could_be_measured(tmp_path: Path) -> None:
    """A clip on scaled gradients under Adam: the pattern is wrong, and the loss is as good."""
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    with Reader(path) as reader:
        from ampscope.diagnosis.load import load_diagnosis

        report = load_diagnosis(reader, head)
    assert document(report)["findings"][0]["fix"]["verified"] is True
    trials = tuple(replace(t, cured=None) for t in report.trials)
    unsure = replace(report, trials=trials)
    fix = document(unsure)["findings"][0]["fix"]
    assert fix["verified"] is None
    assert "The effect is not measurable in 12 steps" in fix["verification"]
    assert fix_words.state(unsure) == "not measurable"
    assert fix_words.outcome(trials[0]) == ("pattern removed; effect not measurable in 12 steps")


def _found(cause: str, *controls: str) -> Finding:
    return Finding(cause, Verdict(Status.FOUND, fix=Fix("add_scaler", "", controls=controls)))


@pytest.mark.parametrize(
    ("first", "cured", "root"),
    [
        (("scale:8",), ("bf16",), "gradient_underflow"),  # the first one's fix was run in vain
        (("scale:8",), (), "scaled_gradient_penalty"),
        (("scale:8",), ("scale:8", "bf16"), "scaled_gradient_penalty"),
        ((), ("bf16",), "scaled_gradient_penalty"),  # it has no fix that could be run
    ],
)
def test_the_finding_whose_fix_cures_stands_first(
    first: tuple[str, ...], cured: tuple[str, ...], root: str
) -> None:
    found = (_found("scaled_gradient_penalty", *first), _found("gradient_underflow", "bf16"))
    views = {name: run(steps()) if name in cured else BROKEN for name in ("scale:8", "bf16")}
    seen = Evidence({"as_is": BROKEN, "fp32": HEALTHY_FP32, **views}, "native")
    judged = by_trials(Diagnosis("fault", found, (), (), "native"), seen)
    assert judged.findings[0].cause == root
    assert {f.cause for f in judged.findings} == {f.cause for f in found}


def test_what_a_fix_costs_is_processor_time_and_not_time_on_the_clock() -> None:
    """The baseline ran beside another process, and took three times as long on the clock."""

    def timed(elapsed_s: float, step_cpu_s: float, control: str = "bf16") -> RunView:
        took = Outcome("returned", elapsed_s=elapsed_s, step_cpu_s=step_cpu_s, steps=30)
        return RunView(control, control, [*steps(), took])

    before = timed(9.0, 0.05)
    assert price(timed(3.0, 0.06), before) == pytest.approx(1.2)
    assert price(timed(3.0, 0.0), before) is None  # on CUDA, and of older records
    assert price(timed(3.0, 0.06), timed(9.0, 0.0)) is None
    assert price(timed(3.0, 0.06, "compiled"), before) is None


@pytest.mark.parametrize(("end", "expected"), [(1.52, True), (1.6, False)])
def test_a_run_follows_by_half_of_the_progress(end: float, expected: bool) -> None:
    """The example of its docstring."""
    falling = [2.0 - 0.1 * step for step in range(10)]
    own = [*falling[:5], 1.6, 1.6, 1.6, end, end]
    assert follows(run(steps(own)), fp32_run(steps(falling))) is expected


def test_all_modules_in_fp32_are_no_fix(tmp_path: Path) -> None:
    """fp32 training by another name: AMP does not suit the training, or something else is wrong."""
    names = ("first", "second", "third")
    before = run(steps(FLAT), *(scan("start", "parameter", f"{name}.weight") for name in names))
    whole, part = (Control.of(fp32_modules=paths) for paths in (names, names[:2]))
    fix = Fix("fp32_module", "Keep it.")
    trials = [trial_of(c, fix, run(steps()), before, cured=True) for c in (whole, part)]
    assert [t.kind for t in trials] == [FP32_TRAINING, "fp32_module"]
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    with Reader(path) as reader:
        from ampscope.diagnosis.load import load_diagnosis

        report = replace(load_diagnosis(reader, head), trials=(trials[0],))
    assert fix_words.chosen(report) is None
    assert fix_words.verified(report) is False
    assert FIX_KINDS[FP32_TRAINING] in fix_words.seen(report)
    assert fix_words.chosen(replace(report, trials=tuple(trials))) == trials[1]
    line = trial_of("fp32_lines:train.py:6", fix, run(steps()), before, cured=True)
    assert fix_words.best(replace(report, trials=(trials[1], line))) == line
