"""The Loss scale page in every state, against trajectories written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampscope.analysis.scale_window import ModuleWindow, ScaleWindow
from ampscope.launcher.launch import launch
from ampscope.numerics.histogram import FIRST, RAW_LEN
from ampscope.records import Frame, NonFiniteRecord, Role, RunSpec, ScalerSpec, State, StepRecord
from ampscope.scalers.replay import Replay, replay
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from app import store as app_store
from app.figures.loss_scale import scale_windows
from app.loss_scale import least_room
from app.runs.loss_scales import window_sentence
from tests.helpers import stores
from tests.helpers.child_runs import wait_until
from tests.helpers.pages import NO_RUN, asked, metrics, texts
from tests.helpers.script_stores import one_step

Open = Callable[..., Any]


def written(
    store: Path,
    steps: Sequence[StepRecord],
    bad: Sequence[NonFiniteRecord] = (),
    precision: str = "fp16",
) -> str:
    writer = RunWriter.create(store, replace(stores.SPEC, precision=precision))
    writer.start(stores.MACHINE)
    for step in steps:
        writer.add_step(step)
    writer.add_nonfinite(bad)
    writer.finish(State.FINISHED)
    writer.close()
    return writer.run_id


def trajectory(exponents: Sequence[int], skipped: set[int]) -> list[StepRecord]:
    return [
        StepRecord(
            i,
            loss=2.0 - i / 100,
            scale=2.0**e,
            skipped=i in skipped,
            grad_norm=math.inf if i in skipped else 1.0,
            growth_counter=0 if i in skipped else i,
        )
        for i, e in enumerate(exponents)
    ]


SEARCH = trajectory([16, 15, 14, 14, 13] + [13] * 15, {0, 1, 3})
BAD = [
    NonFiniteRecord(0, "head.weight", 1, 100, 25, 0, 0),
    NonFiniteRecord(0, "block.bias", 0, 10, 0, 1, 2),
    NonFiniteRecord(1, "block.bias", 4, 10, 1, 0, 0),
]


def test_the_search_for_a_scale(store_path: Path, open_page: Open) -> None:
    app = open_page("loss_scale", run=written(store_path, SEARCH, BAD))
    assert not app.exception
    words = texts(app)
    assert "3 skips in the first 4 steps, then none: the scale search; steady scale 2^13." in words
    assert metrics(app) == {
        "Skipped steps": "3 of 20",
        "Scale at the end": "2^13",
        "Growths": "0",
        "Losses not finite": "0",
    }
    scale = next(m for m in app.metric if m.label == "Scale at the end")
    assert "8,192" in scale.help.replace("\\", "")
    assert "in the band at the bottom: the gradient norm at 3 steps." in words
    assert "3 of 20 steps were skipped. Backward met block.bias first, at 2 of 2" in words


def test_parameters_of_a_skip_in_backward_order(store_path: Path, open_page: Open) -> None:
    app = open_page("loss_scale", run=written(store_path, SEARCH, BAD))
    skips, parameters = (d.value for d in app.dataframe)
    assert list(skips["Step"]) == [0, 1, 3]
    assert list(skips["Loss scale"]) == ["2^16", "2^15", "2^14"]
    assert list(skips["First in backward"]) == ["block.bias", "block.bias", "not recorded"]
    assert list(parameters["Parameter"]) == ["block.bias", "head.weight"]
    assert list(parameters["Backward order"]) == [1, 2]
    assert list(parameters["Not finite, %"]) == [30.0, 25.0]
    app.selectbox(key="widget:skip").select("1").run()
    assert list(app.dataframe[1].value["Parameter"]) == ["block.bias"]
    assert asked(app, "skip") == "1"


def test_two_optimizers_that_share_a_scaler(store_path: Path, open_page: Open) -> None:
    """The second optimizer's finite step at the same scale says nothing of the first one's."""
    run_id = written(store_path, trajectory([16, 16, 15, 15, 14, 14, 14, 14], {0, 2}))
    writer = RunWriter(store_path, run_id)
    writer.add_observations(one_step(n, 1.0, optimizer=f"optimizer{n % 2}") for n in range(8))
    writer.close()
    app = open_page("loss_scale", run=run_id)
    assert not app.exception
    assert list(app.dataframe[0].value["Why"]) == ["calibration"] * 2


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (trajectory([16] * 12, set()), "No step of 12 was skipped; the scale stayed at 2^16."),
        (
            trajectory([16, 15, 14], {0, 1, 2}),
            "3 skips in the first 3 steps: still searching for a scale; the scale is now 2^14.",
        ),
        (
            trajectory([16, 15, 15, 15], {0}),
            "1 skip in the first step, then none so far: the scale search; steady scale 2^15.",
        ),
        (
            trajectory([10] * 8 + [11] * 8, set()),
            "No step of 16 was skipped; steady scale 2^11, after 1 growth.",
        ),
        (
            trajectory([16] * 10 + [15] * 12, {9}),
            "1 skip in 22 steps, at step 9; steady scale 2^15.",
        ),
        (
            trajectory([10] * 8 + [11] + [10] * 8 + [11] + [10] * 8, {8, 17}),
            "2 skips, each right after the scale grew: it tests the ceiling; steady scale 2^10, "
            "after 2 growths.",
        ),
        (
            trajectory([16] * 5 + list(range(16, 0, -1)), set(range(5, 21))),
            "16 skips in 21 steps, and no step was taken any more at the end: the scale cannot "
            "cure this; the scale is now 2^1.",
        ),
    ],
)
def test_sentences(
    store_path: Path, open_page: Open, steps: list[StepRecord], sentence: str
) -> None:
    app = open_page("loss_scale", run=written(store_path, steps))
    assert not app.exception
    assert sentence in texts(app)


def test_losses_that_are_not_finite_are_counted_and_told(store_path: Path, open_page: Open) -> None:
    steps = trajectory([4] * 6, set())
    steps[2] = replace(steps[2], loss=math.nan)
    steps[4] = replace(steps[4], loss=-math.inf)
    app = open_page("loss_scale", run=written(store_path, steps))
    words = texts(app)
    assert "the loss was not finite at 2 steps, first at step 2." in words
    assert metrics(app)["Losses not finite"] == "2"
    assert "in the band at the bottom: the loss at 2 steps." in words


def test_without_a_scaler(store_path: Path, open_page: Open) -> None:
    steps = [StepRecord(i, loss=1.0, grad_norm=2.0) for i in range(4)]
    bad = [NonFiniteRecord(2, "w", 0, 5, 5, 0, 0)]
    app = open_page("loss_scale", run=written(store_path, steps, bad, "fp16-noscaler"))
    assert not app.exception
    words = texts(app)
    assert "No loss scale was used in 4 steps." in words
    assert "This run has no loss scale." in words
    assert metrics(app)["Scale at the end"] == "none"
    assert "At 1 step gradients held NaN or Inf and the optimizer stepped anyway." in words


def test_nothing_to_table(store_path: Path, open_page: Open) -> None:
    app = open_page("loss_scale", run=written(store_path, trajectory([4] * 5, set())))
    assert "No step was skipped, and no gradient held NaN or Inf." in texts(app)
    assert not app.dataframe


def test_a_step_of_nothing(store_path: Path, open_page: Open) -> None:
    app = open_page("loss_scale", run=written(store_path, [StepRecord(0)]))
    assert not app.exception
    assert "nan%" not in texts(app).lower().replace(" ", "")


@pytest.mark.parametrize("state", ["running", "failed", "cancelled", "lost", "finished"])
def test_every_state_shows_what_there_is(store_path: Path, open_page: Open, state: str) -> None:
    app = open_page("loss_scale", run=getattr(stores, state)(store_path))
    assert not app.exception
    assert len(app.metric) == 4


@pytest.mark.parametrize("state", ["queued", "failed"])
def test_no_step_yet(store_path: Path, open_page: Open, state: str) -> None:
    made = stores.queued(store_path) if state == "queued" else stores.failed(store_path, steps=0)
    app = open_page("loss_scale", run=made)
    assert not app.exception
    assert not app.metric


@pytest.mark.parametrize("first", ["\u00b2", "9" * 5000, "-1", "1e3", "\u0663"])
def test_an_address_that_asks_for_no_step(store_path: Path, open_page: Open, first: str) -> None:
    run = stores.finished(store_path)
    for page, name in (("loss_scale", "first"), ("gradients", "step")):
        app = open_page(page, **{"run": run, name: first})
        assert not app.exception, page
        assert len(app.metric) > 0, page


def test_an_empty_store(open_page: Open) -> None:
    app = open_page("loss_scale")
    assert not app.exception
    assert NO_RUN in texts(app)


def test_names_are_text(store_path: Path, open_page: Open) -> None:
    app = open_page("loss_scale", run=stores.hostile(store_path))
    assert not app.exception
    raw = " ".join(e.value for kind in ("markdown", "subheader", "caption") for e in app.get(kind))
    assert "<script>" not in raw
    assert "<img" not in raw


def test_the_lab_replays_the_run_at_its_own_settings_by_default(
    open_page: Open, store_path: Path
) -> None:
    spec = RunSpec("gpt", precision="fp16", steps=25, scaler=ScalerSpec(2.0**24))
    run_id = launch(spec, store_path)
    assert wait_until(store_path, run_id).state is State.FINISHED
    with Reader(store_path) as reader:
        skipped = sum(step.skipped for step in reader.steps(run_id))
    app = open_page("loss_scale", run=run_id, first_scale=24)
    assert not app.exception
    said_now = [m.value.replace("\\", "").replace("\u2060", "") for m in app.markdown]
    said = f"PyTorch GradScaler would skip {skipped} steps (recorded: {skipped:,})"
    assert skipped > 1
    assert any(said in text for text in said_now), said_now
    assert any("GradScaler(init_scale=" in text for text in said_now)
    app = open_page("loss_scale", run=run_id, first_scale=24, policy="keras", interval=5)
    assert not app.exception
    assert any("Keras 3 LossScaleOptimizer would skip" in m.value for m in app.markdown)


def test_the_lab_offers_settings_that_only_this_run_has(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first scale that is no power of two, and an interval and factors that nobody else takes:
    the replay gives the scales that follow from them, 1,000 and three times that every 4 steps."""
    own = ScalerSpec(1000.0, growth_factor=3.0, backoff_factor=0.3, growth_interval=4)
    scales = [1000.0] * 4 + [3000.0] * 4 + [9000.0] * 2
    steps = [StepRecord(n, loss=1.0, scale=s, skipped=False) for n, s in enumerate(scales)]
    writer = RunWriter.create(store_path, replace(stores.SPEC, scaler=own))
    writer.start(stores.MACHINE)
    rows = np.zeros((1, RAW_LEN), np.int64)
    rows[0, FIRST + 140] = 5
    for step in steps:
        writer.add_step(step)
        writer.add_frame(Frame(step.step, Role.GRAD_OUTPUT, (0,), ("fp16",), rows, step.scale or 1))
    writer.finish(State.FINISHED)
    writer.close()
    made: list[Replay] = []
    monkeypatch.setattr(
        "ampscope.scalers.replay.replay",
        lambda *given: made.append(replay(*given)) or made[-1],
    )
    address = {"first_scale": math.log2(1000), "interval": 4, "growth": 3.0, "backoff": 0.3}
    app = open_page("loss_scale", run=writer.run_id, **address)
    assert not app.exception
    assert [step.scale for step in made[-1].steps] == scales
    assert "1,000" in app.selectbox(key="widget:first_scale").options
    assert not any("is not there" in m.value for m in app.markdown)
    assert not any("diverges from" in c.value for c in app.caption)
    plain = open_page("loss_scale", run=written(store_path, steps))
    assert "1,000" not in str([box.options for box in plain.selectbox])


