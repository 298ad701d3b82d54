"""Long runs: no bad step lost, extremes kept, counts exact, histograms conserved.

The oracle is every record that was written, in plain Python.
"""

from __future__ import annotations

import math
import tempfile
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampscope.numerics.histogram import NAN, RAW_LEN
from ampscope.records import Frame, Role, RunSpec, StepRecord, StepTotals
from ampscope.store import frame_thinning
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter

WATCH = RunSpec("train.py", kind="watch")
LOSS = st.one_of(
    st.none(),
    st.sampled_from([math.nan, math.inf, -math.inf, 1.0]),
    st.integers(-900, 900).map(lambda n: n / 64),
)
SCALE = st.sampled_from([None, 1.0, 2.0**16, 2.0**15, math.nan, math.inf])


@st.composite
def runs(draw: st.DrawFn) -> list[StepRecord]:
    """Up to 1,500 steps made of stretches that are alike, with gaps, disorder and re-writes."""
    steps: list[StepRecord] = []
    number = draw(st.sampled_from([0, 1, 40_000, 262_100]))
    for _ in range(draw(st.integers(0, 8))):
        scale, skipped = draw(SCALE), draw(st.booleans())
        losses = draw(st.lists(LOSS, min_size=1, max_size=4))
        norm = draw(st.sampled_from([None, 1.0, math.inf, math.nan]))
        stride = draw(st.sampled_from([1, 1, 1, 2, 70]))
        for at in range(draw(st.integers(1, 180))):
            loss = losses[at % len(losses)]
            steps.append(
                StepRecord(
                    number,
                    loss=loss,
                    scale=scale,
                    skipped=skipped and at % 5 == 0,
                    grad_norm=norm if at % 7 == 0 else 1.0,
                    step_time_s=0.5,
                    overhead_s=0.125,
                )
            )
            number += stride
    for at in draw(st.lists(st.integers(0, max(len(steps) - 4, 0)), max_size=4)):
        if at + 3 < len(steps):
            steps[at], steps[at + 3] = steps[at + 3], steps[at]  # out of order by a few
    rewritten = draw(st.lists(st.integers(0, 1500), max_size=3))
    return steps + [
        StepRecord(steps[at].step, loss=draw(LOSS), scale=draw(SCALE))
        for at in rewritten
        if at < len(steps)
    ]


def is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def is_bad(step: StepRecord) -> bool:
    return step.skipped or not is_finite(step.loss) or not is_finite(step.grad_norm)


def changes(steps: list[StepRecord]) -> set[int]:
    return {b.step for a, b in pairwise(steps) if str(a.scale) != str(b.scale)}


