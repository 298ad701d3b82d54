"""`ampscope metrics`: real HTTP, read by prometheus_client's own parser."""

from __future__ import annotations

import math
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ampscope.cli.main import main
from ampscope.numerics.histogram import FIRST, LOWEST, RAW_LEN
from ampscope.records import Frame, NonFiniteRecord, Role, ShadowRecord, State, StepRecord
from ampscope.store import db
from ampscope.store.writer import RunWriter
from tests.helpers.exported_run import write_run
from tests.helpers.stores import MACHINE, SPEC, lost, running

pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # after the skip

SCRAPE_GOAL_S = 0.05


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


@contextmanager
def serving(store: Path) -> Iterator[str]:
    from ampscope.ext.trackers.prometheus import serve

    address, stop = serve(store, "127.0.0.1", 0)
    try:
        yield address
    finally:
        stop()


def text_of(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as response:
        return str(response.read().decode())


def samples(text: str, run_id: str) -> dict[str, float]:
    """Of one run; a sample with a role is named name:role."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.labels.get("run") == run_id:
                role = sample.labels.get("role")
                found[sample.name + (f":{role}" if role else "")] = sample.value
    return found


def test_a_run_in_progress(store: Path) -> None:
    """Losses 2.5, inf, nan, 1.5 and a non-finite gradient at step 3: three non-finite steps."""
    writer = RunWriter.create(store, replace(SPEC, label="mine", rank=3))
    writer.start(MACHINE)
    for step, loss in enumerate((2.5, math.inf, math.nan, 1.5)):
        writer.add_step(StepRecord(step, loss, 2.0**16, skipped=step == 1, step_time_s=0.02))
    writer.add_nonfinite([NonFiniteRecord(s, "fc.weight", 0, 8, 1, 0, 0) for s in (1, 3)])
    shadow = ShadowRecord(2, 0, Role.GRAD_OUTPUT, 40, 10, 0, 0, None, None, None)
    writer.add_shadow([replace(shadow, step=0, lost=40), shadow])
    writer.flush()
    with serving(store) as address:
        text = text_of(address)
        found = samples(text, writer.run_id)
        assert found["ampscope_loss"] == 1.5
        assert found["ampscope_loss_scale"] == 65536
        assert found["ampscope_step_time_seconds"] == 0.02
        assert found["ampscope_steps_total"] == 4
        assert found["ampscope_skipped_steps_total"] == 1
        assert found["ampscope_nonfinite_steps_total"] == 3
        assert found["ampscope_lost_share:grad_output"] == 0.25
        assert 0 <= found["ampscope_heartbeat_age_seconds"] < 5
        assert 'name="mine",rank="3"' in text
        # Totals are carried on over what comes later.
        writer.add_step(StepRecord(4, -math.inf, 2.0**15, skipped=True))
        writer.add_step(StepRecord(5, math.nan, 2.0**15))
        writer.flush()
        found = samples(text_of(address), writer.run_id)
        counters = ("steps", "skipped_steps", "nonfinite_steps")
        assert [found[f"ampscope_{name}_total"] for name in counters] == [6, 2, 5]
        assert math.isnan(found["ampscope_loss"])
        assert "ampscope_step_time_seconds" not in found  # was not recorded
    writer.close()


def test_share_that_fp16_would_lose_is_of_the_newest_histogram(store: Path) -> None:
    run_id = write_run(store)  # has just ended, so it is still shown
    writer = RunWriter(store, run_id)
    row = np.zeros(RAW_LEN, np.int64)
    row[[FIRST - LOWEST - 30, FIRST - LOWEST]] = [1, 4]  # a fifth of them at 2^-30
    writer.add_frame(Frame(2, Role.GRAD_OUTPUT, (0,), ("bf16",), row[None, :]))
    writer.close()
    with serving(store) as address:
        text = text_of(address)
    found = samples(text, run_id)
    assert found["ampscope_fp16_lost_share:grad_output"] == 0.2
    assert found["ampscope_fp16_lost_share:weight_grad"] == 0.0
    assert 'state="finished"' in text


def test_runs_that_ended_long_ago_are_gone(store: Path) -> None:
    current, gone, old = running(store), lost(store), write_run(store)
    writer = RunWriter(store, old)
    writer._update(ended=time.time() - 601)
    writer.close()
    with serving(store) as address:
        text = text_of(address)
        assert samples(text, current)
        assert samples(text, gone)  # an alert wants to see that it is lost …
        assert not samples(text, old)
        writer = RunWriter(store, gone)
        writer._update(heartbeat=time.time() - 601)  # … but not for ever
        writer.close()
        assert not samples(text_of(address), gone)


def test_hostile_names_stay_inside_their_label(store: Path) -> None:
    name = 'a"b\\c\nd{e="f"} 1\nampscope_loss 9'
    writer = RunWriter.create(store, replace(SPEC, label=name))
    writer.start(MACHINE)
    with serving(store) as address:
        text = text_of(address)
    writer.finish(State.FINISHED)
    writer.close()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = families["ampscope_run_info"].samples
    assert sample.labels["name"] == name
    assert not families["ampscope_loss"].samples


def test_a_store_that_is_not_there_yet(store: Path) -> None:
    with serving(store) as address:
        assert "ampscope_store_up 0.0" in text_of(address)
        run_id = running(store)
        text = text_of(address)
        assert "ampscope_store_up 1.0" in text
        assert samples(text, run_id)["ampscope_steps_total"] == 6


def test_ten_runs_of_100_000_steps_are_scraped_in_time(store: Path) -> None:
    ids = [running(store) for _ in range(10)]
    connection = db.open_for_writing(store)
    for run_id in ids:
        connection.execute(
            "WITH RECURSIVE n(i) AS (SELECT 6 UNION ALL SELECT i+1 FROM n WHERE i<99999)"
            " INSERT INTO step (run,step,loss,scale,skipped,lr,step_time_s)"
            " SELECT ?, i, 1.0, 65536.0, i%1000=0, 0.001, 0.02 FROM n",
            (run_id,),
        )
    connection.close()
    with serving(store) as address:
        found = samples(text_of(address), ids[0])
        assert found["ampscope_steps_total"] == 100_000
        assert found["ampscope_skipped_steps_total"] == 1 + 99  # 1000, 2000 … 99000
        times = []
        for _ in range(9):
            started = time.perf_counter()
            text_of(address)
            times.append(time.perf_counter() - started)
    # The best of nine: other programs on this machine must not fail a test.
    assert min(times) < SCRAPE_GOAL_S, times


def test_the_command_listens_on_loopback_and_ends_on_ctrl_c(store: Path) -> None:
    run_id = running(store)
    command = [sys.executable, "-m", "ampscope.cli.main", "metrics", "--port", "0"]
    command += ["--store", str(store)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"(http://127\.0\.0\.1:\d+/metrics)", line)
            assert found is not None, line
            assert samples(text_of(found[1]), run_id)["ampscope_steps_total"] == 6
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_a_taken_port_is_one_sentence(store: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(main, ["metrics", "--port", port, "--store", str(store)])
    assert result.exit_code == 2
    assert f"Cannot listen at 127.0.0.1:{port}" in result.output
