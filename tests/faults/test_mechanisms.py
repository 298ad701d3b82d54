"""Mechanisms of the generator: their sites, their healthy twins, what harm is, and their score."""

from __future__ import annotations

import ast
import json
import math
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import draw, planting
from benchmarks.faults.counts import counts
from benchmarks.faults.draw import PROVEN, Proof, made, programs
from benchmarks.faults.planting import MECHANISMS, TWINS
from benchmarks.faults.score import Part, pairs_of, row_of
from benchmarks.faults.truth import Damage, Run, damage, results

ROOT = Path(__file__).resolve().parents[2]
planting.load()
TEXTS = programs(quantities=True)
HALF = re.compile(r"float16|\.half\(\)|\+=")  # += of an accumulator that is half
HARM = Damage(False, False, 0.5, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("site", sorted({k.mechanism.site for k in MECHANISMS.values()}))  # type: ignore[union-attr]
@pytest.mark.parametrize("kinds", [MECHANISMS, TWINS], ids=["harmful", "twins"])
def test_every_mechanism_has_a_place_and_its_key_is_the_line_of_the_site(
    kinds: dict[str, planting.Kind], site: str
) -> None:
    for name, kind in kinds.items():
        if kind.mechanism is None or kind.mechanism.site != site:
            continue
        tried = (made(kind, program, TEXTS[program], 3, formed=False) for program in TEXTS)
        pairs = list(islice(filter(None, tried), 2))
        assert pairs, name
        for pair in pairs:
            ast.parse(pair.planted.repaired)
            lines = pair.planted.faulty.splitlines()
            blamed = [lines[n - 1] for n in pair.planted.lines]
            assert any(HALF.search(line) for line in blamed), (name, blamed)


def test_every_mechanism_has_a_twin_at_the_same_kind_of_site() -> None:
    assert {f"{name}_twin" for name in MECHANISMS} == set(TWINS)
    for name, kind in MECHANISMS.items():
        assert TWINS[f"{name}_twin"].mechanism == kind.mechanism
        assert TWINS[f"{name}_twin"].cause == "no_fault"
        assert kind.cause == "harmful_rounding"


def test_many_mechanisms_have_no_rule_of_their_own() -> None:
    without = [k.mechanism for k in MECHANISMS.values() if k.mechanism and not k.mechanism.has_rule]
    assert len(without) >= 60
    assert len({m.site for m in without}) >= 8
    assert len({m.role for m in without}) >= 10
    assert {m.place for m in without} >= {
        "preparation", "loader", "backward", "optimizer", "evaluation", "resume",
    }  # fmt: skip


def test_other_faults_are_drawn_from_the_programs_that_they_had() -> None:
    """Their sequences stay the same, so that a set can be scored again."""
    assert len(TEXTS) >= len(programs()) + 9
    assert {"shop_retrieval", "tide_gauge"} <= set(TEXTS) - set(programs())
    drawing = draw.drawing("tuning", planting.FAULTS, 0)
    assert {pair.program for pair in islice(drawing, 20)} <= set(programs())


def test_the_list_of_what_is_proven_names_what_there_is() -> None:
    listed = json.loads(PROVEN.read_text())
    assert set(listed) <= {*MECHANISMS, *TWINS}
    assert {p for found in listed.values() for p in found} <= set(TEXTS)
    ruled = {name: k.mechanism.has_rule for name, k in MECHANISMS.items() if k.mechanism}
    assert sum(not ruled.get(name, True) for name in listed) >= 60


def test_printed_results_are_read_with_their_direction() -> None:
    output = "epoch 1 accuracy 0.2\nheld-out accuracy: 0.91, test rmse 0.5 hPa\nloss 3\nmae=1e-3"
    assert results(output) == {
        ("accuracy", True): 0.2,
        ("held-out accuracy", True): 0.91,
        ("test rmse", False): 0.5,
        ("mae", False): 1e-3,
    }
    assert results("accuracy 0.2\nIndexError: 3\naccuracy 0.3") == {("accuracy", True): 0.3}


@pytest.mark.parametrize(
    ("reference", "run", "lost"),
    [
        ("accuracy 0.8", "accuracy 0.4", 0.5),
        ("accuracy 0.8", "accuracy 0.9", 0.0),
        ("rmse 0.2", "rmse 0.8", 0.75),
        ("rmse 0.8", "rmse 0.2", 0.0),
        ("rmse 0.2", "rmse nan", 1.0),
        ("rmse 0.2", "", 1.0),
        ("accuracy 0.8 rmse 0.2", "accuracy 0.8 rmse 0.4", 0.5),
    ],
)
def test_a_result_that_is_worse_is_damage_by_the_share_that_is_lost(
    reference: str, run: str, lost: float
) -> None:
    good, bad = Run(output=reference), Run(output=run)
    seen = damage(bad, good, good)
    assert seen.worse_results == pytest.approx(lost)
    assert ("results" in seen.kinds) is (lost >= 0.25)
    assert seen.is_harmed is (lost >= 0.25)
    assert math.isclose(damage(good, good, good).worse_results, 0.0)


def _verdict(cause: str, line: int, verified: bool | None = None) -> dict[str, Any]:
    fix = {"kind": "fp32", "verified": verified}
    finding = {"cause": cause, "line": f"folder/train.py:{line}", "fix": fix}
    return {"verdict": "fault", "findings": [finding], "latent": [], "elapsed_s": 2.0}


@pytest.mark.parametrize(
    ("cause", "at_site", "right", "site_right"),
    [
        ("harmful_rounding", True, True, True),
        ("harmful_rounding", False, False, False),  # the rounding of another line
        ("optimizer_state_range", True, True, True),
        ("optimizer_state_range", False, True, False),  # the cause alone
        ("gradient_underflow", True, False, False),
    ],
)
def test_a_verdict_is_right_by_its_site_or_by_its_cause(
    cause: str, at_site: bool, right: bool, site_right: bool
) -> None:
    kind = MECHANISMS["moments_saved_in_half"]
    name = "resumed_regression"
    pair = made(kind, name, TEXTS[name], 0, formed=False)
    assert pair is not None
    line = pair.planted.lines[-1] if at_site else 1
    row = row_of(pair, Proof("", HARM, {}), _verdict(cause, line, verified=True), "native")
    assert (row["right"], row["site_right"]) == (right, site_right)
    assert row["wrong_cause"] is not right
    assert row["healed"] is (True if site_right else None)
    assert (row["site"], row["role"], row["place"]) == ("file", "moments", "resume")


def test_a_table_built_in_half_is_right_at_its_line_alone() -> None:
    pair = made(MECHANISMS["stamps_cast"], "tide_gauge", TEXTS["tide_gauge"], 0, formed=False)
    assert pair is not None
    for line, right in ((pair.planted.lines[0], True), (1, False)):
        found = _verdict("low_precision_constants", line)
        assert row_of(pair, Proof("", HARM, {}), found, "native")["right"] is right


def test_mechanisms_without_a_rule_are_counted_apart() -> None:
    rows = []
    for name, program, cause in (
        ("row_ids_cast", "feed_ranker", "harmful_rounding"),
        ("map_coordinates_file", "lidar_tiles", "no_fault"),
        ("hits_counted_in_half", "feed_ranker", "half_accumulation_stagnation"),
    ):
        pair = made(MECHANISMS[name], program, TEXTS[program], 1, formed=False)
        assert pair is not None
        found = _verdict(cause, pair.planted.lines[0], verified=False)
        if cause == "no_fault":
            found = {"verdict": "no_fault", "findings": [], "elapsed_s": 1.0}
        rows.append(row_of(pair, Proof("", HARM, {}), found, "native"))
    found = counts(rows)
    assert found["shares"]["cause or site first"] == [2, 3]
    assert found["shares"]["cause or site first, without a rule"] == [0, 1]
    assert found["shares"]["lifted site heals"] == [0, 2]
    assert found["shares"]["no fault over damage"] == [1, 3]
    assert found["by role"] == {"ids": [1, 1], "metric": [1, 1], "coordinates": [0, 1]}


def test_a_drawing_of_mechanisms_has_these_and_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "prove", lambda _, pairs: [Proof("", HARM, {}) for _ in pairs])
    part = Part("tuning", 12, 6, mechanisms=True)
    found = [d.pair.planted for d in pairs_of(part, None)]  # type: ignore[arg-type]
    assert sum(p.kind in MECHANISMS for p in found) == 12
    assert sum(p.kind in TWINS for p in found) == 6
    assert all(p.mechanism is not None for p in found)


@pytest.mark.slow
def test_plain_runs_prove_mechanisms_and_their_twins(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    names = ["batch_ids_array", "hits_counted_in_half", "gradients_rounded_in_a_hook"]
    kinds = [*names, *(f"{name}_twin" for name in names)]
    command = [
        sys.executable, "-m", "benchmarks.faults.draw", "--mechanisms", "--kinds", *kinds,
        "--programs", "feed_ranker", "--cache", str(tmp_path / "runs.db"), "--out", str(out),
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = {r["kind"]: r for r in map(json.loads, out.read_text().splitlines())}
    assert {name: row["why_not"] for name, row in rows.items()} == dict.fromkeys(kinds, "")
    assert rows["hits_counted_in_half"]["damage"]["worse_results"] > 0.25
    assert rows["hits_counted_in_half_twin"]["damage"]["worse_results"] < 0.05
