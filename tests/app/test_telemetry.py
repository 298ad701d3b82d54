"""The Telemetry page in every state, and the live curves on Hardware."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampscope.records import Sample, State, StepRecord
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from ampscope.telemetry.values import DeviceLost, SampleValues
from app import hardware, store, telemetry
from app.figures.telemetry import telemetry_figure
from tests.helpers import stores
from tests.helpers.pages import NO_RUN, metrics, texts
from tests.helpers.telemetry_samples import BEGIN, cpu, gpu, throttled

Open = Callable[..., Any]
UNDISTURBED = "Nothing was read that would make the times of its steps doubtful."


def recorded(path: Path, samples: Sequence[Sample], state: State | None = State.FINISHED) -> str:
    """A run of 20 steps of 0.5 s from :data:`BEGIN` on, with ``samples``."""
    writer = RunWriter.create(path, replace(stores.SPEC, steps=20))
    writer.start(stores.MACHINE)
    writer._update(started=BEGIN)
    for n in range(20):
        ended_at = BEGIN + 0.5 * (n + 1)
        writer.add_step(StepRecord(n, loss=1.0, step_time_s=0.5, ended_at=ended_at))
    writer.add_samples(samples)
    writer.flush()
    if state is not None:
        writer.finish(state, "" if state is State.FINISHED else "It broke.")
    writer.close()
    return writer.run_id


def test_an_empty_store(open_page: Open) -> None:
    app = open_page("telemetry")
    assert not app.exception
    assert NO_RUN in texts(app)


def test_a_cpu_run(store_path: Path, open_page: Open) -> None:
    app = open_page("telemetry", run=recorded(store_path, cpu(10, busy=96.0, own=94.5)))
    assert not app.exception
    words = texts(app)
    assert "The CPU was 96.0 % busy: the run took 94.5 %, other processes 1.5 %." in words
    assert UNDISTURBED in words
    assert not app.warning
    assert metrics(app) == {
        "Other processes": "1.5 %",
        "Peak memory": "2,048.0 MiB",
        "Energy": "not readable",
        "Clock": "2,600 MHz",
    }


def test_a_probes_memory_says_that_its_instruments_are_in_it(
    store_path: Path, open_page: Open
) -> None:
    """On CUDA the fp32 shadow alone may double it."""
    app = open_page("telemetry", run=recorded(store_path, gpu(10)))
    (memory,) = [m for m in app.metric if m.label == "Peak memory"]
    assert "shadow" in memory.help


def test_a_gpu_that_was_held_back(store_path: Path, open_page: Open) -> None:
    held = throttled(gpu(10), "power cap", 1, 41)
    run_id = recorded(store_path, [*held, *cpu(10)])
    app = open_page("telemetry", run=run_id)
    words = texts(app)
    assert "The GPU cuda:0 was 95.0 % busy at 300 W and 1,695 MHz." in words
    assert [w.value.replace("\\", "").replace("\u2060", "") for w in app.warning] == [
        "cuda:0 was held back: power cap in 50.0 % of the time (clock 1,410 to 1,980 MHz)."
    ]
    assert UNDISTURBED not in words
    assert metrics(app)["Energy"] == "3,000 J"
    other = open_page("telemetry", run=run_id, device="cpu")
    assert "The CPU was 90.0 % busy" in texts(other)


@pytest.mark.parametrize("state", [None, State.FAILED, State.CANCELLED])
def test_a_run_that_is_not_finished(store_path: Path, open_page: Open, state: State | None) -> None:
    app = open_page("telemetry", run=recorded(store_path, cpu(3), state))
    assert not app.exception
    assert ("So far the CPU was" if state is None else "The CPU was") in texts(app)


def test_a_device_s_name_from_elsewhere_is_shown_as_text(store_path: Path, open_page: Open) -> None:
    """The buttons of a segmented control render Markdown, and a picture in it would be fetched."""
    names = [f"![x](http://127.0.0.1:9/{n}.png)" for n in range(2)]
    samples = [replace(s, device=name) for name in names for s in cpu(3)]
    app = open_page("telemetry", run=recorded(store_path, samples))
    assert not app.exception
    assert app.selectbox(key="widget:device").options == names
    assert not app.get("button_group")


def test_a_run_without_readings(store_path: Path, open_page: Open) -> None:
    words = texts(open_page("telemetry", run=recorded(store_path, [])))
    assert "The machine was not read beside this run." in words
    assert "AMPSCOPE_TELEMETRY=0" in words


def test_readings_in_which_nothing_is_known(store_path: Path, open_page: Open) -> None:
    bare = [Sample("cpu", BEGIN + n) for n in range(5)]
    app = open_page("telemetry", run=recorded(store_path, bare))
    assert not app.exception
    assert "could not be read on this machine" in texts(app)


def test_one_reading_of_a_gpu(store_path: Path, open_page: Open) -> None:
    app = open_page("telemetry", run=recorded(store_path, gpu(0)))
    assert not app.exception
    assert "The GPU cuda:0 was read." in texts(app)


def test_curves_are_aligned_with_the_steps() -> None:
    """The axis above names steps where they ended, on the same scale as the one below."""
    steps = [StepRecord(n, ended_at=BEGIN + 0.5 * (n + 1)) for n in range(20)]
    figure = telemetry_figure(throttled(gpu(10), "power cap", 9, 17), BEGIN, (), steps)
    (above,) = [axis for axis in figure.select_xaxes() if axis.ticktext]
    assert above.matches == "x"
    ticks = dict(zip(above.tickvals, above.ticktext, strict=True))
    assert ticks[0.5] == "step 0"
    assert all(x == 0.5 * (int(text.split()[-1]) + 1) for x, text in ticks.items())
    (held,) = [trace for trace in figure.data if trace.text and "power cap" in trace.text]
    marked = [x for x, y in zip(held.x, held.y, strict=True) if y is not None]
    assert (min(marked), max(marked)) == (9 / 8, 16 / 8)


def test_no_step_between_two_readings() -> None:
    """A run of 12 small steps is over before the second reading."""
    steps = [StepRecord(n, ended_at=BEGIN + 1000.0 + n) for n in range(3)]
    assert telemetry_figure(cpu(3), BEGIN, (), steps).data


def test_what_never_changed_has_no_panel() -> None:
    titles = [a.text for a in telemetry_figure(cpu(3), BEGIN).layout.annotations]
    assert titles == [
        "busy: all (dotted), the run (solid)",
        "memory: by all processes (dotted), the run's process (solid)",
    ]


def test_the_data_is_all_of_it_with_its_steps(store_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(store, "POINTS", 50)
    run_id = recorded(store_path, cpu(10))
    monkeypatch.setattr(store, "path", lambda: store_path)
    with Reader(store_path) as reader:
        info = reader.run(run_id)
    found = telemetry.read(info, "cpu")
    assert len(found.samples) <= 50
    table = telemetry.table(found)
    assert len(table) == 81
    assert list(table["seconds"][:3]) == [0.0, 0.125, 0.25]
    assert list(table["step"][[0, 1, 4, 5, 80]]) == [0, 0, 0, 1, 19]


@pytest.fixture
def fresh() -> Iterator[None]:
    hardware.recent.clear()
    yield
    hardware.recent.clear()


def test_the_live_curves_begin_with_a_look(open_page: Open, fresh: None) -> None:
    app = open_page("hardware")
    assert not app.exception
    assert "The curves of the last two minutes begin with this look." in texts(app)
    now = time.time()
    kept = hardware.recent(())
    kept.samples.extend(cpu(3, begin=now - 4))
    kept.samples.appendleft(replace(cpu(0)[0], at=now - 500))
    app = app.run()
    assert not app.exception
    assert "CPU, the last" in texts(app)
    assert min(s.at for s in kept.samples) > now - hardware.KEPT_S - 1


class Counting:
    """A device that counts how often it is read, and vanishes at the third time."""

    device = "GPU 0"

    def __init__(self) -> None:
        self.asked = 0

    def read(self, now: float) -> SampleValues:
        self.asked += 1
        if self.asked == 3:
            raise DeviceLost("GPU 0 stopped answering NVML (lost).")
        return {"power_w": float(self.asked)}

    def close(self) -> None:
        pass


def test_it_is_read_once_for_all_browsers_and_only_while_somebody_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(hardware.time, "time", lambda: clock[0])
    device = Counting()
    kept = hardware.RecentReadings([device], [])
    assert kept.update() == []  # what it says is of the time before somebody looked
    assert (kept.update(), device.asked) == ([], 1)  # another browser, at the same moment
    clock[0] += 2
    assert [s.power_w for s in kept.update()] == [2.0]
    clock[0] += 2
    assert [s.power_w for s in kept.update()] == [2.0]
    assert kept.problems == ["GPU 0 stopped answering NVML (lost)."]
    clock[0] += 121
    assert (kept.update(), device.asked) == ([], 3)
