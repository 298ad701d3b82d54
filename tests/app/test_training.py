"""The Training page in every state: healthy, bad, alarms, capsules, lost, ranks, a long run."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope.errors import BadInput
from ampscope.launcher import script_runs
from ampscope.launcher.script_runs import Job
from ampscope.records import Event, Role, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from app.runs import diagnoses
from app.training import histograms_seen
from tests.helpers import stores
from tests.helpers import watched_stores as watched
from tests.helpers.pages import NO_RUN, metrics, texts

Open = Callable[..., Any]
CAPSULE = Event(
    7,
    "capsule",
    "c",
    "The loss was nan. Kept: 1 forward.",
    path="/gone/night run/step7.safetensors",
)


def test_an_empty_store(open_page: Open) -> None:
    app = open_page("training")
    assert not app.exception
    assert NO_RUN in texts(app)


def test_a_run_without_a_step(store_path: Path, open_page: Open) -> None:
    writer = watched.begun(store_path, [])
    app = open_page("training", run=writer.run_id)
    assert "Its first step has not come yet." in texts(app)
    assert not app.metric
    writer.close()


def test_a_healthy_run(store_path: Path, open_page: Open) -> None:
    writer = watched.begun(store_path, watched.good(200))
    app = open_page("training", run=writer.run_id)
    words = texts(app)
    assert not app.exception
    assert "Healthy so far: step 199, loss 2.801, 2 skips in all, last at step 2." in words
    assert "Running: 200 steps so far." in words
    assert metrics(app) == {
        "Last step": "199",
        "Loss": "2.801",
        "Skips": "2 of 200",
        "Time per step": "250 ms",
    }
    assert "No histogram was taken" in words
    writer.close()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State.FINISHED, "Healthy to the end: step 19"),
        (State.FAILED, "Finite until it failed: step 19"),
        (State.CANCELLED, "Healthy until it was cancelled: step 19"),
    ],
)
def test_how_it_ended(store_path: Path, open_page: Open, state: State, words: str) -> None:
    run = watched.ended(watched.begun(store_path, watched.good(20)), state, "It was <b>so</b>.")
    app = open_page("training", run=run)
    assert not app.exception
    assert words in texts(app)
    assert "Start it again" not in [link.label for link in app.get("page_link")]
    if state is State.FAILED:
        assert "It was <b>so</b>." in texts(app)


def test_a_lost_run(store_path: Path, open_page: Open) -> None:
    app = open_page("training", run=watched.lost(watched.begun(store_path, watched.good(20))))
    assert "Finite until it was lost: step 19" in texts(app)
    assert "This run was lost." in texts(app)


def test_a_run_that_ends_in_nan_names_step_and_capsule(store_path: Path, open_page: Open) -> None:
    events = [Event(7, "nonfinite", "loss", "The loss was nan."), CAPSULE]
    run = watched.ended(watched.begun(store_path, watched.bad(20, 7), events))
    app = open_page("training", run=run)
    words = texts(app)
    assert (
        "Bad since step 7: the loss was NaN; the capsule of that step shows where it came from."
        in words
    )
    assert [c.value for c in app.code] == [
        "ampscope replay '/gone/night run/step7.safetensors' --model file.py:build",
        "ampscope diagnose --capsule '/gone/night run/step7.safetensors' --trust file.py:build",
    ]
    assert "This file is not on the machine that runs the dashboard" in words


def test_what_a_replay_found_stands_with_its_capsule(store_path: Path, open_page: Open) -> None:
    told = "aten.mm in module 'h.0.up': finite inputs gave infinity in fp16"
    events = [CAPSULE, Event(7, "replay", "first bad op", told)]
    run = watched.ended(watched.begun(store_path, watched.bad(20, 7), events))
    assert f"Run again: {told}" in texts(open_page("training", run=run)).replace("**", "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the processes that a page would have started."""
    asked: list[list[str]] = []

    def start(arguments: Sequence[str], folder: Path, python: str) -> Job:
        asked.append([*arguments, str(folder)])
        return Job(0)

    monkeypatch.setattr(script_runs, "_start", start)
    monkeypatch.setattr(diagnoses, "_jobs", {})
    return asked


