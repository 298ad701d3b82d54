"""The Diagnosis page in every state, against runs of a script whose story is known."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ampscope import number_words
from ampscope.control import Control
from ampscope.diagnosis.load import load_diagnosis, stored
from ampscope.diagnosis.result import partial_note
from ampscope.errors import BadInput
from ampscope.launcher import script_runs
from ampscope.launcher.script_runs import Job
from ampscope.records import RunInfo, RunSpec, State
from ampscope.rules.catalog import NAMES, all_rules
from ampscope.store.reader import Reader
from ampscope.store.writer import keep_conclusion
from ampscope.story.run_words import script_command
from app.diagnosis import documentation_sections, run_names, time_left
from app.runs import diagnoses, workload_choice
from tests.helpers import script_stores, stores
from tests.helpers.pages import links, texts

Open = Callable[..., Any]


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group whose last run ended a moment ago counts as moving; these ended long ago."""
    monkeypatch.setattr(diagnoses, "BETWEEN_RUNS_S", -1.0)
    monkeypatch.setattr(diagnoses, "_jobs", {})


def codes(app: Any) -> list[str]:
    return [c.value for c in app.code]


def runs_of(store: Path) -> list[RunInfo]:
    with Reader(store) as reader:
        return list(reversed(reader.runs()))


def tables(app: Any) -> dict[str, Any]:
    """Measurements by name; each table stands below its name."""
    names = ("Optimizer steps", "Bad ops", "Calls", "Tensors looked at", "How it ended")
    shown = [m.value.strip("*") for m in app.markdown if m.value.strip("*") in names]
    return dict(zip(shown, (d.value for d in app.dataframe), strict=True))


def plain(text: str) -> str:
    """Without escapes of Markdown and joiners."""
    return re.sub(r"\\(?=[^\w\s])", "", text).replace("\u2060", "")


def chain(app: Any) -> list[str]:
    """Texts of the chain's boxes, from cause to symptom: title in bold, line break, detail."""
    return [m.value for m in app.markdown if re.match(r"\*\*.+\*\*  \n", m.value)]


def test_a_fault_is_told_from_cause_to_fix(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.overflow(store_path))
    assert not app.exception
    words = texts(app)
    assert (
        "Root cause: An activation overflowed (AMP001), in encoder.2.wo, first at step 0." in words
    )
    assert "What to do.** Keep encoder.2.wo in fp32. A run with this fix removed the" in words
    assert (
        "Verified: the script was run with encoder.2.wo in fp32, and the symptom was gone" in words
    )
    assert {m.label: m.value for m in app.metric} == {
        "Where": "encoder.2.wo",
        "First seen at": "step 0",
        "Fix": "verified",
        "In fp32": "healthy",
    }
    assert "h = self.wo(x)" in codes(app)
    patch = next(c for c in codes(app) if "get_submodule" in c)
    assert "'encoder.2.wo'" in patch
    compile(patch, "patch", "exec")


def test_the_chain_leads_from_the_input_to_the_skipped_step(
    store_path: Path, open_page: Open
) -> None:
    boxes = chain(open_page("diagnosis", run=script_stores.overflow(store_path)))
    titles = [plain(box.partition("  \n")[0]).strip("*") for box in boxes]
    assert titles == [
        "Input",
        "First bad op: aten.mm in encoder.2.wo, forward",
        "Loss",
        "Gradients",
        "Skipped step",
        "What you see",
    ]
    assert "60 of 2,048" in plain(boxes[1])
    assert "fp32 gives 234,280; fp16 ends at 65,504" in plain(boxes[1])
    assert "NaN at step 0" in boxes[2]
    assert "12 of 12 steps" in boxes[4]


def test_evidence_leads_to_its_measurements(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path)
    app = open_page("diagnosis", run=head)
    assert "same op in fp32" in texts(app)
    assert "**234,280**, limit 65,504" in texts(app)
    found = [query for label, query in links(app) if label == "Measurements"]
    assert found == [f"run={head}&step=0"] * 5
    # No histograms and no modules are recorded of a script: no link to pages that were empty.
    labels = [label for label, _ in links(app)]
    assert "Loss scale" in labels
    assert not {"Layers", "Gradients"} & set(labels)


