"""What every page about one run begins with: which run, its state, its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from ampscope.records import RunInfo, RunSpec
from ampscope.store.reader import Reader
from app.runs import run_page
from tests.helpers import script_stores, stores
from tests.helpers.pages import texts

Open = Callable[..., AppTest]
PAGES = ("layers", "gradients", "loss_scale")


def plain(texts: object) -> str:
    return "\n".join(str(t.value) for t in texts).replace("\\", "").replace("\u2060", "")  # type: ignore[attr-defined]


def info(store: Path, run_id: str) -> RunInfo:
    with Reader(store) as reader:
        return reader.run(run_id)


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_store_leads_to_what_fills_it(open_page: Open, page: str) -> None:
    app = open_page(page)
    assert "No run has been recorded yet" in app.info[0].value
    labels = [link.proto.label for link in app.get("page_link")]
    assert labels == ["Home", "Diagnosis", "New probe"]
    assert not app.error


@pytest.mark.parametrize("page", PAGES)
def test_every_page_says_run_and_policy(open_page: Open, store_path: Path, page: str) -> None:
    run = stores.finished(store_path)
    app = open_page(page, run=run)
    assert "gpt tiny fp16" in plain(app.markdown)
    assert "CUDA's rules, rehearsed on a CPU (Test CPU)" in plain(app.caption)


@pytest.mark.parametrize("page", ["home", "diagnosis", *PAGES, "telemetry"])
def test_every_page_of_a_rehearsed_script_says_which_device(
    open_page: Open, store_path: Path, page: str
) -> None:
    run = script_stores.overflow(store_path, replace(script_stores.SPEC, rehearsed="t4"))
    app = open_page(page, run=run)
    assert not app.exception
    shown = texts(app)
    assert "CUDA (T4) rehearsed on a CPU" in shown
    assert "times the processor time per step" not in shown


@pytest.mark.parametrize(
    ("maker", "kind", "sentence"),
    [
        (stores.queued, "info", "This probe waits, place 1 in the queue."),
        (stores.running, "info", "Running: 6 of 12 steps."),
        (stores.failed, "error", "This run failed."),
        (stores.cancelled, "warning", "This run was cancelled."),
        (stores.lost, "warning", "This run was lost."),
    ],
)
def test_every_state_is_one_notice(
    open_page: Open,
    store_path: Path,
    maker: Callable[[Path], str],
    kind: str,
    sentence: str,
) -> None:
    app = open_page("loss_scale", run=maker(store_path))
    assert sentence in plain(getattr(app, kind))
    assert not app.exception


def test_a_failed_run_keeps_reason_traceback_and_a_way_to_repeat_it(
    open_page: Open, store_path: Path
) -> None:
    run = stores.failed(store_path)
    app = open_page("loss_scale", run=run)
    assert stores.FAILURE in plain(app.error)
    assert "Traceback" not in plain(app.error)
    assert "Traceback" in app.expander[0].code[0].value
    assert f"again={run}" in [link.proto.query_string for link in app.page_link]


def test_a_run_without_a_step_ends_the_page(open_page: Open, store_path: Path) -> None:
    app = open_page("gradients", run=stores.failed(store_path, steps=0))
    assert "No step was recorded." in plain(app.error)
    assert not app.metric


def test_an_address_of_no_run_shows_no_other_run(open_page: Open, store_path: Path) -> None:
    newest = stores.finished(store_path)
    app = open_page("layers", run="nosuch")
    assert "'nosuch' is not in this store" in plain(app.error)
    assert not app.metric
    app = app.button[0].click().run()
    assert app.query_params["run"] == newest
    assert app.metric


def test_the_beginning_of_an_id_is_enough(open_page: Open, store_path: Path) -> None:
    run = stores.finished(store_path)
    app = open_page("layers", run=run[:-1])
    assert app.query_params["run"] == run


def test_the_newest_run_is_first_and_the_chosen_one_is_remembered(
    open_page: Open, store_path: Path
) -> None:
    older = stores.finished(store_path, replace(stores.SPEC, label="older"))
    newest = stores.finished(store_path, replace(stores.SPEC, label="newest"))
    app = open_page("layers")
    assert app.query_params["run"] == newest
    app.sidebar.selectbox[0].set_value(older).run()
    app.switch_page("../pages/loss_scale.py")
    app.query_params.clear()  # as Streamlit does
    assert app.run().query_params["run"] == older


def test_labels_of_runs_of_files_and_scripts_are_short(store_path: Path) -> None:
    spec = RunSpec(workload="/a/very/long/folder/mine.py:build", precision="bf16")
    run = info(store_path, stores.queued(store_path, spec))
    assert run_page.described(run) == "mine.py:build tiny bf16"
    script = RunSpec(workload="/a/train.py", kind="script", control="fp32")
    queued = info(store_path, stores.queued(store_path, script))
    assert run_page.described(queued) == "train.py in fp32"


def test_a_run_of_a_small_loss_says_its_factor(store_path: Path) -> None:
    spec = replace(stores.SPEC, loss_factor=2.0**-11)
    assert "loss × 2^-11" in run_page.facts(info(store_path, stores.finished(store_path, spec)))
