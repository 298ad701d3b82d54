"""Sixty students on one machine while a probe runs: latency, memory, and what it costs the probe.

    python benchmarks/classroom_load.py      # results/classroom_load.json; about six minutes

One probe (`ampscope probe gpt --size tiny`) runs all the time. Sixty sessions speak the browser's
protocol (classroom_browser.py): each opens a lesson, then acts every 5 to 10 s as a person does who
looks before the next move: nine times in ten a slider, else another lesson. Their lessons were
measured before the class, as docs/classroom.md tells the teacher to do. Latency is from sending to
the end of the script that answers. The probe's steps are read from its store by the time at which
they ended: without the class, with it, without, with, without. Browsers draw on machines of their
own in life; here only their network side runs, on the same cores (`clients_cpu_share`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from classroom_browser import Tab, opened
from contest import setting

from ampscope.ext.lessons.catalog import LESSONS, lesson_spec
from ampscope.launcher.children import child_environment
from ampscope.launcher.launch import follow, launch
from ampscope.records import State
from ampscope.store import sharing
from ampscope.store.reader import Reader

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tests' way of waiting for a dashboard

from app.ext.lessons.lesson_page import LESSON_ENTRIES  # noqa: E402  - needs the path set above
from tests.helpers.browser import _free_port, _wait_until_healthy  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "classroom_load.json"
CLIENTS = int(os.environ.get("CLIENTS", "60"))
THINKING_S = (5.0, 10.0)
ANOTHER_LESSON = 0.1
ALONE_S = float(os.environ.get("ALONE_S", "30"))
LOADED_S = float(os.environ.get("LOADED_S", "90"))
ARRIVAL_S = 20.0  # a class does not click its link in the same instant; not counted as loaded
GOALS = {"errors": 0, "median_s": 0.1, "p95_s": 0.5, "memory_gb": 3.0, "step_time_ratio": 1.2}


@dataclass
class Class:
    """What the sessions saw."""

    opening_s: list[float] = field(default_factory=list)
    moving_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended from outside."))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        store = Path(os.environ.get("STORE", Path(folder) / "runs.db"))  # with lessons measured
        pages = prepared(store)
        server, url = stack.enter_context(serving(store, Path(folder)))
        run_id = stack.enter_context(probing(store))
        room, spans = Class(), list[tuple[str, float, float]]()
        time.sleep(ALONE_S / 2)  # caches, and the first steps
        for _ in range(2):
            spans.append(("alone", time.time(), pause(ALONE_S)))
            spans.append(("with the class", *asyncio.run(attended(url, pages, server, room))))
        spans.append(("alone", time.time(), pause(ALONE_S)))
        steps = step_times(store, run_id, spans)
    report(room, steps)


def prepared(store: Path) -> list[str]:
    """Measure the lessons; their addresses."""
    pages = []
    for lesson, entry in zip(LESSONS.values(), LESSON_ENTRIES.values(), strict=True):
        if lesson.is_measured:
            spec = lesson_spec(lesson.id)
            known = [run for run in sharing.of_spec(store, spec) if run.state is State.FINISHED]
            *_, info = known or follow(store, launch(spec, store))
            if info.state is not State.FINISHED:
                raise SystemExit(f"Lesson {lesson.id} {info.state}: {info.message}")
            pages.append(entry.name)
    return pages


@contextlib.contextmanager
def serving(store: Path, folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """``ampscope dashboard --classroom``."""
    port = _free_port()
    log = folder / "server.log"
    command = [sys.executable, "-m", "ampscope.cli.main", "dashboard", "--classroom", "--headless"]
    command += ["--port", str(port), "--store", str(store)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=child_environment(), start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_healthy(url, process, log)
        yield psutil.Process(process.pid), url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@contextlib.contextmanager
def probing(store: Path) -> Iterator[str]:
    """``ampscope probe``, from its first step on."""
    command = [sys.executable, "-m", "ampscope.cli.main", "probe", "gpt", "--size", "tiny"]
    command += ["--steps", "1000000", "--store", str(store)]
    command += ["--time-limit", "3600"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=child_environment()
    )
    try:
        yield _first_step(store)
    finally:
        process.send_signal(
            signal.SIGTERM
        )  # SIGINT is ignored where a shell runs this in the background
        process.wait(60)


def _first_step(store: Path) -> str:
    while True:
        with Reader(store) as reader:
            active = [run for run in reader.runs() if run.state.is_active]
        found = [run for run in active if run.spec.kind == "probe" and run.steps_done]
        if found:
            return found[0].id
        time.sleep(0.2)


def pause(seconds: float) -> float:
    time.sleep(seconds)
    return time.time()


async def attended(
    url: str, pages: list[str], server: psutil.Process, room: Class
) -> tuple[float, float]:
    """One lesson's worth of the class; when all were there, and when they left."""
    ends = time.monotonic() + ARRIVAL_S + LOADED_S
    students = [asyncio.create_task(student(n, url, pages, ends, room)) for n in range(CLIENTS)]
    await asyncio.sleep(ARRIVAL_S)
    started, before = time.time(), cpu_s(server)
    own = time.process_time()
    while time.monotonic() < ends:
        room.memory.append(memory(server))
        await asyncio.sleep(2.0)
    until = time.time()
    room.cpu = {
        "server": round((cpu_s(server) - before) / (until - started), 3),
        "clients": round((time.process_time() - own) / (until - started), 3),
    }
    await asyncio.gather(*students)
    return started, until


