"""Objects of a script that run code of their own wherever they are asked: nothing of ours asks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampscope.errors import BadInput
from ampscope.launcher.script_runs import ScriptRuns
from ampscope.records import State
from ampscope.watcher.alarms import AmpscopeWarning
from ampscope.watcher.capsule import load
from ampscope.watcher.replay import replay
from ampscope.watcher.replay_child import prepare
from tests.helpers.hostile_objects import TRAININGS, script, trained
from tests.helpers.script_runner import Runner, quick, spec, write_script

# Plain and watched trainings run in this process; torch warns of one that replaces `step`.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Seems like `optimizer.step\\(\\)` has been overridden"
)
QUICK = ("== makes a module", "optimizer: wrapper", "every attribute")
STEPS = {"optimizer: a dictionary of them": 12, "optimizer: none of torch's": 6}
# What a watch refuses, with its reason.
NOT_WATCHED = {"lazy": "has no shape yet"}
# With a closure the weights are other ones by the time that the gradients are seen.
WEIGHTS = {"no hash": 2, "optimizer: a closure": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[Runner]:
    with ScriptRuns(spec(), folder / "runs.db") as runs:
        yield Runner(runs)


def _printed(out: str) -> str:
    return next((line for line in out.splitlines() if line.startswith("weights")), out)


@pytest.mark.parametrize("name", quick(TRAININGS, *QUICK))
def test_a_recorded_run_trains_as_the_plain_one(name: str, runner: Runner, folder: Path) -> None:
    path = write_script(folder, f"{list(TRAININGS).index(name)}.py", script(name))
    ran = runner(path)
    assert ran.run.info.state is State.FINISHED, (ran.run.info.message, ran.run.info.traceback)
    assert ran.outcome.ended == "returned", ran.outcome
    assert _printed(ran.out.decode()) == f"weights {trained(name)['weights']}", ran.err.decode()
    assert len(ran.steps) == STEPS.get(name, 6), ran.outcome.notes


@pytest.mark.parametrize(
    "name", quick(("== makes a module", "no hash", "every attribute", "lazy"), "== makes a module")
)
def test_a_module_in_fp32_by_a_control(name: str, runner: Runner, folder: Path) -> None:
    path = write_script(folder, f"{list(TRAININGS).index(name)}.py", script(name))
    ran = runner(path, control="fp32_modules:0" if name != "no hash" else "fp32_modules:inside")
    assert ran.run.info.state is State.FINISHED, (ran.run.info.message, ran.run.info.traceback)
    assert ran.outcome.ended == "returned", ran.outcome


@pytest.mark.parametrize("name", quick(TRAININGS, "no hash", "tensors", "optimizer: a closure"))
def test_a_watched_training_is_the_plain_one_and_its_bad_step_is_kept(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "runs.db")
    if name in NOT_WATCHED:
        with pytest.raises(BadInput, match=NOT_WATCHED[name]):
            trained(name, "watch", store)
        return
    plain = trained(name, "diverge")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        watched = trained(name, "watch", store, "diverge")
    assert watched["weights"] == plain["weights"]
    said = capfd.readouterr().err
    assert "ampscope stopped watching" not in said
    assert not [one for one in warned if one.category is AmpscopeWarning]
    kept = load(watched["run"].capsules[0])
    model = trained(name)["model"]
    assert prepare(kept, {"model": model}) == ""
    again = replay({"model": model}, kept.forwards, kept.about.scale)
    assert (len(kept.weights), again.where) == (WEIGHTS.get(name, 4), "output gradient")