def ends_of_episodes(steps: list[StepRecord]) -> set[int]:
    """Of bad steps in a row, within blocks of 16 step numbers."""
    ends = set()
    for (_, bad), group in groupby(steps, key=lambda s: (s.step // 16, is_bad(s))):
        members = list(group)
        if bad:
            ends |= {members[0].step, members[-1].step}
    return ends


def written(folder: str, steps: list[StepRecord], per_flush: int) -> tuple[Path, str]:
    path = Path(folder) / "runs.db"
    writer = RunWriter.create(path, WATCH)
    for at, step in enumerate(steps):
        writer.add_step(step)
        if at % per_flush == 0:
            writer.flush()
    writer.close()
    return path, writer.run_id


@given(runs(), st.integers(1, 200))
@settings(max_examples=120)
def test_totals_are_exact(given_steps: list[StepRecord], per_flush: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, run = written(folder, given_steps, per_flush)
        with Reader(path) as reader:
            totals, info = reader.step_totals(run), reader.run(run)
    steps = sorted({s.step: s for s in given_steps}.values(), key=lambda s: s.step)
    bad = [s.step for s in steps if is_bad(s)]
    scales = [s.scale for s in steps if s.scale is not None]
    expected = StepTotals(
        steps=len(steps),
        skipped=sum(s.skipped for s in steps),
        nonfinite_losses=sum(not is_finite(s.loss) for s in steps),
        nonfinite_norms=sum(not is_finite(s.grad_norm) for s in steps),
        bad=len(bad),
        scale_changes=len(changes(steps)),
        first_step=steps[0].step if steps else None,
        last_step=steps[-1].step if steps else None,
        first_bad=bad[0] if bad else None,
        last_bad=bad[-1] if bad else None,
        last_scale=scales[-1] if scales else None,
    )
    assert str(totals) == str(expected)  # as text: NaN is not equal to itself
    timed = [s for s in steps if s.step and s.step_time_s is not None]
    assert info.overhead_share == (0.2 if timed else None)


@given(runs(), st.integers(1, 200), st.integers(4, 300), st.data())
@settings(max_examples=200)
def test_an_overview_loses_nothing_that_matters(
    given_steps: list[StepRecord], per_flush: int, points: int, data: st.DataObject
) -> None:
    every = sorted({s.step: s for s in given_steps}.values(), key=lambda s: s.step)
    number = st.none() | st.sampled_from([s.step for s in every] or [0])
    first, last = data.draw(number), data.draw(number)
    with tempfile.TemporaryDirectory() as folder:
        path, run = written(folder, given_steps, per_flush)
        with Reader(path) as reader:
            shown = reader.overview(run, points, first, last)
    steps = [
        s for s in every if (first is None or s.step >= first) and (last is None or s.step <= last)
    ]
    known = {s.step: str(s) for s in steps}
    assert [s.step for s in shown] == sorted({s.step for s in shown})
    assert all(known[s.step] == str(s) for s in shown)  # real records, unchanged
    if len(steps) <= points:
        assert len(shown) == len(steps)
        return
    assert len(shown) <= 3.5 * points + 8
    numbers = {s.step for s in shown}
    assert {steps[0].step, steps[-1].step} <= numbers
    check_extremes(steps, shown, points)
    bad = {s.step for s in steps if is_bad(s)}
    if len(bad) <= points // 2:
        assert bad <= numbers
    elif len(ends_of_episodes(steps)) <= points // 2:
        assert ends_of_episodes(steps) <= numbers
    else:
        assert {min(bad), max(bad)} <= numbers
    inside = {s.step for s in steps[1:]} & changes(every)
    if len(inside) < points // 2:
        assert inside <= numbers


def check_extremes(steps: list[StepRecord], shown: list[StepRecord], points: int) -> None:
    """Near each step is a shown one whose loss is as high, and one whose loss is as low: within
    three times the share of the steps that a point stands for."""
    wanted = max(points // 2, 1)
    reach = 3 * (steps[-1].step - steps[0].step) // wanted + 2
    place = {s.step: n for n, s in enumerate(steps)}
    kept = [(place[s.step], s.loss) for s in shown if s.loss is not None and math.isfinite(s.loss)]
    for at, step in enumerate(steps):
        if step.loss is None or not math.isfinite(step.loss):
            continue
        near = [loss for where, loss in kept if abs(where - at) <= reach]
        assert near, step
        assert min(near) <= step.loss <= max(near)


@pytest.mark.parametrize("points", [100, 400])
def test_what_is_shown_does_not_depend_on_the_length(tmp_path: Path, points: int) -> None:
    rng = np.random.default_rng(0)
    writer = RunWriter.create(tmp_path / "runs.db", RunSpec("train.py", kind="watch"))
    shown, before = {}, 0
    for length in (points + 1, 2 * points, 17 * points, 40 * points, 70 * points):
        losses = rng.normal(size=length - before)
        for step, loss in enumerate(losses, start=before):
            writer.add_step(StepRecord(step, loss=float(loss)))
        writer.flush()
        before = length
        with Reader(tmp_path / "runs.db") as reader:
            shown[length] = len(reader.overview(writer.run_id, points))
    writer.close()
    assert max(shown.values()) <= 1.05 * min(shown.values()), shown
    assert max(shown.values()) <= points + 2


@st.composite
def recorded(draw: st.DrawFn) -> list[tuple[StepRecord, Frame | None]]:
    """Steps with frames at every k-th; scale, badness and modules change now and then."""
    out: list[tuple[StepRecord, Frame | None]] = []
    every = draw(st.sampled_from([1, 3]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    badness = draw(st.sampled_from([0.0, 0.02, 0.3]))
    for step in range(draw(st.integers(1, 160))):
        skipped = bool(rng.random() < badness)
        scale = 2.0 ** (16 + step // 61)
        frame = None
        if step % every == 0 or skipped:
            modules = (0, 4) if rng.random() < 0.9 else (4, 0, 7)
            rows = np.zeros((len(modules), RAW_LEN), np.int64)
            rows[:, rng.integers(1, 270, 9)] = rng.integers(0, 2**40, 9)
            rows[0, NAN] = rng.random() < badness
            dtypes = ("fp16", "fp32", "fp16")[: len(modules)]
            frame = Frame(step, Role.WEIGHT_GRAD, modules, dtypes, rows, scale)
        out.append((StepRecord(step, scale=scale, skipped=skipped), frame))
    return out


def by_key(frame: Frame) -> dict[tuple[int, str], list[int]]:
    sums: dict[tuple[int, str], np.ndarray] = {}
    for module, dtype, row in zip(frame.modules, frame.dtypes, frame.rows, strict=True):
        sums[module, dtype] = sums.get((module, dtype), 0) + row
    return {key: row.tolist() for key, row in sums.items()}


@given(recorded(), st.integers(1, 60))
@settings(max_examples=150)
def test_frames_are_added_up_and_nothing_is_lost(
    given_run: list[tuple[StepRecord, Frame | None]], per_flush: int
) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(frame_thinning, "NEWEST", 8)
        patch.setattr(frame_thinning, "KEPT", 16)
        path = Path(folder) / "runs.db"
        writer = RunWriter.create(path, WATCH)
        for at, (step, frame) in enumerate(given_run):
            if frame is not None:
                writer.add_frame(frame)  # before its step, as the instruments may have it
            writer.add_step(step)
            if at % per_flush == 0:
                writer.flush()
        writer.close()
        with Reader(path) as reader:
            stored = list(reader.frames(writer.run_id, Role.WEIGHT_GRAD))
            covering = [
                reader.frame(writer.run_id, Role.WEIGHT_GRAD, step.step) for step, _ in given_run
            ]
    frames = [frame for _, frame in given_run if frame is not None]
    bad = {step.step for step, _ in given_run if step.skipped}
    bad |= {f.step for f in frames if f.rows[:, NAN].any()}
    parts = 0
    for kept in stored:
        last = kept.step if kept.last_step is None else kept.last_step
        inside = [f for f in frames if kept.step <= f.step <= last]
        parts += len(inside)
        assert {f.scale for f in inside} == {kept.scale}
        assert by_key(kept) == sums_of(inside)
        if kept.last_step is not None:
            assert len(inside) > 1
            assert not bad & set(range(kept.step, last + 1))
            assert inside[-1].step == last
    assert parts == len(frames)  # each is in one frame and no other
    assert [f.step for f in stored[-8:]] == [f.step for f in frames[-8:]]
    assert all(f.last_step is None for f in stored[-8:])
    segments = 1 + len(bad) + 3  # stretches without a bad step or a change of scale
    assert len(stored) <= 16 + 2 * segments
    for (step, frame), found in zip(given_run, covering, strict=True):
        if frame is not None:
            assert found is not None
            last = found.step if found.last_step is None else found.last_step
            assert found.step <= step.step <= last


def sums_of(frames: list[Frame]) -> dict[tuple[int, str], list[int]]:
    total: dict[tuple[int, str], list[int]] = {}
    for frame in frames:
        for key, row in by_key(frame).items():
            total[key] = [a + b for a, b in zip(total.get(key, [0] * RAW_LEN), row, strict=True)]
    return total


def one_row(step: int, role: Role = Role.WEIGHT) -> Frame:
    rows = np.zeros((1, RAW_LEN), np.int64)
    rows[0, 150] = 1
    return Frame(step, role, (0,), ("fp32",), rows)


def test_a_long_run_keeps_about_512_frames_and_halves_with_age(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "s.db", WATCH)
    for step in range(6000):
        writer.add_step(StepRecord(step, loss=1.0))
        writer.add_frame(one_row(step))
        if step % 10 == 9:
            writer.flush()
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        spans = reader.frame_spans(writer.run_id, Role.WEIGHT)
        assert sum(int(f.rows.sum()) for f in reader.frames(writer.run_id, Role.WEIGHT)) == 6000
    assert len(spans) == 512
    assert all(first == last for first, last in spans[-256:])
    for first, last in spans[:-256]:
        assert last - first + 1 <= 0.1 * (6000 - last)  # a tenth of its age at most
    assert [last + 1 for _, last in spans[:-1]] == [first for first, _ in spans[1:]]


def test_probes_stay_as_they_were_recorded(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "s.db", RunSpec("gpt"))
    for step in range(600):
        writer.add_frame(one_row(step))
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        assert reader.frame_steps(writer.run_id, Role.WEIGHT) == list(range(600))


def test_a_frame_that_is_written_again_after_it_was_added_up_counts_once(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "s.db", WATCH)
    for step in [*range(1500), 0, 1, 2, 1499]:
        writer.add_frame(one_row(step))
    writer.flush()
    for step in (0, 1, 3):
        writer.add_frame(one_row(step))
    writer.close()
    with Reader(tmp_path / "s.db") as reader:
        assert sum(int(f.rows.sum()) for f in reader.frames(writer.run_id, Role.WEIGHT)) == 1500


@given(st.lists(st.integers(1, 90), min_size=1, max_size=9), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_ranks_that_record_alike_thin_alike(pauses: list[int], seed: int) -> None:
    """Whenever each of them flushes."""
    skipped = set(np.random.default_rng(seed).integers(0, 200, 5).tolist())
    spans = []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(frame_thinning, "NEWEST", 8)
        patch.setattr(frame_thinning, "KEPT", 16)
        for rank, flushes in enumerate(([1], pauses)):
            path = Path(folder) / f"{rank}.db"
            writer = RunWriter.create(path, WATCH)
            next_flush = 0
            for step in range(200):
                writer.add_step(StepRecord(step, skipped=step in skipped))
                writer.add_frame(one_row(step))
                if step >= next_flush:
                    writer.flush()
                    next_flush = step + flushes[step % len(flushes)]
            writer.close()
            with Reader(path) as reader:
                spans.append(reader.frame_spans(writer.run_id, Role.WEIGHT))
    assert spans[0] == spans[1]
    assert len(spans[0]) < 40