def test_measurements_of_one_step_are_what_was_recorded(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path)
    app = open_page("diagnosis", run=head, step=3)
    assert next(e for e in app.expander if e.label == "Measurements").proto.expanded
    found = tables(app)
    step = dict(zip(*found["Optimizer steps"].T.values, strict=True))
    assert step["step"] == "3"
    assert step["loss"] == "NaN"
    assert step["scale"] == f"{2.0**13:,.0f}"
    assert step["skipped"] == "True"
    calls = found["Calls"]
    assert list(calls["name"]) == ["scale", "backward", "scaler_step"]
    assert list(calls["seq"]) == [9, 10, 11]
    assert list(calls["value"]) == [f"{2.0**13:,.0f}", "NaN", ""]
    op = dict(zip(*found["Bad ops"].T.values, strict=True))
    assert op["op"] == "aten.mm"
    assert op["inputs"].startswith("fp16 64×256, 0.02 to 1,028; fp16 256×32")


def test_the_address_may_name_any_run_of_the_diagnosis(store_path: Path, open_page: Open) -> None:
    script_stores.overflow(store_path)
    fp32 = next(r for r in runs_of(store_path) if r.spec.control == "fp32")
    app = open_page("diagnosis", run=fp32.id, step=2)
    assert "Root cause: An activation overflowed" in texts(app)
    found = tables(app)
    step = dict(zip(*found["Optimizer steps"].T.values, strict=True))
    assert step["loss"] == "1.3"
    assert "Bad ops" not in found


def test_a_step_that_the_run_did_not_reach(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.overflow(store_path), step=99)
    assert not app.exception
    assert "did not reach the step that the address names" in texts(app)
    found = tables(app)
    assert len(found["Optimizer steps"]) == script_stores.STEPS


def test_innocence_is_said_in_so_many_words(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.innocent(store_path))
    assert not app.exception
    assert "AMP is innocent. Root cause: Divergence that has nothing to do with AMP" in texts(app)
    assert {m.label: m.value for m in app.metric}["In fp32"] == "fails too"
    assert app.button(key="dx-run-fix").label == "Run the fix"


def test_undetermined_is_said_in_so_many_words(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.undetermined(store_path))
    assert not app.exception
    assert "Undetermined: the loss falls less than in fp32." in texts(app)
    assert "No rule has enough evidence to name the cause." in texts(app)
    # The script ended by itself: more steps help nobody.
    assert "the script trains in fp32, but not in the baseline run" in texts(app)
    assert not any("--steps" in code for code in codes(app))
    assert not app.metric


def test_no_fault_names_the_search_for_a_scale(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.no_fault(store_path))
    assert not app.exception
    words = texts(app)
    assert "No fault found: the script trains as its fp32 control does." in words
    assert "GradScaler left out the first 3 of 12 optimizer steps while it searched" in words
    assert "What to do.** Nothing" in words


def test_a_long_search_is_told_once_with_what_to_do(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.long_search(store_path))
    assert not app.exception
    words = texts(app)
    assert words.count("skipped the first 16 of 24 optimizer steps while it searched") == 1
    assert "Start the scaler with a lower scale: init" in words
    assert "a lower initial scale loses fewer steps" in words


def test_without_the_fp32_control_the_page_says_so(store_path: Path, open_page: Open) -> None:
    head = script_stores.healthy_run(store_path, "as_is")
    words = texts(open_page("diagnosis", run=head))
    assert "the fp32 control has not been run" in words
    assert "No fault found" not in words


def test_a_lone_run_of_a_control_is_no_diagnosis(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.healthy_run(store_path, "bf16"))
    assert not app.exception
    assert "Could not diagnose: only a run in bf16 was recorded" in texts(app)
    assert "ampscope diagnose /home/me/train.py" in codes(app)


def test_an_exception_before_the_first_step(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.raised(store_path))
    assert not app.exception
    words = texts(app)
    assert (
        "Could not diagnose: The script raised FileNotFoundError at train.py:7 before its first"
        in words
    )
    assert "No such file: 'data.npz'" in words
    assert "No fault" not in words
    assert "ampscope diagnose /home/me/train.py" in codes(app)


