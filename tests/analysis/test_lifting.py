"""Which sites are lifted to fp32, in which order, and what a run with some lifted proves."""

from __future__ import annotations

import base64
import struct
from dataclasses import replace

import pytest
import torch

from ampscope.analysis.lifting import PARTED, candidates, lift, lifted, lost, parted, smallest_lift
from ampscope.control import Control
from ampscope.diagnosis.findings import diagnose
from ampscope.observations import LINE_ROLE, Digests, HalfSite
from tests.helpers.evidence_making import (
    FALLING,
    FLAT,
    OVERFLOWED,
    WITHOUT_SCALER,
    causes,
    evidence,
    fp32_run,
    run,
    steps,
)
from tests.helpers.evidence_of_ops import ACTIVATION
from tests.helpers.evidence_of_runs import TABLE, rounded_table

IDS = replace(TABLE, line="train.py:3", whole=True, distinct=4000, merged=2000, role="labels")
FLUSHED = replace(TABLE, line="train.py:5", zeroed=1024)


def digests(*results: tuple[str, str, tuple[float, ...]]) -> Digests:
    """Of ops: line, op, numbers. A sketch of few numbers may as well be the numbers."""
    texts = [base64.b64encode(struct.pack(f"<{len(v)}d", *v)).decode() for _, _, v in results]
    norms = tuple(sum(x * x for x in v) ** 0.5 for _, _, v in results)
    lines, ops, zeros = (
        tuple(r[0] for r in results), tuple(r[1] for r in results), (0,) * len(results)
    )  # fmt: skip
    return Digests(
        0, LINE_ROLE, 1.0, ops, ("fp32",) * len(results), zeros, ("",) * len(results), norms,
        norms, zeros, tuple(texts), (), lines,
    )  # fmt: skip


def test_sites_that_lose_what_they_were_given_come_first() -> None:
    autocast = HalfSite("autocast", "train.py:20", "addmm", "fp16", "activations", elements=100)
    seen = run(steps(FLAT, **WITHOUT_SCALER), autocast, FLUSHED, IDS)
    assert candidates(seen) == ["train.py:3", "train.py:5", "train.py:20"]
    assert (lost(IDS), lost(FLUSHED), lost(autocast)) == (4000 / 4096, 0.25, 0.0)


def test_where_only_what_is_reported_differs_the_evaluation_is_looked_at_first() -> None:
    trains = HalfSite("autocast", "train.py:20", "addmm", "fp16", "activations", elements=100)
    counts = HalfSite("made", "train.py:76", "torch.zeros", "fp16", step=400)
    seen = run(steps(FLAT, **WITHOUT_SCALER), trains, counts, FLUSHED)
    assert candidates(seen) == ["train.py:5", "train.py:20", "train.py:76"]
    assert candidates(seen, only_results=True) == ["train.py:76", "train.py:5", "train.py:20"]


