"""What a script of Keras or Paddle has under way at its last line is done, as in plain Python."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ampscope.pythons import with_package
from ampscope.records import RunInfo, RunSpec, State
from ampscope.store.reader import Reader
from ampscope.store.writer import RunWriter
from tests.helpers.keras_children import VARIABLE as KERAS
from tests.helpers.paddle_python import VARIABLE as PADDLE

BEGINS = """\
import atexit, sys, threading, time
from pathlib import Path
folder = Path(sys.argv[1])
atexit.register(lambda: (folder / "atexit").write_text((folder / "thread").read_text()))
"""
LATE = """\
def late():
    time.sleep(1)
    (folder / "thread").write_text("saved")
threading.Thread(target=late).start()
"""


@pytest.mark.parametrize("name", ["keras", "paddle"])
def test_threads_are_waited_for_and_then_exit_handlers_called(tmp_path: Path, name: str) -> None:
    info = ended(tmp_path, name, BEGINS + LATE)
    assert info.state is State.FINISHED, (info.message, info.traceback)
    assert (tmp_path / "atexit").read_text() == "saved"


def ended(folder: Path, name: str, text: str) -> RunInfo:
    """The run of a script that gets the folder as its argument."""
    python = os.environ.get({"keras": KERAS, "paddle": PADDLE}[name])
    if not python:
        pytest.skip(f"no Python that has {name}")
    (folder / "ends.py").write_text(text)
    spec = RunSpec(
        str(folder / "ends.py"), kind="script", framework=name, args=(str(folder),),
        time_limit_s=120.0,
    )  # fmt: skip
    writer = RunWriter.create(folder / "runs.db", spec)
    writer.close()
    subprocess.run(
        [python, "-m", "ampscope.ext.frameworks.script", "--store", str(folder / "runs.db"),
         "--run", writer.run_id],
        env=with_package(dict(os.environ)), capture_output=True, check=True, timeout=200,
    )  # fmt: skip
    with Reader(folder / "runs.db") as reader:
        return reader.run(writer.run_id)


def test_what_does_not_end_is_left_after_the_bound() -> None:
    text = """\
import os, threading
from ampscope.runner.script_ending import end_python_within
threading.Thread(target=threading.Event().wait).start()
end_python_within(0.5, lambda: os._exit(7))
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", text], env=with_package(dict(os.environ)), check=False, timeout=60
    )
    assert done.returncode == 7
    assert time.monotonic() - began >= 0.5