@pytest.fixture
def kept(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Path]:
    """A run that has kept a capsule, which is there; the operator's folder has one file."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").write_text("def build(): ...\n")
    monkeypatch.setenv("AMPSCOPE_SCRIPTS", str(tmp_path / "mine"))
    path = tmp_path / "step7.safetensors"
    path.write_bytes(b"0")
    events = [replace(CAPSULE, path=str(path)), CAPSULE]
    run = watched.ended(watched.begun(store_path, watched.bad(20, 7), events))
    return run, path


def test_a_capsule_is_diagnosed_once_its_file_is_trusted(
    kept: tuple[str, Path], started: list[list[str]], open_page: Open, store_path: Path
) -> None:
    run, path = kept
    app = open_page("training", run=run)
    assert app.selectbox(key="tr-capsule-path").options == ["Step 7"]  # the other one is gone
    app.button(key="tr-capsule-start").click().run()
    assert "only after you have said that you trust it" in texts(app)
    assert started == []
    app.checkbox(key="tr-capsule-trust").check()
    app.text_input(key="tr-capsule-function").set_value("build; rm x")
    app.button(key="tr-capsule-start").click().run()
    assert "is not the name of a function" in texts(app)
    app.text_input(key="tr-capsule-function").set_value("build")
    app.button(key="tr-capsule-start").click().run()
    folder = path.parent / "mine"
    assert started == [
        ["ampscope.cli.main", "diagnose", "--quiet", "--store", str(store_path.absolute()),
         "--capsule", str(path), "--trust", f"{folder / 'model.py'}:build", str(folder)]
    ]  # fmt: skip


def test_a_capsule_is_not_diagnosed_from_the_page_without_the_operators_folder(
    kept: tuple[str, Path], open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AMPSCOPE_SCRIPTS")
    app = open_page("training", run=kept[0])
    assert not [b for b in app.button if b.key == "tr-capsule-start"]
    assert "start the dashboard with" in texts(app)


def test_an_imported_runs_capsule_is_never_opened_from_the_page(
    kept: tuple[str, Path], started: list[list[str]], store_path: Path
) -> None:
    run, path = kept
    with Reader(store_path) as reader:
        info = reader.run(run)
    imported = replace(info, spec=replace(info.spec, imported="other.json"))
    with pytest.raises(BadInput, match="imported"):
        diagnoses.start_captured(imported, path, path, "build", trusted=True)
    with pytest.raises(BadInput, match="no capsule"):
        diagnoses.start_captured(info, path.with_name("gone"), path, "build", trusted=True)
    assert started == []


@pytest.mark.parametrize(("skips", "is_bad"), [(2, False), (3, True)])
def test_a_few_skips_at_the_end_are_calibration(
    store_path: Path, open_page: Open, skips: int, is_bad: bool
) -> None:
    steps = [watched.step(i, skipped=i >= 10 - skips) for i in range(10)]
    app = open_page("training", run=watched.ended(watched.begun(store_path, steps)))
    sentence = app.subheader[0].value.replace("\\", "").replace("\u2060", "")
    assert sentence.startswith("Bad since step 7: GradScaler leaves out every step") == is_bad


def test_alarms_say_what_to_do_and_come_newest_first(store_path: Path, open_page: Open) -> None:
    events = [
        Event(i, "alarm", "lost_share", f"Raise the scale, {i} <b>.", value=0.5) for i in range(8)
    ]
    run = watched.ended(watched.begun(store_path, watched.good(20), events))
    app = open_page("training", run=run)
    said = [w.value.replace("\\", "").replace("\u2060", "") for w in app.warning]
    assert said[0] == "**Step 7: gradients lost.** Raise the scale, 7 <b>."
    assert len(said) == 5
    assert app.expander[0].label == "3 earlier alarms"
    assert "with 8 alarms (the last at step 7: gradients lost)" in texts(app)


def test_notes_and_all_reports(store_path: Path, open_page: Open) -> None:
    note = Event(0, "note", "cannot be seen", "net is compiled: <script>x</script>")
    run = watched.ended(watched.begun(store_path, watched.good(20), [note]))
    app = open_page("training", run=run)
    assert "What cannot be seen" in texts(app)
    raw = " ".join(m.value for m in app.markdown)
    assert "<script>" not in raw


def ranks(store: Path, *, first_bad: int | None = None) -> list[RunWriter]:
    """Three ranks of one training; rank 1 sees a NaN loss at ``first_bad``."""
    writers = []
    for rank in range(3):
        steps, events = watched.good(20), []
        if first_bad is not None:
            steps = watched.bad(20, first_bad + (rank != 1))
            where = "loss" if rank == 1 else "gradients"
            events = [Event(first_bad, "nonfinite", where, "x")]
        spec = watched.of_rank(rank, 3)
        frames = [watched.frame(0), watched.frame(10)]
        writers.append(watched.begun(store, steps, events, spec, frames))
    return writers


def test_ranks_side_by_side_name_the_first_to_go_bad(store_path: Path, open_page: Open) -> None:
    runs = [watched.ended(writer) for writer in ranks(store_path, first_bad=7)]
    app = open_page("training", run=runs[0])
    words = texts(app)
    assert not app.exception
    assert "Rank 1 went non-finite first, at step 7 (seen in: loss)." in words
    table = app.dataframe[0].value
    assert list(table["Rank"]) == [0, 1, 2]
    assert list(table["First not finite"]) == [
        "step 7, gradients", "step 7, loss", "step 7, gradients",
    ]  # fmt: skip
    assert list(table["Machine"]) == ["node0", "node1", "node2"]
    assert "In blue: rank 1, which went non-finite first" in words


def test_skips_of_a_search_are_no_first_nonfinite_rank(store_path: Path, open_page: Open) -> None:
    found = Event(0, "calibration", "backward", "Gradients were not.")
    runs = [
        watched.ended(watched.begun(store_path, watched.good(20), [found], watched.of_rank(r, 2)))
        for r in range(2)
    ]
    words = texts(open_page("training", run=runs[0]))
    assert "went non-finite first" not in words
    assert "Healthy to the end: step 19" in words


def test_a_rank_that_died_is_lost_while_the_others_go_on(store_path: Path, open_page: Open) -> None:
    first, second, third = ranks(store_path)
    watched.lost(second)
    app = open_page("training", run=first.run_id)
    assert "Rank 1 was lost; 2 others go on. Healthy so far: step 19" in texts(app)
    assert list(app.dataframe[0].value["State"]) == ["running", "lost", "running"]
    first.close()
    third.close()


def test_the_picker_lists_a_training_once(store_path: Path, open_page: Open) -> None:
    runs = [watched.ended(writer) for writer in ranks(store_path)]
    app = open_page("training", run=runs[0])
    assert len(app.sidebar.selectbox[0].options) == 1
    assert "3 ranks" in app.sidebar.selectbox[0].options[0]
    app = open_page("loss_scale", run=runs[2])
    assert app.button_group[0].value == "2"


def test_histograms_of_all_ranks_are_added_up(store_path: Path, open_page: Open) -> None:
    runs = [watched.ended(writer) for writer in ranks(store_path)]
    app = open_page("gradients", run=runs[0], role="weight_grad")
    assert not app.exception
    assert "Added up over 3 ranks (0, 1, 2)." in texts(app)
    counts = next(d.value for d in app.dataframe if "Elements" in d.value)
    assert list(counts["Elements"]) == [3 * watched.COUNT] * 2
    app = open_page("training", run=runs[0], one_rank="2")
    assert "Over all steps, rank 2" in texts(app)
    app = open_page("gradients", run=runs[0], role="weight_grad", rank="1")
    counts = next(d.value for d in app.dataframe if "Elements" in d.value)
    assert list(counts["Elements"]) == [watched.COUNT] * 2
    assert "Counted by rank 1." in texts(app)


def long_run(store: Path, count: int = 6000) -> str:
    """So long that the store has added older frames up; one skip at step 4,321."""
    writer = RunWriter.create(store, watched.SPEC)
    writer.start(watched.MACHINE)
    writer.add_modules(watched.MODULES)
    for i in range(count):
        writer.add_step(watched.step(i, skipped=i == 4321))
        writer.add_frame(watched.frame(i))
        if i % 500 == 499:
            writer.flush()
    return watched.ended(writer)


def test_a_long_run_is_thinned_with_exact_counts(store_path: Path, open_page: Open) -> None:
    run = long_run(store_path)
    app = open_page("training", run=run)
    words = texts(app)
    assert "Healthy to the end: step 5,999, loss 2, 1 skip in all, last at step 4,321." in words
    assert "of 6,000 steps are drawn" in words
    app = open_page("loss_scale", run=run)
    assert metrics(app)["Skipped steps"] == "1 of 6,000"
    assert "1 skip in 6,000 steps, at step 4321; steady scale 2^10." in texts(app)
    app = open_page("loss_scale", run=run, first=4000, last=4999)
    assert "Shown: steps 4,000 to 4,999, all of them." in texts(app)
    assert "1 of 6,000" in texts(app)
    app = open_page("loss_scale", run=run, first=5000, last=5999)
    assert "No step of the shown part was skipped" in texts(app)


def test_a_frame_that_adds_up_says_its_steps(store_path: Path, open_page: Open) -> None:
    run = long_run(store_path)
    app = open_page("gradients", run=run, role="weight_grad", step=100)
    assert not app.exception
    counts = next(d.value for d in app.dataframe if "Elements" in d.value)
    summed = int(counts["Elements"][0]) // watched.COUNT
    sentence = app.subheader[0].value.replace("\\", "").replace("\u2060", "")
    first, last = (int(w.replace(",", "")) for w in np.array(sentence.split())[[1, 3]])
    assert summed == last - first + 1 > 1  # every step had histograms
    assert first <= 100 <= last
    assert f"({summed} recorded steps added up)" in sentence


def test_a_step_that_is_not_there_is_said(store_path: Path, open_page: Open) -> None:
    writer = watched.begun(
        store_path, watched.good(30), frames=[watched.frame(0), watched.frame(10)]
    )
    run = watched.ended(writer)
    app = open_page("gradients", run=run, role="weight_grad", step=4, module="nosuch")
    words = texts(app)
    assert "Step `4`, which the address asks for, is not there; 0 is shown." in words
    assert "Module `nosuch`, which the address asks for, is not there; h.0.up is shown." in words
    app = open_page("gradients", run=run, role="nosuch")
    assert "Values `nosuch`, which the address asks for, is not there" in texts(app)


def test_layers_say_that_ops_are_not_traced(store_path: Path, open_page: Open) -> None:
    app = open_page("layers", run=long_run(store_path, 30))
    assert not app.exception
    assert "not traced op by op: that is done on demand" in texts(app)


def test_probes_have_curves_too(store_path: Path, open_page: Open) -> None:
    app = open_page("training", run=stores.finished(store_path))
    assert not app.exception
    assert len(app.metric) == 4


def test_names_are_text(store_path: Path, open_page: Open) -> None:
    spec = replace(watched.SPEC, label=stores.HOSTILE[0] + stores.HOSTILE[2])
    events = [
        Event(1, kind, stores.HOSTILE[1], stores.HOSTILE[2], path=stores.HOSTILE[0])
        for kind in ("alarm", "capsule", "note", "nonfinite", "replay", "unheard of")
    ]
    steps = [StepRecord(0, loss=math.inf), StepRecord(1)]
    run = watched.ended(watched.begun(store_path, steps, events, spec))
    app = open_page("training", run=run)
    assert not app.exception
    kinds = ("markdown", "subheader", "caption", "warning")
    raw = " ".join(e.value for kind in kinds for e in app.get(kind))
    assert not re.search(r"(?<!\\)(<script|<img|\*\*c\*\*|\$d)", raw)  # each mark is escaped


def test_home_shows_a_training_once_and_why_it_failed(store_path: Path, open_page: Open) -> None:
    for writer in ranks(store_path):
        watched.ended(writer, State.FAILED, f"Out of memory, {writer.run_id}.")
    app = open_page("home")
    words = texts(app)
    assert words.count("3 ranks") == 1
    assert words.count("Rank 1 failed: Out of memory") == 1
    assert "of 0 steps" not in words
    assert "20 steps" in words
    assert "Open the training" in [link.label for link in app.get("page_link")]
    labels = [link.label for link in open_page("runs").get("page_link")]
    assert labels == ["Open Training"]


def test_roles_that_only_one_rank_counts(store_path: Path, open_page: Open) -> None:
    """Under DDP rank 0 alone counts the weights."""
    frames = [[watched.frame(0), watched.frame(0, Role.WEIGHT)], [watched.frame(0)]]
    runs = [
        watched.ended(watched.begun(store_path, watched.good(5), (), watched.of_rank(r, 2), f))
        for r, f in enumerate(frames)
    ]
    app = open_page("gradients", run=runs[0], role="weight")
    assert "Counted by rank 0." in texts(app)
    assert not app.exception


def test_a_long_run_that_stays_bad_says_since_when(store_path: Path, open_page: Open) -> None:
    run = watched.ended(watched.begun(store_path, watched.bad(9000, 1234)))
    assert "Bad since step 1,234: the loss was NaN." in texts(open_page("training", run=run))
    app = open_page("loss_scale", run=run)
    assert "the loss was not finite at 7,766 steps, first at step 1234." in texts(app)
    assert not app.exception


def test_a_training_that_recovered_is_not_called_healthy(store_path: Path, open_page: Open) -> None:
    writer = watched.begun(store_path, watched.good(20))
    for step in (7, 12):
        writer.add_event(Event(step, "nonfinite", "loss", "The loss was nan."))
    run = watched.ended(writer)
    words = texts(open_page("training", run=run))
    assert "Went bad 2 times, the last one at step 12 and recovered: step 19" in words
    assert "Healthy" not in words


def test_histograms_that_became_rarer_are_said_to_be() -> None:
    often = [(step, step) for step in range(0, 100, 10)]
    assert "every 10 steps and right after bad steps" in histograms_seen(often, 10)
    assert "lately after 240 steps" in histograms_seen([*often, (330, 330)], 10)