@pytest.mark.parametrize(
    ("dtype", "centre", "spread", "is_few"),
    [
        ("float16", 1013.0, 0.25, True), ("bfloat16", 290.0, 0.7, True),
        ("float16", 0.0, 1.0, False), ("bfloat16", 0.0, 1.0, False), ("bfloat16", 1.0, 0.5, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("count", [300, 4096, 65_536])
def test_different_numbers_that_become_few_are_lost(
    dtype: str, centre: float, spread: float, *, is_few: bool, count: int
) -> None:
    made = torch.Generator().manual_seed(0)
    before = (centre + spread * torch.randn(count, generator=made)).unique()
    after = before.to(getattr(torch, dtype)).unique()
    site = HalfSite(
        "cast", "train.py:4", "Tensor.half", "fp16", elements=count,
        distinct=len(before), merged=len(before) - len(after),
    )  # fmt: skip
    assert (lost(site) > PARTED) == is_few


def test_parameters_and_moments_are_lifted_as_a_whole() -> None:
    weights = HalfSite("module", "train.py:9", "Module.half", "bf16", "weights")
    moments = HalfSite("state", "", "exp_avg_sq", "bf16", "moments", elements=10, zeroed=9)
    seen = run(steps(FLAT, **WITHOUT_SCALER), weights, moments)
    assert candidates(seen) == ["fp32_state", "train.py:9", "fp32_params"]
    assert lift(["fp32_state", "train.py:9"]) == "fp32_state;fp32_lines:train.py:9"
    assert lifted(lift(candidates(seen))) == ("fp32_state", "fp32_params", "train.py:9")


@pytest.mark.parametrize("control", ["as_is", "bf16", "fp32", "lr:0.1;fp32_lines:a.py:1", ""])
def test_a_control_that_changes_more_lifts_nothing(control: str) -> None:
    assert lifted(control) == ()


def test_lines_part_where_a_difference_is_more_than_rounding() -> None:
    ours = digests(
        ("a.py:1", "elu", (1.001, 1.0)), ("a.py:2", "add", (0.0, 0.0)), ("a.py:3", "mul", (0.0, 9)),
        ("a.py:2", "add", (3.0, 4.0)),
    )  # fmt: skip
    theirs = digests(
        ("a.py:1", "elu", (1.0, 1.0)), ("a.py:2", "add", (1e-4, 2e-4)), ("a.py:3", "mul", (2.0, 9)),
        ("a.py:4", "sub", (5.0, 5.0)),
    )  # fmt: skip
    casts = [HalfSite("autocast", f"a.py:{n}", "add", "bf16") for n in (9, 3)]
    half, full = run(steps(), ours, *casts), fp32_run(None, theirs)
    assert parted(half, full) == ["a.py:2", "a.py:3"]
    assert candidates(half, full) == ["a.py:3", "a.py:9"]  # line 2 makes no half


def test_the_smallest_lift_that_heals_is_the_evidence() -> None:
    wide = Control.of("fp32_params", fp32_lines=("train.py:7", "train.py:9"))
    made = rounded_table()
    made.runs[wide] = run(steps(**WITHOUT_SCALER), control=wide)
    bad = "fp32_lines:train.py:9"
    made.runs[bad] = run(steps(FLAT, **WITHOUT_SCALER), control=bad)
    assert smallest_lift(made) == "fp32_lines:train.py:7"


def test_nothing_is_lifted_where_fp32_fails_as_well() -> None:
    made = rounded_table()
    made.runs["fp32"] = fp32_run(steps([float("nan")] * 30))
    assert smallest_lift(made) is None


def test_a_cause_whose_evidence_fits_the_site_takes_its_place() -> None:
    """And one at another line stands behind the site that heals."""
    op = replace(ACTIVATION, module="", line="train.py:7")
    for line, first in (("train.py:7", "activation_overflow"), ("train.py:30", "harmful_rounding")):
        baseline = run(steps(FLAT, **OVERFLOWED), replace(op, line=line), TABLE)
        control = "fp32_lines:train.py:7"
        healed = {control: run(steps(), control=control)}
        assert causes(diagnose(evidence(baseline, **healed)))[0] == first


def test_modules_that_a_search_found_belong_to_the_finding_that_searched() -> None:
    """The set may leave out the module that the finding names, and is no cause of its own."""
    control = Control.of(fp32_modules=("a", "b"))
    baseline = run(steps(FLAT, **OVERFLOWED), replace(ACTIVATION, module="c", line="train.py:30"))
    made = evidence(baseline, **{control: run(steps(), control=control)})
    assert causes(diagnose(made)) == ["activation_overflow"]


def test_an_end_that_may_be_about_dtypes_proves_no_site() -> None:
    control = "fp32_lines:train.py:7"
    left = run(steps(FALLING[:6]), TABLE, ended="exit", exit_code=4)
    healed = {control: run(steps(), control=control)}
    assert smallest_lift(evidence(left, **healed)) is None
