"""Objects of a script that run code of their own wherever they are asked: nothing of ours asks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import State
from tests.helpers.hostile_objects import TRAININGS, script
from tests.helpers.script_runner import OnDemand, Runner, quick, spec, write_script

QUICK = ("== makes a module", "optimizer: wrapper", "every attribute")
STEPS = {"optimizer: a dictionary of them": 12, "optimizer: none of torch's": 6}
# What a watch refuses, with its reason.
NOT_WATCHED = {"lazy": "has no shape yet"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[Runner]:
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        yield Runner(runs)


def _printed(out: str) -> str:
    return next((line for line in out.splitlines() if line.startswith("weights")), out)


@pytest.fixture(scope="module")
def plain(folder: Path) -> OnDemand[str]:
    """What each script prints without ampscope."""

    def run(name: str) -> str:
        path = write_script(folder, f"{list(TRAININGS).index(name)}.py", script(name))
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return _printed(done.stdout)

    return OnDemand(run)


@pytest.mark.parametrize("name", quick(TRAININGS, *QUICK))
def test_a_recorded_run_trains_as_the_plain_one(
    name: str, runner: Runner, plain: OnDemand[str], folder: Path
) -> None:
    path = write_script(folder, f"{list(TRAININGS).index(name)}.py", script(name))
    ran = runner(path)
    assert ran.run.info.state is State.FINISHED, (ran.run.info.message, ran.run.info.traceback)
    assert ran.outcome.ended == "returned", ran.outcome
    assert _printed(ran.out.decode()) == plain[name], ran.err.decode()
    assert len(ran.steps) == STEPS.get(name, 6), ran.outcome.notes


@pytest.mark.parametrize(
    "name", quick(("== makes a module", "no hash", "every attribute", "lazy"), "== makes a module")
)
def test_a_module_in_fp32_by_a_control(name: str, runner: Runner, folder: Path) -> None:
    path = write_script(folder, f"{list(TRAININGS).index(name)}.py", script(name))
    ran = runner(path, control="fp32_modules:0" if name != "no hash" else "fp32_modules:inside")
    assert ran.run.info.state is State.FINISHED, (ran.run.info.message, ran.run.info.traceback)
    assert ran.outcome.ended == "returned", ran.outcome


@pytest.mark.parametrize("name", quick(TRAININGS, "== makes a module"))
def test_a_watched_training_is_the_plain_one(
    name: str, plain: OnDemand[str], folder: Path, tmp_path: Path
) -> None:
    path = write_script(folder, f"{list(TRAININGS).index(name)}.py", script(name))
    done = subprocess.run(
        [sys.executable, path, "watch", str(tmp_path / "runs.db")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if name in NOT_WATCHED:
        assert NOT_WATCHED[name] in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert _printed(done.stdout) == plain[name]
    assert "ampscope stopped watching" not in done.stderr, done.stderr