def test_a_replay_that_parts_from_the_recording_says_so(open_page: Open, store_path: Path) -> None:
    """Two scalers in one run, step by step in turn, as two optimizers of a GAN have them."""
    steps = [
        StepRecord(n, loss=1.0, scale=2.0 ** (16 if n % 2 else 12), skipped=False) for n in range(6)
    ]
    run_id = written(store_path, steps)
    writer = RunWriter(store_path, run_id)
    rows = np.zeros((1, RAW_LEN), np.int64)
    rows[0, FIRST + 140] = 5
    for step in steps:
        writer.add_frame(Frame(step.step, Role.GRAD_OUTPUT, (0,), ("fp16",), rows, step.scale or 1))
    writer.close()
    app = open_page("loss_scale", run=run_id)
    assert not app.exception
    captions = [c.value.replace("\\", "") for c in app.caption]
    assert any("diverges from the recording at step 1" in text for text in captions), captions


def test_many_histograms_are_read_when_they_are_asked_for(
    open_page: Open, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = stores.finished(store_path)
    monkeypatch.setattr("app.loss_scale.AT_ONCE", 0)
    app = open_page("loss_scale", run=run_id)
    assert not app.exception
    assert "would skip" not in texts(app)
    assert "For these gradients:" not in texts(app)
    assert app.toggle(key="loss-scale:lab").label == "Replay other scalers on all 12 recorded steps"
    app.toggle(key="loss-scale:lab").set_value(True)
    app.toggle(key="loss-scale:advice").set_value(True).run()
    assert "would skip" in texts(app)
    assert "For these gradients:" in texts(app)
    assert "would skip" in texts(open_page("loss_scale", run=run_id, lab="on"))


def framed(store: Path, steps: Sequence[StepRecord], output: int, weight: int) -> str:
    """A run whose gradients, scaled, lie at 2^output and 2^weight in its last step."""
    run_id, last = written(store, steps), steps[-1]
    writer = RunWriter(store, run_id)
    for role, exponent, dtype in (
        (Role.GRAD_OUTPUT, output, "fp16"),
        (Role.WEIGHT_GRAD, weight, "fp32"),
    ):
        rows = np.zeros((1, RAW_LEN), np.int64)
        rows[0, FIRST + 149 + exponent] = 5
        writer.add_frame(Frame(last.step, role, (0,), (dtype,), rows, last.scale or 1))
    writer.close()
    return run_id


@pytest.mark.parametrize(
    ("exponents", "skipped", "output", "weight", "scale"),
    [
        ([14] * 4, set(), -10, -10, 24),  # far more would do
        ([14] * 4, set(), -10, 12, 16),  # 2^12 in weight gradients leaves two doublings below 2^15
        ([16, 15, 14, 14], {0, 1}, -10, -10, 14),  # whatever the histograms say: 2^15 was skipped
    ],
)
def test_the_advised_scale(
    store_path: Path,
    open_page: Open,
    exponents: list[int],
    skipped: set[int],
    output: int,
    weight: int,
    scale: int,
) -> None:
    run_id = framed(store_path, trajectory(exponents, skipped), output, weight)
    app = open_page("loss_scale", run=run_id)
    assert not app.exception
    assert f"GradScaler(init_scale=2.0**{scale}," in texts(app)
    assert "keep the output and weight gradients of every module in fp16" in texts(app)
    app = open_page("gradients", run=run_id, role="grad_output")
    assert "keep the output gradients of every module in fp16" in texts(app)


@pytest.mark.parametrize(("capability", "or_bf16"), [("8.0", ", or use bf16."), ("7.5", ".")])
def test_gradients_that_no_scale_of_one_or_more_suits_get_no_scaler_advised(
    store_path: Path,
    open_page: Open,
    capability: str,
    or_bf16: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bf16 is advice where the GPU does not emulate it."""
    there = replace(stores.MACHINE, device="cuda:0", policy="cuda", capability=capability)
    monkeypatch.setattr(stores, "MACHINE", there)
    run_id = framed(store_path, trajectory([14] * 4, set()), 6, 34)  # unscaled 2^20
    said = texts(open_page("loss_scale", run=run_id))
    assert "No loss scale of 1 or more keeps these gradients in fp16" in said
    assert f"find the step where they grew{or_bf16}" in said
    assert "GradScaler(init_scale" not in said


def test_a_skip_without_a_proved_cause_says_where_and_what_to_record(
    store_path: Path, open_page: Open
) -> None:
    steps = trajectory([13] * 20, {9})  # the steps beside it were taken at the same scale
    bad = [NonFiniteRecord(9, "block.bias", 0, 10, 0, 1, 2)]
    app = open_page("loss_scale", run=written(store_path, steps, bad))
    table = app.dataframe[0].value
    assert list(table["Why"]) == ["not known without an fp32 shadow of this step"]
    assert list(table["First in backward"]) == ["block.bias"]
    assert "unclear" not in texts(app)


@pytest.mark.parametrize("points", [2000, 30])
def test_a_shown_part_that_begins_with_an_overflow_is_no_calibration(
    store_path: Path, open_page: Open, monkeypatch: pytest.MonkeyPatch, points: int
) -> None:
    """Steps 0 and 1 are the search; the overflow at step 50 came at a scale that had held. A run of
    more than ``points`` steps is not read whole."""
    monkeypatch.setattr(app_store, "POINTS", points)
    steps = trajectory([16, 15] + [14] * 49 + [13] * 29, {0, 1, 50})
    run_id = written(store_path, steps)
    (whole,) = (d.value for d in open_page("loss_scale", run=run_id).dataframe)
    why = dict(zip(whole["Step"], whole["Why"], strict=True))
    assert why == {
        0: "calibration",
        1: "calibration",
        50: "not known without an fp32 shadow of this step",
    }
    (part,) = (d.value for d in open_page("loss_scale", run=run_id, first=50, last=70).dataframe)
    assert dict(zip(part["Step"], part["Why"], strict=True)) == {50: why[50]}


def test_the_sentence_on_scales_says_that_it_excludes_the_loss(
    store_path: Path, open_page: Open
) -> None:
    """Its gradient is the loss scale itself, in fp32: beyond fp16's largest number at 2^16."""
    steps = trajectory([16] * 2, set())
    run_id, last = written(store_path, steps), steps[-1]
    rows = np.zeros((2, RAW_LEN), np.int64)
    rows[:, FIRST + 149 + 0], rows[1] = 5, 0
    rows[1, FIRST + 149 + 16] = 1
    writer = RunWriter(store_path, run_id)
    made = Frame(last.step, Role.GRAD_OUTPUT, (0, 1), ("fp16", "fp32"), rows, 2.0**16)
    writer.add_frame(made)
    writer.close()
    found = texts(open_page("gradients", run=run_id, role="grad_output"))
    assert "1 (16.7 %) overflow fp16" in found
    assert "every module in fp16" in found
    assert "Excluded, with gradients in fp32: " in found
    assert "The zones count them too." in found
    assert "Excluded, with gradients in fp32: " in texts(open_page("loss_scale", run=run_id))


def test_of_many_modules_those_that_decide_are_drawn() -> None:
    windows = [ModuleWindow(n, low=-n % 50, high=60 + n % 37) for n in range(200)]
    kept = least_room(windows)
    assert len(kept) <= 30
    assert max(w.low for w in kept) == max(w.low for w in windows)
    assert min(w.high for w in kept) == min(w.high for w in windows)
    assert [w.module for w in kept] == sorted(w.module for w in kept)
    assert least_room(windows[:30]) == windows[:30]


@pytest.mark.parametrize(
    ("low", "high", "says", "bands"),
    [
        (3, 9, "loss scales from 2^3 to 2^9 keep the", 1),
        (9, 9, "the loss scale 2^9 alone keeps the", 1),
        (9, 3, "No single loss scale suits every module", 0),
    ],
)
def test_the_band_is_seen_where_one_scale_alone_suits_all(
    low: int, high: int, says: str, bands: int
) -> None:
    names = {0: "a", 1: "b"}
    assert says in window_sentence(
        ScaleWindow(low, high, 0, 1, ()), names, "fp16", "output gradients"
    )
    figure = scale_windows([ModuleWindow(0, low, 20), ModuleWindow(1, -20, high)], names, None)
    drawn = [shape for shape in figure.layout.shapes if shape.type == "rect"]
    assert len(drawn) == bands
    assert all(shape.line.width > 0 and (shape.x0, shape.x1) == (low, high) for shape in drawn)