def test_a_script_that_never_trains(store_path: Path, open_page: Open) -> None:
    head = script_stores.run(store_path, "as_is", script_stores.seen([]))
    words = texts(open_page("diagnosis", run=head))
    assert "Could not diagnose: The script ended without calling backward" in words


@pytest.mark.parametrize(
    ("state", "message"),
    [(State.FAILED, "The script was killed (SIGKILL)."), (State.CANCELLED, "Cancelled.")],
)
def test_a_run_that_ended_badly(
    store_path: Path, open_page: Open, state: State, message: str
) -> None:
    head = script_stores.run(store_path, "as_is", None, state=state, message=message)
    app = open_page("diagnosis", run=head)
    assert not app.exception
    assert f"Could not diagnose: {message}" in texts(app)
    assert any("ampscope diagnose" in code for code in codes(app))


def test_a_lost_run(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.lost(store_path))
    assert not app.exception
    assert "Could not diagnose: The process exited without reporting an error" in texts(app)
    assert "smaller batch if memory ran out" in texts(app)


def test_the_verdict_so_far_stands_while_fixes_are_tried(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path, fixed=False)
    with Reader(store_path) as reader:
        judged = load_diagnosis(reader, head)
    keep_conclusion(store_path, head, stored(replace(judged, notes=(partial_note((1, 5)),))))
    script_stores.run(store_path, "lr:0.1", None, state=None)
    app = open_page("diagnosis", run=head)
    assert not app.exception
    assert "Under way:** fixes are tried; the script runs at 0.1 times its learning" in texts(app)
    assert "3 runs have ended. Verdict so far: 1 of at most 5 fixes was run." in texts(app)
    assert judged.diagnosis.findings[0].verdict.reason[:40] in texts(app)


def test_a_fix_that_comes_too_late_is_not_offered(store_path: Path, open_page: Open) -> None:
    """The loss is NaN in the first forward, in every precision: no rate of a step changes that."""
    for control in ("as_is", "fp32", "bf16"):
        dead = [script_stores.one_step(n, math.nan, scaler="", scale=1.0) for n in range(9)]
        script_stores.run(store_path, control, script_stores.seen(dead))
    (head, *_) = runs_of(store_path)
    app = open_page("diagnosis", run=head.id)
    assert not app.exception
    assert "not been tried yet" not in texts(app)
    assert not [b for b in app.button if b.key == "dx-run-fix"]


def test_while_the_script_runs_there_is_no_verdict(store_path: Path, open_page: Open) -> None:
    spec = replace(script_stores.SPEC, time_limit_s=600.0)
    head = script_stores.run(store_path, "as_is", None, spec, state=None)
    app = open_page("diagnosis", run=head)
    assert not app.exception
    assert "so far, stopped after 10 min 0 s at the latest" in texts(app)
    assert "Under way:** the script runs unchanged. 0 runs have ended." in texts(app)
    assert app.button(key="dx-stop")
    assert not app.subheader
    assert "unchanged: 0 steps of at most 200" in texts(app)


def test_the_time_left_is_told_by_the_pace_of_the_steps(store_path: Path) -> None:
    """9 of 36 steps in 20 s: the other 27 take 60 s. The limit is told where it comes sooner."""
    head = script_stores.run(store_path, "as_is", None, script_stores.SPEC, state=None)
    with Reader(store_path) as reader:
        run = replace(reader.run(head), steps_done=9)
    at = partial(replace, run)
    assert time_left(at(spec=replace(run.spec, steps=36, time_limit_s=600.0)), 20.0) == (
        ", about 1 min 0 s left at this pace"
    )
    sooner = at(spec=replace(run.spec, steps=36, time_limit_s=70.0))
    assert time_left(sooner, 20.0) == ", stopped after 1 min 10 s at the latest"
    assert time_left(at(spec=replace(run.spec, time_limit_s=0.0), steps_done=0), 20.0) == ""


def test_while_a_fix_runs_the_verdict_stands(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path, fixed=False)
    script_stores.run(store_path, "fp32_modules:encoder.2.wo", None, state=None)
    app = open_page("diagnosis", run=head)
    assert "Root cause: An activation overflowed" in texts(app)
    assert "the script runs with encoder.2.wo in fp32. 3 runs have ended." in texts(app)
    assert app.button(key="dx-run-fix").disabled
    assert "No run with a fix has ended yet." in texts(app)


