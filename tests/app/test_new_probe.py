"""New probe: what the form says is what is started, and what is wrong is said in one sentence."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.policy.autocast_lists import PRECISIONS
from ampscope.records import Cadence, RunSpec, ScalerSpec
from ampscope.workloads.catalog import BUILTIN
from app import telemetry
from app.runs import actions
from tests.helpers import hardware_reports, stores

Open = Callable[..., AppTest]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """What would have been launched; the engine has its own tests."""
    specs: list[RunSpec] = []
    monkeypatch.setattr(actions, "launch", lambda spec, store: specs.append(spec) or "id")
    return specs


def start(app: AppTest) -> AppTest:
    return app.button(key="np-start").click().run()


def without_group(spec: RunSpec) -> RunSpec:
    from dataclasses import replace

    assert spec.group
    return replace(spec, group="")


def test_the_form_starts_as_a_run_spec_with_its_defaults(
    open_page: Open, started: list[RunSpec]
) -> None:
    start(open_page("new_probe"))
    assert [without_group(spec) for spec in started] == [RunSpec(workload="gpt")]


def test_every_field_arrives(open_page: Open, started: list[RunSpec]) -> None:
    app = open_page("new_probe")
    app.selectbox(key="np-workload").set_value("lenet")
    app.segmented_control(key="np-size").set_value("small")
    for key, value in (
        ("np-steps", 7),
        ("np-seed", 3),
        ("np-scale", 1024.0),
        ("np-growth", 4.0),
        ("np-backoff", 0.25),
        ("np-interval", 5),
        ("np-factor", 2.0**-20),
        ("np-histogram", 2),
        ("np-trace", 0),
        ("np-shadow", 4),
        ("np-time", 90.0),
        ("np-memory", 4096),
    ):
        app.number_input(key=key).set_value(value)
    app.text_input(key="np-label").set_value("mine")
    app.radio(key="np-policy").set_value("native")
    app.selectbox(key="np-device").set_value("cpu")
    app.checkbox(key="np-bf16").check()
    start(app.run())
    expected = RunSpec(
        workload="lenet",
        size="small",
        steps=7,
        seed=3,
        device="cpu",
        policy="native",
        scaler=ScalerSpec(1024.0, 4.0, 0.25, 5),
        cadence=Cadence(2, 0, 4),
        loss_factor=2.0**-20,
        time_limit_s=90.0,
        memory_limit_mib=4096,
        label="mine",
    )
    assert [spec.precision for spec in started] == ["fp16", "bf16"]
    assert without_group(started[0]) == expected
    assert len({spec.group for spec in started}) == 1


def test_every_workload_size_and_precision_is_on_offer(open_page: Open) -> None:
    app = open_page("new_probe")
    offered = app.selectbox(key="np-workload").options
    assert offered == [info.title for info in BUILTIN.values()]
    assert [f"np-{name}" for name in PRECISIONS] == [box.key for box in app.checkbox]


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("np-steps", -3, "Steps must be from 1"),
        ("np-steps", 0, "Steps must be from 1"),
        ("np-seed", -1, "The seed must be"),
        ("np-factor", 0.0, "The loss factor must be"),
        ("np-time", 0.0, "The time limit must be"),
        ("np-memory", -1, "The memory limit must be"),
        ("np-scale", -1.0, "The initial loss scale must be"),
        ("np-growth", 1.0, "The growth factor must be"),
        ("np-backoff", 1.5, "The backoff factor must"),
        ("np-interval", 0, "The growth interval must"),
        ("np-shadow", -1, "A cadence is"),
    ],
)
def test_a_wrong_number_is_one_sentence_and_cannot_be_started(
    open_page: Open, started: list[RunSpec], key: str, value: float, sentence: str
) -> None:
    app = open_page("new_probe")
    app.number_input(key=key).set_value(value).run()
    assert len(app.error) == 1
    assert sentence in app.error[0].value.replace("\\", "")
    assert app.button(key="np-start").disabled
    assert not started


def test_no_precision_is_refused(open_page: Open) -> None:
    app = open_page("new_probe")
    app.checkbox(key="np-fp16").uncheck().run()
    assert "at least one precision" in app.error[0].value


def test_tf32_needs_cuda(open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    app = open_page("new_probe")
    app.checkbox(key="np-tf32").check().run()
    assert "tf32 needs a CUDA device" in app.error[0].value
    gpu = hardware_reports.report(hardware_reports.H100)
    monkeypatch.setattr(telemetry, "machine_report", lambda: gpu)
    app = open_page("new_probe")
    app.checkbox(key="np-tf32").check().run()
    assert not app.error
    assert app.selectbox(key="np-device").options == ["auto (cuda:0)", "cuda:0", "cpu"]


def test_files_of_the_operators_folder_are_on_offer(
    open_page: Open, started: list[RunSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "toy.py").write_text("def build(seed): ...")
    monkeypatch.setenv("AMPSCOPE_WORKLOADS", str(folder))
    app = open_page("new_probe")
    app.selectbox(key="np-workload").set_value("file:toy.py").run()
    app.text_input(key="np-entry").set_value("os.system").run()
    assert "not the name of a function" in app.error[0].value
    app.text_input(key="np-entry").set_value("build").run()
    start(app)
    assert started[0].workload == f"{folder.resolve()}/toy.py:build"


@pytest.mark.parametrize(
    "sent", ["file:/etc/passwd", "file:../outside.py", "os:system", "/etc/hosts.py:build"]
)
def test_a_browser_cannot_name_anything_else(
    open_page: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    from ampscope.errors import BadInput
    from app.runs import workload_choice

    (tmp_path / "mine").mkdir()
    (tmp_path / "outside.py").write_text("")
    monkeypatch.setenv("AMPSCOPE_WORKLOADS", str(tmp_path / "mine"))
    with pytest.raises(BadInput):
        workload_choice.named(workload_choice.WorkloadChoice(sent, "tiny"))


def test_a_run_can_be_repeated_by_its_address(
    open_page: Open, store_path: Path, started: list[RunSpec]
) -> None:
    spec = RunSpec(workload="rnn", precision="bf16", steps=9, seed=4, label="again", group="old")
    run = stores.finished(store_path, spec)
    start(open_page("new_probe", again=run))
    assert without_group(started[0]) == without_group(spec)


def test_an_unknown_run_to_repeat_is_said(open_page: Open, store_path: Path) -> None:
    stores.finished(store_path)
    app = open_page("new_probe", again="zzz")
    assert "is not in this store" in app.warning[0].value
    assert not app.button(key="np-start").disabled


def test_progress_place_in_the_queue_and_the_way_back(open_page: Open, store_path: Path) -> None:
    spec = RunSpec(workload="gpt", steps=12, group="g")
    stores.queued(store_path, RunSpec(workload="gpt", group="other"))
    stores.running(store_path, spec, steps=6)
    stores.queued(store_path, RunSpec(workload="gpt", precision="bf16", group="g"))
    app = open_page("new_probe", group="g")
    running, waiting = (bar.text for bar in app.progress)
    assert running.startswith("6 of 12 steps")
    assert waiting == "Waits, place 2 in the queue"  # `other` is first
    app = app.button(key="np-another").click().run()
    assert "group" not in app.query_params
    assert app.button(key="np-start")


@pytest.mark.parametrize("done", [0, 1])
def test_an_imported_probe_of_no_steps_is_drawn(
    open_page: Open, store_path: Path, done: int
) -> None:
    """An import may say that 0 were asked for, as a watched training does."""
    stores.failed(store_path, RunSpec(workload="gpt", steps=0, group="g"), steps=done)
    app = open_page("new_probe", group="g")
    assert not app.exception
    assert "could not be drawn" not in " ".join(error.value for error in app.error)
    assert [bar.proto.value for bar in app.progress] == [100 * done]


def test_a_failed_probe_says_why_and_keeps_its_traceback_folded(
    open_page: Open, store_path: Path
) -> None:
    stores.failed(store_path, RunSpec(workload="gpt", group="g"), steps=0)
    app = open_page("new_probe", group="g")
    assert "The loss is not a scalar" in app.error[0].value.replace("\\", "")
    assert "ValueError: shape (4,)" in app.expander[0].code[0].value
    assert app.expander[0].proto.expanded is False


def test_a_finished_group_leads_to_its_pages(open_page: Open, store_path: Path) -> None:
    run = stores.finished(store_path, RunSpec(workload="gpt", steps=5, group="g"))
    app = open_page("new_probe", group="g")
    assert app.page_link[0].proto.query_string == f"run={run}"


@pytest.mark.parametrize(
    "spec",
    [
        RunSpec(workload="gpt", seed=2**63 - 1),
        RunSpec(workload="gpt", seed=2**53),
        RunSpec(workload="gpt", memory_limit_mib=2**62),
        RunSpec(workload="gpt", label="x" * 500, size="none", device="tpu:9", policy="?"),
        RunSpec(workload="gpt", scaler=ScalerSpec(math.inf, math.nan, 0.5, 2**60)),
    ],
)
def test_any_recorded_run_can_be_repeated(open_page: Open, store_path: Path, spec: RunSpec) -> None:
    """What a browser's number cannot hold is not a failed page."""
    app = open_page("new_probe", again=stores.finished(store_path, spec))
    assert not app.exception
    assert not any("could not be drawn" in box.value for box in app.error)


def test_a_large_seed_is_repeated_exactly(
    open_page: Open, store_path: Path, started: list[RunSpec]
) -> None:
    seed = 2**63 - 1
    app = open_page("new_probe", again=stores.finished(store_path, RunSpec("gpt", seed=seed)))
    start(app)
    assert [spec.seed for spec in started] == [seed]
    app.text_input(key="np-large-seed").set_value("9" * 19).run()
    assert any("The seed must be" in box.value for box in app.error)
    app.text_input(key="np-large-seed").set_value("x").run()
    assert any("The seed must be" in box.value for box in app.error)
