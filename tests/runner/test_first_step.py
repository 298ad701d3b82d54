"""A script that takes long before its first step: how long it is waited for, and where it is."""

from __future__ import annotations

import threading
from pathlib import Path

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import Machine, RunSpec, State
from ampscope.runner import script
from ampscope.runner.script import _Watchdog
from ampscope.runner.script_recorder import ScriptWriting
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers.script_runner import spec, write_script

HERE = Path(__file__)


class Told:
    """A run whose watchdog is asked to tell, from another thread as in a child."""

    def __init__(self, folder: Path, **fields: int) -> None:
        self.store = folder / "runs.db"
        self.spec = RunSpec(str(HERE), kind="script", **fields)  # type: ignore[arg-type]  # numbers
        self.writer = RunWriter.create(self.store, self.spec)
        self.writer.start(Machine("cpu", "", "native"))
        self.writing = ScriptWriting(self.writer)
        self.dog = _Watchdog(self.store, self.writer, self.writing, self.spec)

    def after(self, elapsed_s: float) -> str:
        thread = threading.Thread(target=self.dog._tell, args=(elapsed_s,))
        thread.start()
        thread.join()
        with Reader(self.store) as reader:
            return reader.run(self.writer.run_id).message


def test_the_wait_is_told_where_the_script_is_and_seldom(tmp_path: Path) -> None:
    told = Told(tmp_path)

    def prepare_data(elapsed_s: float) -> str:
        return told.after(elapsed_s)

    assert prepare_data(script.FIRST_TOLD_S - 1) == ""
    first = prepare_data(12.4)
    assert first.startswith("waiting for the first optimizer step: 12 s so far, in after at ")
    assert f"{HERE.name}:" in first
    assert prepare_data(20.0) == first
    assert "25 s so far" in prepare_data(25.0)
    told.writing.steps = 1
    assert prepare_data(26.0) == ""


def test_a_wait_for_a_late_step_names_the_step(tmp_path: Path) -> None:
    assert (
        Told(tmp_path, skip_to=2000)
        .after(11.0)
        .startswith("waiting for optimizer step 2,000: 11 s so far")
    )


def test_a_diagnosis_says_it_while_the_script_prepares(tmp_path: Path) -> None:
    text = """
import time
from base import *


def prepare_data():
    time.sleep(16)


prepare_data()
step()
"""
    path = write_script(tmp_path, "late.py", text)
    said: list[str] = []
    with ScriptRuns(spec(str(path)), tmp_path / "runs.db") as runs:
        done = runs.wait(runs.start("as_is"), say=said.append)
    assert done.info.state is State.FINISHED
    assert done.info.message == ""
    assert len(said) == 1
    assert said[0].startswith("waiting for the first optimizer step: 1")
    assert said[0].endswith(" s so far, in prepare_data at late.py:7")