def test_a_fix_that_is_run_again_counts_once_it_has_finished(store_path: Path) -> None:
    script_stores.overflow(store_path)
    word = f"fp32_modules:{script_stores.MODULE}"
    script_stores.run(store_path, word, None, state=State.FAILED, message="no disk")
    script_stores.run(store_path, word, None, state=None)
    runs = runs_of(store_path)
    kept = [r.spec.control for r in diagnoses.counting(runs)]
    assert kept == ["as_is", "fp32", "bf16", word]
    newest = script_stores.healthy_run(store_path, word)
    assert diagnoses.counting(runs_of(store_path))[-1].id == newest


def test_a_fix_that_was_run_again_says_how_it_ended(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path)
    word = f"fp32_modules:{script_stores.MODULE}"
    assert "Run again" not in texts(open_page("diagnosis", run=head))
    script_stores.run(store_path, word, None, state=State.FAILED, message="no disk")
    said = texts(open_page("diagnosis", run=head))
    assert "with encoder.2.wo in fp32: it failed. no disk The run before counts." in said
    script_stores.healthy_run(store_path, word)
    said = texts(open_page("diagnosis", run=head))
    assert "with encoder.2.wo in fp32: 12 steps, and the symptom was gone again." in said


def test_the_button_runs_the_fix(
    store_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str, list[str]]] = []

    def start(store: Path, run_id: str, controls: list[str], python: str) -> Job:
        asked.append((store, run_id, list(controls)))
        return Job(-1)

    monkeypatch.setattr(script_runs, "start_controls", start)
    head = script_stores.overflow(store_path)
    app = open_page("diagnosis", run=head)
    assert app.button(key="dx-run-fix").label == "Run the fix again"
    app.button(key="dx-run-fix").click().run()
    assert not app.exception
    assert asked == [(store_path, head, ["fp32_modules:encoder.2.wo"])]


def test_a_lower_learning_rate_runs_in_fp32_too(
    store_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        script_runs, "start_controls", lambda store, run, words, _: asked.append(words) or Job(-1)
    )
    app = open_page("diagnosis", run=script_stores.innocent(store_path))
    app.button(key="dx-run-fix").click().run()
    assert asked == [["lr:0.1", "fp32;lr:0.1"]]


def test_a_script_that_is_gone_is_one_sentence(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.overflow(store_path))
    app.button(key="dx-run-fix").click().run()
    assert not app.exception
    assert "There is no file /home/me/train.py any more." in texts(app)


def test_a_conclusion_of_other_rules_is_judged_again_on_request(
    store_path: Path, open_page: Open
) -> None:
    head = script_stores.overflow(store_path)
    with Reader(store_path) as reader:
        judged = load_diagnosis(reader, head)
    nothing = replace(judged.diagnosis, verdict="no_fault", findings=(), symptoms=())
    old = replace(judged, rules="0.0.1 (0123abcd)", diagnosis=nothing)
    keep_conclusion(store_path, head, stored(old))
    app = open_page("diagnosis", run=head)
    assert "No fault found" in texts(app)
    assert "Concluded by the rules of ampscope 0.0.1 (0123abcd)." in texts(app)
    app.button(key="dx-again").click().run()
    assert "Before: no fault found. Now: An activation overflowed" in texts(app)
    assert "Root cause: An activation overflowed" in texts(app)
    assert not [b for b in app.button if b.key == "dx-again"]


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's folder, with a file outside it, and a link that leads there."""
    folder = tmp_path / "train"
    (folder / "gpt").mkdir(parents=True)
    (folder / "gpt" / "train.py").write_text("raise SystemExit\n")
    (tmp_path / "outside.py").write_text("raise SystemExit\n")
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    monkeypatch.setenv("AMPSCOPE_SCRIPTS", str(folder))
    return folder


