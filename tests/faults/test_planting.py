"""The generator of planted faults: its edits, its keys, and what plain runs prove."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from torch import nn

from benchmarks.faults import planting
from benchmarks.faults.counts import confusion_svg, counts, shown, summary, wilson
from benchmarks.faults.draw import Proof, made, programs
from benchmarks.faults.planting import FAULTS, LOOKALIKES, Roles
from benchmarks.faults.score import row_of
from benchmarks.faults.truth import Damage, _Recorder

ROOT = Path(__file__).resolve().parents[2]
planting.load()
KINDS = {**FAULTS, **LOOKALIKES}
TEXTS = programs()


# Transformations that plain runs prove on fewer than three programs, with the reason.
FEWER = {
    "unscaled_within_the_window": (2, "two programs accumulate gradients"),
    "divided_by_hand_within_the_window": (2, "two programs accumulate gradients"),
    "first_loss_drags_the_scale": (1, "one program has two losses with a scaler each to share"),
    "second_loss_drags_the_scale": (1, "one program has two losses with a scaler each to share"),
    "division_of_slopes_left_out": (1, "one program divides the gradients of a penalty"),
    "logarithm_of_a_sigmoid": (1, "three programs use this loss; the logits of two stay small"),
    "count_not_guarded": (1, "elsewhere every batch has something to count"),
}


def prove(place: Path, *options: str) -> list[dict[str, object]]:
    """Rows of ``draw`` with these options, in a process of its own."""
    out = place / "rows.jsonl"
    command = [
        sys.executable, "-m", "benchmarks.faults.draw", "--cache", str(place / "runs.db"),
        "--out", str(out), *options,
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
    rows = prove(tmp_path, "--kinds", *kinds, "--programs", "set_pooling")
    assert [row["why_not"] for row in rows] == [""] * len(kinds)
    damages = {row["kind"]: row["damage"] for row in rows}
    assert damages["model_in_half"]["error"]  # type: ignore[index]
    assert not damages["as_written"]["error"]  # type: ignore[index]


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(KINDS))
def test_keys_and_damage_of_every_transformation(name: str, tmp_path: Path) -> None:
    """Plain runs prove it on three programs, in the program's own form or in another."""
    wanted, _ = FEWER.get(name, (3, ""))
    rows = prove(tmp_path, "--kinds", name, "--seeds", "3", "--enough", "3")
    assert len({row["program"] for row in rows if not row["why_not"]}) >= wanted


def test_only_transformations_that_exist_are_excused() -> None:
    assert set(FEWER) <= set(KINDS)
    assert all(0 < wanted < 3 and reason for wanted, reason in FEWER.values())


def test_there_are_enough_look_alikes_and_programs() -> None:
    assert len(LOOKALIKES) >= 60
    assert len(FAULTS) >= 90
    texts = "".join(text for files in TEXTS.values() for text in files.values())
    assert all(f"import {name}" in texts for name in ("lightning", "torch"))
    assert all(f"from {name} import" in texts for name in ("transformers", "accelerate"))


def test_a_fault_lies_in_one_of_several_files() -> None:
    files = TEXTS["tagger_project"]
    mask = made(FAULTS["fill_with_a_constant_too_large"], "tagger_project", files, 1, formed=False)
    clip = made(FAULTS["unscale_left_out"], "tagger_project", files, 1, formed=False)
    assert mask is not None
    assert clip is not None
    assert (mask.file, clip.file) == ("model.py", "engine.py")
    source = mask.source(mask.planted.faulty)
    assert {n for n in files if source[n] != files[n]} == {"model.py"}
    assert "masked_fill" in source["model.py"].splitlines()[mask.planted.lines[0] - 1]


def test_a_module_is_named_from_what_is_called_and_from_what_holds_it() -> None:
    """A LightningModule is never called itself; its model is."""

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(2, 2))

    holder, bystander = Holder(), nn.Sequential(nn.Conv1d(1, 1, 1))
    recorder = _Recorder()
    recorder._entering(holder.model, ())
    found = recorder.result().modules
    assert found["Linear"] == ["0", "model.0"]
    assert found["Sequential"] == ["", "model"]
    assert "Conv1d" not in found
    del bystander


def test_an_epsilon_vanishes_in_fp16_alone() -> None:
    kind = FAULTS["eps_beside_a_deviation"]
    fp16, bf16 = TEXTS["siamese_triplets"], TEXTS["lit_spectra"]
    assert made(kind, "siamese_triplets", fp16, 0, formed=False) is not None
    assert made(kind, "lit_spectra", bf16, 0, formed=False) is None
    assert Roles(bf16["train.py"]).is_bf16
    assert not Roles(fp16["train.py"]).is_bf16


@pytest.mark.slow
def test_several_files_are_run_together(tmp_path: Path) -> None:
    options = ("--kinds", "as_written", "unscale_left_out", "--programs", "tagger_project")
    rows = prove(tmp_path, *options)
    assert [row["why_not"] for row in rows] == ["", ""]


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


@pytest.mark.parametrize(
    ("harmed", "findings", "latent", "right", "shown_as"),
    [
        (False, [], ["gradient_underflow"], True, "gradient_underflow"),
        (False, [], ["small_update_lost"], False, "no_fault"),
        (True, [], ["gradient_underflow"], False, "no_fault"),
        (True, ["gradient_underflow"], [], True, "gradient_underflow"),
        (False, ["small_update_lost"], ["gradient_underflow"], False, "small_update_lost"),
    ],
)
def test_a_latent_cause_is_right_where_nothing_is_harmed(
    harmed: bool, findings: list[str], latent: list[str], right: bool, shown_as: str
) -> None:
    pair = made(FAULTS["no_scaler_at_all"], "click_model", TEXTS["click_model"], 0, formed=False)
    assert pair is not None
    seen = Damage(False, False, 0.5 if harmed else 0.0, 0, 0, 0.9, 0, 0)
    line = f"folder/train.py:{pair.planted.lines[0]}"
    found = {
        "verdict": "fault" if findings else "no_fault",
        "findings": [{"cause": c, "line": line} for c in findings],
        "latent": [{"cause": c, "line": line} for c in latent],
        "elapsed_s": 1.0,
    }
    result = row_of(pair, Proof("", seen, {}), found, "native")
    assert (result["right"], shown(result)) == (right, shown_as)
    assert result["line_right"] is (True if right else None)
    assert result["no_fault"] is (shown_as == "no_fault")
    assert result["wrong_cause"] is (shown_as == "small_update_lost")


def test_summary_and_confusion_matrix() -> None:
    rows = [row("a", "a"), row("a", "b"), row("no_fault", "no_fault"), row("b", "no_fault")]
    result = summary(counts(rows))
    assert result["cause first"].endswith("1 of 3")
    assert result["false alarms"].endswith("0 of 1")
    assert result["confusion"]["a"] == {"a": 1, "b": 1}
    assert "<svg" in confusion_svg(result["confusion"])
