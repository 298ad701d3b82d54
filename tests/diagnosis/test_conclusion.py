"""What a diagnosis concluded is shown as it was told, until somebody asks for another judgement."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.diagnosis.load import judge_again, load_diagnosis, rules_version, stored
from ampscope.diagnosis.result import DiagnosisResult, partial_note
from ampscope.records import RunSpec, State
from ampscope.render.contract import document
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter, keep_conclusion
from tests.helpers import script_stores
from tests.helpers.script_diagnoses import diagnosed

OVERFLOW = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
for step in range(12):
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.float16):
        loss = (model(x * 3e4) * 1e2).float().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def loaded(path: Path, run_id: str, **how: bool) -> DiagnosisResult:
    with Reader(path) as reader:
        return load_diagnosis(reader, run_id, **how)


@pytest.mark.parametrize(
    "kind", ["overflow", "no_fault", "undetermined", "innocent", "raised", "lost"]
)
def test_it_comes_back_whole(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "r.db"
    head = getattr(script_stores, kind)(path)
    judged = loaded(path, head)
    keep_conclusion(path, head, stored(judged))
    back = loaded(path, head)
    assert back.rules == rules_version()
    assert dataclasses.replace(back, rules="") == judged
    assert document(back) == document(judged)


def test_the_terminal_and_the_store_tell_the_same(tmp_path: Path) -> None:
    """The page computed the fix anew and named another one than the terminal had."""
    script = tmp_path / "t.py"
    script.write_text(OVERFLOW)
    report = diagnosed(script, tmp_path / "r.db")
    back = loaded(tmp_path / "r.db", report.runs["as_is"].id)
    assert back.trials == report.trials
    assert document(back) == document(report)


def test_yesterdays_words_stay_until_it_is_judged_again(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    judged = loaded(path, head)
    root = judged.diagnosis.findings[0]
    verdict = dataclasses.replace(root.verdict, reason="What yesterday's rules said.")
    old = dataclasses.replace(
        judged,
        rules="0.0.1 (0123abcd)",
        diagnosis=dataclasses.replace(
            judged.diagnosis,
            findings=(dataclasses.replace(root, cause="elementwise_overflow", verdict=verdict),),
        ),
    )
    keep_conclusion(path, head, stored(old))
    shown = loaded(path, head)
    assert shown.rules == "0.0.1 (0123abcd)"
    assert shown.diagnosis.findings[0].verdict.reason == "What yesterday's rules said."
    done = CliRunner().invoke(main, ["diagnose", "--again", "--store", str(path), head])
    assert done.exit_code == 1
    assert "Before: " in done.stderr
    assert "Now: An activation overflowed" in done.stderr
    assert loaded(path, head).diagnosis == judged.diagnosis
    before, after = judge_again(path, head)
    assert before.diagnosis == after.diagnosis


@pytest.mark.parametrize(
    "data", ["", "{", "[]", "{}", '{"runs":3}', '{"rules":"x","runs":[["as_is"]]}', "\udcff"]
)
def test_a_damaged_conclusion_is_judged_anew(tmp_path: Path, data: str) -> None:
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    judged = loaded(path, head)
    keep_conclusion(path, head, data.encode("utf-8", "backslashreplace").decode())
    assert loaded(path, head) == judged


@pytest.mark.parametrize("field", ["findings", "status", "trials", "runs", "elapsed_s"])
def test_a_value_of_another_type_is_none(tmp_path: Path, field: str) -> None:
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    judged = loaded(path, head)
    text = stored(judged)
    assert f'"{field}":' in text
    keep_conclusion(path, head, text.replace(f'"{field}":', f'"{field}":null,"was":', 1))
    assert loaded(path, head) == judged


def test_a_run_that_was_added_is_judged_with_the_others(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    judged = loaded(path, head)
    keep_conclusion(path, head, stored(dataclasses.replace(judged, script="yesterday.py")))
    assert loaded(path, head).script == "yesterday.py"
    spec = dataclasses.replace(judged.runs["as_is"].spec, control="scale:1", parent=head)
    assert isinstance(spec, RunSpec)
    writer = RunWriter.create(path, spec)
    writer.finish(State.FINISHED)
    writer.close()
    assert loaded(path, head).script == judged.script


def test_a_run_that_was_stopped_leaves_the_verdict_so_far(tmp_path: Path) -> None:
    """It says nothing of its fix, nor where the evidence is judged anew."""
    path = tmp_path / "r.db"
    head = script_stores.overflow(path, fixed=False)
    judged = loaded(path, head)
    keep_conclusion(path, head, stored(dataclasses.replace(judged, notes=(partial_note((0, 3)),))))
    control = f"fp32_modules:{judged.diagnosis.findings[0].verdict.module}"
    spec = dataclasses.replace(judged.runs["as_is"].spec, control=control, parent=head)
    writer = RunWriter.create(path, spec)
    assert loaded(path, head).so_far == partial_note((0, 3))  # while it runs
    writer.finish(State.CANCELLED)
    writer.close()
    assert loaded(path, head).so_far == partial_note((0, 3))
    assert control not in [trial.control for trial in loaded(path, head, again=True).trials]


def test_it_holds_no_more_than_the_json_names(tmp_path: Path) -> None:
    """The script's output, which may hold anything, is not kept with it."""
    path = tmp_path / "r.db"
    head = script_stores.overflow(path)
    text = stored(dataclasses.replace(loaded(path, head), output="a secret of the script's"))
    assert "secret" not in text
    assert json.loads(text)["rules"] == rules_version()