def test_a_script_of_the_operators_folder_is_diagnosed(
    open_page: Open, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def start(script: Path, store: Path, **how: object) -> Job:
        asked.append((script, how))
        return Job(0)

    monkeypatch.setattr(script_runs, "start_diagnosis", start)
    monkeypatch.setattr(script_runs, "is_running", lambda job: True)
    app = open_page("diagnosis")
    assert app.selectbox(key="dx-script-file").options == ["gpt/train.py"]
    app.text_input(key="dx-script-args").set_value("--lr 3e-4 --name 'a b'; $(touch x)")
    app.selectbox(key="dx-script-policy").set_value("auto")
    app.number_input(key="dx-script-limit").set_value(45)
    assert not [box for box in app.selectbox if box.key == "dx-script-python"]
    app.button(key="dx-script-start").click().run()
    args = ["--lr", "3e-4", "--name", "a b;", "$(touch", "x)"]
    path = scripts / "gpt" / "train.py"
    how = {"policy": "auto", "steps": 200, "time_limit_s": 45.0, "args": args}
    assert asked == [(path, how | {"python": sys.executable})]
    assert "train.py is being started." in texts(app)


def test_a_python_that_the_operator_named_is_chosen_by_its_name(
    open_page: Open, scripts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "python3.99"
    other.symlink_to(sys.executable)
    monkeypatch.setenv("AMPSCOPE_PYTHONS", f"nightly={other}")
    asked: list[str] = []
    start = lambda *_, python, **how: asked.append(python) or Job(0)  # noqa: E731
    monkeypatch.setattr(script_runs, "start_diagnosis", start)
    app = open_page("diagnosis")
    box = app.selectbox(key="dx-script-python")
    assert box.options == ["the dashboard's own", "nightly"]
    box.set_value("nightly")
    app.button(key="dx-script-start").click().run()
    assert asked == [str(other)]
    with pytest.raises(BadInput, match="started without --python other=PATH"):
        diagnoses.start_diagnosis(scripts / "gpt" / "train.py", "native", 5, python="other")
    with pytest.raises(BadInput, match="started without --python"):
        diagnoses.start_diagnosis(scripts / "gpt" / "train.py", "native", 5, python=str(other))
    assert len(asked) == 1


def test_a_search_reaches_every_script_of_a_large_folder(
    open_page: Open, scripts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_choice, "MAX_OFFERED", 3)
    for number in range(6):
        (scripts / f"part{number}.py").write_text("")
        os.utime(scripts / f"part{number}.py", (number, number))
    app = open_page("diagnosis")
    offered = ["gpt/train.py", "part5.py", "part4.py"]
    assert app.selectbox(key="dx-script-file").options == offered
    assert "The 3 newest of 7 files are offered" in texts(app)
    app.text_input(key="dx-script-file-find").set_value("PART0").run()
    assert app.selectbox(key="dx-script-file").options == ["part0.py"]
    app.text_input(key="dx-script-file-find").set_value("nothing").run()
    app.button(key="dx-script-start").click().run()
    assert "is not a Python file below the scripts folder" in texts(app)


def test_arguments_without_an_end_are_one_sentence(open_page: Open, scripts: Path) -> None:
    app = open_page("diagnosis")
    app.text_input(key="dx-script-args").set_value("--name 'a")
    app.button(key="dx-script-start").click().run()
    assert "These arguments cannot be split" in texts(app)


@pytest.mark.parametrize("name", ["../outside.py", "link.py", "/etc/passwd", "none.py", "a\0.py"])
def test_no_file_outside_the_operators_folder_is_run(scripts: Path, name: str) -> None:
    with pytest.raises(BadInput, match="scripts folder"):
        workload_choice.python_file(scripts, name, "scripts")


def test_without_a_folder_the_page_says_how_to_name_one(open_page: Open) -> None:
    (shown,) = (c for c in codes(open_page("diagnosis")) if "--scripts" in c)
    assert shown.startswith("ampscope dashboard --scripts DIR --store ")


def test_rules_are_folded_and_readable(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.overflow(store_path), rule="bad_input_data")
    labels = [e.label for e in app.expander]
    folded = [x for x in labels if x.startswith("Rules: ")]
    counted = sum(int(x.rpartition("(")[2].rstrip(")")) for x in folded)
    assert counted + 1 == len(NAMES)  # all but the one that was found
    words = texts(app)
    for heading in ("What it detects", "Why it matters", "Blind spots", "Remedy"):
        assert f"**{heading}**" in words
    assert "Inputs or targets are not finite before the first op sees them." in words


def test_every_rule_is_documented_under_its_headings() -> None:
    for rule in all_rules():
        parts = dict(documentation_sections(rule.documentation))
        assert list(parts) == ["", "What it detects", "Why it matters", "Blind spots", "Remedy"]
        assert all(parts.values()), rule.id


def test_an_empty_store(open_page: Open) -> None:
    app = open_page("diagnosis")
    assert not app.exception
    assert "No script has been diagnosed yet." in texts(app)
    assert any(code.startswith("ampscope diagnose --store") for code in codes(app))


def test_a_probe_has_no_diagnosis(store_path: Path, open_page: Open) -> None:
    probe = stores.finished(store_path)
    app = open_page("diagnosis", run=probe)
    assert not app.exception
    assert "No script has been diagnosed yet." in texts(app)
    script_stores.overflow(store_path)
    app = open_page("diagnosis", run=probe)
    assert "The chosen run is a probe." in texts(app)
    assert "Root cause" in texts(app)


def test_a_run_that_is_not_there(store_path: Path, open_page: Open) -> None:
    script_stores.overflow(store_path)
    app = open_page("diagnosis", run="nothing")
    assert not app.exception
    assert "The newest diagnosis is shown instead." in texts(app)


def test_names_from_a_script_are_text(store_path: Path, open_page: Open) -> None:
    module = stores.HOSTILE[0] + stores.HOSTILE[1]
    spec = replace(script_stores.SPEC, label=stores.HOSTILE[0], workload=stores.HOSTILE[2] + ".py")
    op = script_stores.bad_op(module, stores.HOSTILE[1], stores.HOSTILE[2])
    app = open_page("diagnosis", run=script_stores.overflow(store_path, spec, op))
    assert not app.exception
    raw = " ".join(e.value for kind in ("markdown", "subheader", "caption") for e in app.get(kind))
    assert not re.search(r"(?<!\\)<", raw)
    assert not re.search(r"(?<!\\):red(?!-badge\[fault)", raw)
    boxes = " ".join(chain(app))
    assert "script" in boxes
    assert not re.search(r"(?<!\\)<", boxes)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("as_is", "unchanged"),
        ("fp32;lr:0.1", "in fp32 and at 0.1 times its learning rate"),
        ("fp32_modules:a.b,c", "with a.b, c in fp32"),
        ("init_scale:65536", "with an initial loss scale of 2^16"),
        ("scale:nonsense", "at a loss scale frozen at nonsense"),
        ("a_new_one:3", "under a_new_one:3"),
    ],
)
def test_controls_in_words(word: str, said: str) -> None:
    assert Control(word).words == said


