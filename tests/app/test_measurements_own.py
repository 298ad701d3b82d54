"""A measurement that a file brought stands behind this machine's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampscope.records import RunSpec
from app.runs import measurements
from tests.helpers import stores

BENCH = RunSpec(workload="", kind="bench")


def test_the_newest_of_this_machine_comes_before_what_was_imported(store_path: Path) -> None:
    own = stores.finished(store_path, replace(BENCH, steps=1))
    foreign = stores.finished(store_path, replace(BENCH, steps=1, imported="strange.json"))
    assert [run.id for run in measurements.of_kind("bench")] == [own, foreign]
