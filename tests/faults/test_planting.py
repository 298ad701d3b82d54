"""The generator of planted faults: its edits, its keys, and what plain runs prove."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.faults import planting
from benchmarks.faults.draw import made, programs
from benchmarks.faults.planting import FAULTS, LOOKALIKES, Roles
from benchmarks.faults.score import confusion_svg, summary, wilson

ROOT = Path(__file__).resolve().parents[2]
planting.load()
KINDS = {**FAULTS, **LOOKALIKES}
TEXTS = programs()


def prove(place: Path, kinds: list[str], names: list[str]) -> list[dict[str, object]]:
    """Rows of ``draw`` over these transformations and programs, in a process of its own."""
    out = place / "rows.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.faults.draw", "--cache", str(place / "runs.db"),
        "--out", str(out), "--kinds", *kinds, "--programs", *names,
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_edits_leave_the_rest_and_tell_their_lines() -> None:
    script = Roles("import x\n\ndef f(a):\n    b = a  # kept\n    return b\n")
    assign = next(script.all(ast.Assign))
    text, lines = script.apply(
        [script.after(assign, "c = 1\nd = 2"), script.replace(assign.value, "a + 1", blamed=False)]
    )
    assert text.splitlines()[3:6] == ["    b = a + 1  # kept", "    c = 1", "    d = 2"]
    assert lines == (5, 6)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_transformation_finds_places(name: str) -> None:
    """In some program, with a script that parses and lines that lie in it."""
    kind = KINDS[name]
    tried = (
        made(kind, program, text, seed) for seed in range(2) for program, text in TEXTS.items()
    )
    pairs = list(islice(filter(None, tried), 2))
    assert pairs
    for pair in pairs:
        ast.parse(pair.planted.repaired)
        length = len(pair.planted.faulty.splitlines())
        assert all(1 <= line <= length for line in pair.planted.lines)


def test_a_few_pairs_are_proven(tmp_path: Path) -> None:
    kinds = ["unscaled_twice", "model_in_half", "loss_not_scaled", "as_written"]
    rows = prove(tmp_path, kinds, ["set_pooling"])
    assert [row["why_not"] for row in rows] == [""] * len(kinds)
    damages = {row["kind"]: row["damage"] for row in rows}
    assert damages["model_in_half"]["error"]  # type: ignore[index]
    assert not damages["as_written"]["error"]  # type: ignore[index]


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(KINDS))
def test_keys_and_damage_of_every_transformation(name: str, tmp_path: Path) -> None:
    """Plain runs prove it on up to three programs, of those that have a place for it."""
    kind = KINDS[name]
    having = [p for p, text in TEXTS.items() if made(kind, p, text, 0, formed=False)]
    proven = 0
    for program in having:
        proven += sum(not row["why_not"] for row in prove(tmp_path, [name], [program]))
        (tmp_path / "rows.jsonl").unlink()
        if proven == 3:
            break
    assert proven


def test_wilson_interval() -> None:
    """Against the published example of 81 of 263 (Newcombe 1998, method 3)."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def row(cause: str, found: str) -> dict[str, object]:
    right = cause == found
    return {
        "cause": cause, "program": "p", "form": "", "policy": "native", "found": [found],
        "right": right, "among_three": right, "wrong_cause": not right and found != "no_fault",
        "undetermined": False, "no_fault": found == "no_fault", "module_right": None,
        "line_right": True, "verified": None, "harmed": True, "elapsed_s": 1.0,
    }  # fmt: skip


def test_summary_and_confusion_matrix() -> None:
    rows = [row("a", "a"), row("a", "b"), row("no_fault", "no_fault"), row("b", "no_fault")]
    result = summary(rows)
    assert result["cause first"].endswith("1 of 3")
    assert result["false alarms"].endswith("0 of 1")
    assert result["confusion"]["a"] == {"a": 1, "b": 1}
    assert "<svg" in confusion_svg(result["confusion"])