def test_values_keep_what_is_not_finite() -> None:
    assert number_words.value(math.nan) == "NaN"
    assert number_words.value(-math.inf) == "-Inf"
    assert number_words.value(65504.0) == "65,504"
    assert number_words.value("not returned") == "not returned"


def test_only_scripts_can_be_run_again(store_path: Path) -> None:
    probe = stores.finished(store_path)
    with pytest.raises(BadInput, match="probe"):
        script_runs.start_controls(store_path, probe, ["fp32"])


def dtypes_under_autocast(patch: str) -> dict[str, str]:
    """What three linear layers compute in under fp16 autocast, once the patch was pasted."""
    import torch

    model = torch.nn.Sequential()
    for name in ("a", "b", "c"):
        model.add_module(name, torch.nn.Linear(4, 4))
    exec(patch, {"torch": torch, "model": model, "device_type": "cpu"})
    x, found = torch.ones(2, 4), {}
    with torch.autocast("cpu", dtype=torch.float16):
        for name, layer in model.named_children():
            x = layer(x)
            found[name] = str(x.dtype).removeprefix("torch.")
    return found


def test_of_several_fixes_that_worked_the_rule_s_first_is_named(
    store_path: Path, open_page: Open
) -> None:
    head = script_stores.overflow(store_path, fixed=False)
    for modules in ("encoder.1,encoder.2", "encoder.1", script_stores.MODULE):
        script_stores.healthy_run(store_path, f"fp32_modules:{modules}")
    app = open_page("diagnosis", run=head)
    assert "What to do.** Keep encoder.2.wo in fp32." in texts(app)