async def student(number: int, url: str, pages: list[str], ends: float, room: Class) -> None:
    """Opens a lesson, moves its slider, reads on."""
    chance = random.Random(number)
    await asyncio.sleep(chance.uniform(0, ARRIVAL_S * 0.75))
    tab: Tab | None = None
    try:
        tab = await opened(url)
        room.opening_s.append(await lesson(tab, chance.choice(pages)))
        while True:
            await asyncio.sleep(chance.uniform(*THINKING_S))
            if time.monotonic() > ends:
                break
            sliders = [id_ for id_, widget in tab.widgets.items() if widget.kind == "slider"]
            if chance.random() < ANOTHER_LESSON or not sliders:
                room.opening_s.append(await lesson(tab, chance.choice(pages)))
            else:
                id_ = chance.choice(sliders)
                room.moving_s.append(await tab.set(id_, chance.choice(tab.widgets[id_].options)))
    except Exception as error:
        room.errors.append(f"{type(error).__name__}: {error}")
    finally:
        if tab is not None:
            room.errors += tab.errors
            await tab.close()


async def lesson(tab: Tab, page: str) -> float:
    """With a prediction made, as the reader leaves it; the chart is there then."""
    number = int(page.split("_")[1])
    return await tab.open(page, **{f"guess{number}": "a"})


def tree(server: psutil.Process) -> list[psutil.Process]:
    """The server and what it has started; the probe is not among them."""
    return [server, *server.children(recursive=True)]


def memory(server: psutil.Process) -> dict[str, float]:
    """GB of the process tree."""
    parts = [process.memory_full_info() for process in tree(server)]
    return {
        "rss": sum(part.rss for part in parts) / 1e9,
        "pss": sum(part.pss for part in parts) / 1e9,
    }


def cpu_s(server: psutil.Process) -> float:
    times = [process.cpu_times() for process in tree(server)]
    return sum(t.user + t.system for t in times)


def step_times(
    store: Path, run_id: str, spans: list[tuple[str, float, float]]
) -> list[dict[str, object]]:
    """The probe's steps of each span: a step without its instruments, and the whole of it."""
    with Reader(store) as reader:
        steps = [s for s in reader.steps(run_id) if s.ended_at and s.step_time_s]
    found = []
    for name, first, last in spans:
        own = [s for s in steps if first <= (s.ended_at or 0) <= last]
        bare = [1000 * (s.step_time_s or 0) for s in own]
        whole = np.diff([s.ended_at or 0 for s in own]) * 1000
        found.append(
            {
                "span": name,
                "steps": len(own),
                "seconds": round(last - first, 1),
                "step_time_ms": round(float(np.median(bare)), 3),
                "step_time_ms_quartiles": [
                    round(float(q), 3) for q in np.percentile(bare, (25, 75))
                ],
                "whole_step_ms_mean": round(float(np.mean(whole)), 3),
            }
        )
    return found


def seconds(values: list[float]) -> dict[str, float]:
    median, high, most = np.percentile(values, (50, 95, 100))
    return {
        "count": len(values),
        "median_s": round(float(median), 3),
        "p95_s": round(float(high), 3),
        "max_s": round(float(most), 3),
    }


def report(room: Class, steps: list[dict[str, object]]) -> None:
    """Write and print."""

    def mean(name: str, what: str) -> float:
        return float(np.mean([s[what] for s in steps if s["span"] == name]))  # type: ignore[arg-type]

    ratio = {
        what: round(mean("with the class", what) / mean("alone", what), 3)
        for what in ("step_time_ms", "whole_step_ms_mean")
    }
    every = seconds(room.opening_s + room.moving_s)
    found = {
        "setting": setting(),
        "clients": CLIENTS,
        "thinking_s": THINKING_S,
        "cores": os.cpu_count(),
        "errors": len(room.errors),
        "first_errors": room.errors[:5],
        "interactions": every,
        "opening_a_lesson": seconds(room.opening_s),
        "moving_a_slider": seconds(room.moving_s),
        "memory_gb": {kind: round(max(m[kind] for m in room.memory), 3) for kind in ("rss", "pss")},
        "cpu_cores": room.cpu,
        "steps": steps,
        "step_time_ratio": ratio,
        "goals": GOALS,
        "goals_met": {
            "errors": not room.errors,
            "median_s": every["median_s"] < GOALS["median_s"],
            "p95_s": every["p95_s"] < GOALS["p95_s"],
            "memory_gb": max(m["rss"] for m in room.memory) < GOALS["memory_gb"],
            "step_time_ratio": ratio["step_time_ms"] <= GOALS["step_time_ratio"],
        },
    }
    text = json.dumps(found, indent=1)
    print(text)
    if CLIENTS == 60:
        RESULTS.write_text(text + "\n")


if __name__ == "__main__":
    main()
