"""What a report is made of: what is missing, and what making it costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ampscope.records import (
    Machine,
    Rate,
    Result,
    RunInfo,
    ShadowRecord,
    State,
)
from ampscope.store.reader import Reader
from ampscope.store.series import last_shadow_step
from ampscope.story import measurement, shared
from ampscope.story.build import document
from ampscope.story.document import Part, Table
from ampscope.story.run_words import file_name, rules, rules_in_full, why_no_histograms
from ampscope.story.shared import base
from tests.helpers import core_results, made_comparisons, made_rates, stores


def part_of(store: Path, run: str) -> Part:
    with Reader(store) as reader:
        return document(reader, [run]).parts[0]


def missing(part: Part) -> dict[str, str]:
    (section,) = [s for s in part.sections if s.title == "What is missing"]
    tables = [block for block in section.blocks if isinstance(block, Table)]
    return {row[0]: row[1] for table in tables for row in table.rows}


def test_a_bench_and_a_step_say_what_they_lack(tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    rates: list[Result] = [
        made_rates.made("fp32", 1e12),
        made_rates.made("fp16", None, note="This device has no fp16 matmul."),
    ]
    run = made_comparisons.stored(store, "bench", rates)
    assert missing(part_of(store, run))["1 rate"] == "This device has no fp16 matmul."
    matmul = core_results.linear(64, 64, 64, 1e-3, None)
    run = core_results.stored(store, [matmul], state=State.RUNNING)
    found = missing(part_of(store, run))
    assert found["fp32 beside 1 matmul"] == "It could not be run in fp32."
    assert "A GPU" not in found


def test_nothing_is_loaded_of_shadows_but_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of 1,000 modules has 2,000 records per step; all of them were loaded, twice."""
    store = tmp_path / "a.db"
    run = stores.finished(store)
    with Reader(store) as reader:
        every = reader.shadows(run)
        assert last_shadow_step(reader, run) == max(s.step for s in every)
        assert last_shadow_step(reader, "none") is None
    asked: list[int | None] = []
    original = Reader.shadows

    def shadows(self: Reader, run_id: str, *args: object, **named: object) -> list[ShadowRecord]:
        asked.append(named.get("step"))  # type: ignore[arg-type]  # a step
        return original(self, run_id, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Reader, "shadows", shadows)
    part = part_of(store, run)
    assert any(s.title == "Against the fp32 shadow" for s in part.sections)
    assert asked == [max(s.step for s in every)]


def test_modules_are_ranked_once_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stores.finished(tmp_path / "a.db")
    calls: list[int] = []
    original = shared.trouble

    def trouble(counts: np.ndarray) -> np.ndarray:
        calls.append(len(counts))
        return original(counts)

    monkeypatch.setattr(shared, "trouble", trouble)
    part_of(tmp_path / "a.db", run)
    assert len(calls) == len(shared.ROLES)
    assert all(count > 1 for count in calls)


def test_whose_rules_by_framework(tmp_path: Path) -> None:
    run = stores.queued(tmp_path / "a.db")
    with Reader(tmp_path / "a.db") as reader:
        info = reader.run(run)
    assert rules(info) == rules_in_full(info) == "not started"

    def ran(policy: str, framework: str, **spec: str) -> RunInfo:
        machine = Machine("cpu", "Test CPU", policy, framework=framework)
        return replace(info, machine=machine, spec=replace(info.spec, **spec))  # type: ignore[arg-type]  # fields by name

    assert rules(ran("rehearsal", "torch")) == "CUDA's rules, rehearsed on a CPU"
    script = ran("rehearsal", "torch", kind="script")
    assert rules(script) == "CUDA (A100) rehearsed on a CPU"
    assert rules_in_full(script).startswith("CUDA (A100) rehearsed on a CPU, by CUDA's autocast")
    t4 = ran("rehearsal", "torch", kind="script", rehearsed="t4")
    assert rules(t4) == "CUDA (T4) rehearsed on a CPU"
    untrusted = ran("rehearsal", "torch", kind="script", rehearsed="[x](y)")
    assert rules(untrusted) == "CUDA's rules, rehearsed on a CPU"
    # Paddle's lists are its own, and its half precision on a CPU is emulated: not CUDA's rules.
    assert rules(ran("rehearsal", "paddle")).startswith("Paddle's rules")
    assert "Tensor Core" not in rules_in_full(ran("rehearsal", "paddle"))
    assert "autocast" not in rules_in_full(ran("native", "keras"))
    assert rules(ran("an untrusted file's", "torch")) == "an untrusted file's"


def test_names_and_reasons_of_runs(tmp_path: Path) -> None:
    assert file_name("/home/me/train.py:build") == "train.py:build"
    assert file_name("gpt") == "gpt"
    run = stores.queued(tmp_path / "a.db")
    with Reader(tmp_path / "a.db") as reader:
        info = reader.run(run)
    for kind, said in (("probe", "--histogram-every"), ("watch", "every=10"), ("script", "half")):
        assert said in why_no_histograms(replace(info, spec=replace(info.spec, kind=kind)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [((1.0, 99.0), 0), ((1.0, 100.0), 10), ((0.0, 1e9), 0), ((-1.0, 1e9), 0), ((), 0)],
)
def test_an_axis_is_logarithmic_from_two_decades_on(
    values: tuple[float, ...], expected: int
) -> None:
    assert base(values) == expected


def test_what_an_extension_measured_is_told_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurement, "KINDS", {})
    run = made_comparisons.stored(tmp_path / "a.db", "batch", made_comparisons.searched())
    part = part_of(tmp_path / "a.db", run)
    assert part.title == "Measurement (batch)."
    (measured,) = [s for s in part.sections if s.title == "Measured"]
    assert any(isinstance(block, Table) for block in measured.blocks)


MEASUREMENTS: dict[str, Callable[[], list[Result]]] = {
    "compare": made_comparisons.compared,
    "batch": made_comparisons.searched,
    "bench": lambda: list[Result](made_rates.ceilings_of({"fp32": 1.0})),
    "lesson": list,
    "cores": list,
}


@pytest.mark.parametrize("kind", MEASUREMENTS)
def test_every_measurement_has_the_section(tmp_path: Path, kind: str) -> None:
    results = MEASUREMENTS[kind]()
    run = made_comparisons.stored(tmp_path / "a.db", kind, results)
    found = missing(part_of(tmp_path / "a.db", run))
    assert ("Every figure" in found) == (not results)
    assert not [r for r in results if isinstance(r, Rate) and r.timing is None]