def test_the_smallest_set_of_modules_becomes_the_patch(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path, fixed=False)
    broken = script_stores.seen([script_stores.broken(i) for i in range(4)])
    script_stores.run(store_path, f"fp32_modules:{script_stores.MODULE}", broken)
    for modules in ("a,b,c", "a,c"):
        script_stores.healthy_run(store_path, f"fp32_modules:{modules}")
    app = open_page("diagnosis", run=head)
    assert "What to do.** Keep a, c in fp32." in texts(app)
    patch = next(c for c in codes(app) if "get_submodule" in c)
    assert dtypes_under_autocast(patch) == {"a": "float32", "b": "float16", "c": "float32"}


def test_when_no_fix_worked_the_page_says_so(store_path: Path, open_page: Open) -> None:
    head = script_stores.overflow(store_path, fixed=False)
    broken = script_stores.seen([script_stores.broken(i) for i in range(4)])
    script_stores.run(store_path, f"fp32_modules:{script_stores.MODULE}", broken)
    script_stores.run(store_path, "bf16", broken)  # which is tried last
    app = open_page("diagnosis", run=head)
    assert "No run with a fix removed the symptom." in texts(app)
    assert "No fix removed the symptom. Tried: with encoder.2.wo in fp32; in bf16." in texts(app)
    assert {m.label: m.value for m in app.metric}["Fix"] == "none worked"


@pytest.mark.parametrize(
    ("policy", "device", "options"),
    [("native", "a100", ""), ("cuda", "a100", " --policy cuda"),
     ("cuda", "t4", " --policy cuda --as t4"), ("cuda", "; rm", " --policy cuda")],
)  # fmt: skip
def test_the_command_names_the_device_that_was_rehearsed(
    policy: str, device: str, options: str, store_path: Path
) -> None:
    spec = replace(script_stores.SPEC, policy=policy, rehearsed=device)
    script_stores.no_fault(store_path, spec)
    command = script_command(runs_of(store_path)[0])
    assert command == f"ampscope diagnose{options} {spec.workload}"


def test_compiled_runs_stand_beside_each_other(store_path: Path, open_page: Open) -> None:
    app = open_page("diagnosis", run=script_stores.compiled_fault(store_path)["as_is"])
    assert not app.exception
    words = texts(app)
    assert "Compiled code beside eager code" in words
    assert "1 of 4 compiled runs computed what eager code does, up to rounding." in words
    assert "What differs is made by the generated kernels." in words
    shown = next(t.value for t in app.table if "What of the compiler runs" in t.value.columns)
    told = [" ".join(text.split()) for text in shown["Beside eager code"]]
    assert [r"the loss is 1\.95" in text for text in told] == [True, False, True, True], told
    assert told[1].startswith("as eager code")
    controls = next(t.value for t in app.table if "What went wrong" in t.value.columns)
    assert "with torch\\.compile on" in list(controls.index)
    assert "with torch.compile on its numbers are others" in plain(chain(app)[-1])


def test_a_script_that_does_not_compile_has_no_compiled_runs(
    store_path: Path, open_page: Open
) -> None:
    app = open_page("diagnosis", run=script_stores.overflow(store_path))
    assert "Compiled code beside eager code" not in texts(app)


def test_what_ended_for_want_of_cuda_is_told_from_the_rehearsed_runs() -> None:
    def made(number: int, control: str, policy: str) -> RunInfo:
        run = replace(RunSpec("train.py"), control=control, policy=policy)
        return RunInfo(
            str(number), run, State.FINISHED, created=number, started=None, ended=None,
            heartbeat=None, pid=None, machine=None, message="", traceback="", steps_done=0,
            overhead_share=None,
        )  # fmt: skip

    runs = ("as_is auto", "fp32 auto", "as_is cuda", "fp32 cuda", "fp32 cuda")
    named = run_names([made(number, *one.split()) for number, one in enumerate(runs)])
    assert list(named.values()) == [
        "unchanged, without CUDA", "in fp32, without CUDA", "unchanged", "in fp32", "in fp32, again"
    ]  # fmt: skip
