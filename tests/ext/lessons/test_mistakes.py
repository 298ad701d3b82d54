"""Lesson 13: what a real diagnosis says of each mistake, and of fixed scripts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.ext.lessons.mistakes import BY_ID, MISTAKES, STEPS, script_path
from ampscope.launcher.plan import run_diagnosis
from ampscope.records import Machine, RunSpec, State
from ampscope.store.writer import RunWriter
from ampscope.zoo.answers import ANSWERS
from ampscope.zoo.answers import script_path as zoo_script
from app import zoo
from app.ext.lessons import lesson_diagnosis
from app.runs import diagnoses
from tests.helpers import stores

FOUND = {  # written down by hand: what each script has
    "cast_by_hand": ["fp16_params_with_scaler"],
    "no_scaler": ["gradient_underflow"],
    "clip_before_unscale": ["clip_before_unscale"],
    "unscale_each_micro_batch": ["scaler_protocol_error"],
    "scaler_state_not_saved": ["scaler_state_lost"],
    "amp_in_evaluation": ["half_accumulation_stagnation"],
    "bce_loss": ["unsafe_op_under_autocast"],
    "half_lenet": ["optimizer_state_range"],  # lesson 6
    "scaler_for_bf16": [],  # harmless: the scaler only multiplies and divides
}


def diagnosed(store: Path, mistake: str, *, is_fixed: bool = False) -> list[str]:
    path = script_path(mistake, is_fixed=is_fixed)
    spec = RunSpec(
        workload=str(path), kind="script", steps=STEPS, policy=BY_ID[mistake].policy,
        time_limit_s=240.0, precision="as_is", group=f"lesson-{path.stem}",
    )  # fmt: skip
    report = run_diagnosis(spec, store, verify=False)
    assert not report.could_not_run, report.could_not_run
    return [finding.cause for finding in report.diagnosis.findings]


@pytest.mark.parametrize("mistake", FOUND)
def test_a_diagnosis_finds_the_mistake(tmp_path: Path, mistake: str) -> None:
    assert diagnosed(tmp_path / "runs.db", mistake) == FOUND[mistake]


@pytest.mark.parametrize("mistake", ["cast_by_hand", "scaler_state_not_saved", "bce_loss"])
def test_a_fixed_script_has_none(tmp_path: Path, mistake: str) -> None:
    assert diagnosed(tmp_path / "runs.db", mistake, is_fixed=True) == []


def test_every_mistake_has_its_two_scripts_and_its_code() -> None:
    from app.ext.lessons.mistakes import changes
    from tests.helpers.lessons_of_pages import examples

    assert len(MISTAKES) == 8
    for mistake in MISTAKES:
        assert changes(mistake).count("\n") > 2
        assert set(examples()[mistake.id]) == {"PyTorch", "Paddle", "Keras"}


def plain(text: str) -> str:
    return text.replace("\\", "").replace("\u2060", "")


def test_the_page_offers_a_diagnosis_after_a_prediction(
    open_page: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Path, str, int]] = []
    monkeypatch.setattr(diagnoses, "start_diagnosis", lambda *a: started.append(a))
    app = open_page("learn_13_mistakes", mistake13="bce_loss")
    assert not app.exception
    assert not any(b.key == "dx-bce_loss" for b in app.button)
    app.radio(key="widget:guess13bce_loss").set_value("a").run()
    app.button(key="dx-bce_loss").click().run()
    assert started == [(script_path("bce_loss"), "cuda", STEPS)]


def test_the_page_shows_what_the_diagnosis_says(
    open_page: Callable[..., AppTest], store_path: Path
) -> None:
    diagnosed(store_path, "scaler_state_not_saved")
    app = open_page(
        "learn_13_mistakes", mistake13="scaler_state_not_saved",
        guess13scaler_state_not_saved="b",
    )  # fmt: skip
    app.run()
    if any("Diagnosing on this machine." in plain(i.value) for i in app.info):
        import time

        time.sleep(6)  # a page takes a case for moving until 5 s after its last run
        app.run()
    assert not app.exception
    assert "As you predicted." in plain(app.success[0].value)
    assert "Root cause" in plain(app.success[0].value)
    assert app.get("plotly_chart")


def test_a_diagnosis_that_a_file_brought_is_not_this_machines(
    open_page: Callable[..., AppTest], store_path: Path
) -> None:
    """It may say anything, under any script's name, and its texts are markup if they are let be."""
    evil = "](x) ![p](https://evil.example/x.png) www.evil.example a@evil.example"
    spec = RunSpec(
        workload=str(script_path("no_scaler")), kind="script", precision="as_is",
        group="imported-1", imported="strange.json",
    )  # fmt: skip
    machine = Machine("cpu", evil, evil)
    for control in ("as_is", "fp32"):
        writer = RunWriter.create(store_path, replace(spec, control=control))
        writer.start(machine)
        writer.finish(State.FINISHED, evil)
        writer.close()
    query = {"mistake13": "no_scaler", "guess13no_scaler": "a"}
    app = open_page("learn_13_mistakes", **query)
    assert not app.exception
    assert any(button.label == "Diagnose it" for button in app.button)
    assert "evil" not in str([*app.markdown, *app.caption, *app.info, *app.warning, *app.success])
    assert lesson_diagnosis.newest(str(script_path("no_scaler"))) is None
    stages = {row.faulty.stage for row in zoo.rows()}
    assert stages == {zoo.ScriptStage.NOT_YET}


def test_a_diagnosis_that_a_file_brought_of_a_zoo_script_is_not_this_machines(
    store_path: Path,
) -> None:
    answer = ANSWERS[0]
    spec = RunSpec(
        workload=str(zoo_script(answer.script)), kind="script", precision="as_is",
        control="as_is", group="imported-1", imported="strange.json",
    )  # fmt: skip
    stores.finished(store_path, spec)
    row = next(row for row in zoo.rows() if row.answer is answer)
    assert row.faulty.stage is zoo.ScriptStage.NOT_YET
