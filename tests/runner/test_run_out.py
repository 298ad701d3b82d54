"""A script whose steps have been looked at is let to its end, where that is near."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampscope.observations import BadOp, HalfSite, OptimizerStep
from ampscope.records import RUN_OUT_S, RunSpec
from ampscope.runner import script
from ampscope.runner.script import RunCallbacks, ScriptResult, only_steps_note, run_script

TEXT = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range({steps}):
    loss = model(torch.ones(2, 4)).square().mean()
    if step == 15:
        torch.tensor(1e4, dtype=torch.float16) * loss.new_tensor(1e4).half()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("reached", "w").close()
"""


@pytest.fixture(autouse=True)
def half_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "names_half", lambda is_user: False)


def ran(folder: Path, steps: int, grace_s: float = 1e-9, **settings: str) -> ScriptResult:
    path = folder / "train.py"
    path.write_text(TEXT.format(steps=steps))
    spec = RunSpec(
        str(path), kind="script", steps=10, policy="native", control="as_is", grace_s=grace_s,
        settings=tuple(settings.items()),
    )  # fmt: skip
    return run_script(spec, "native", RunCallbacks())


def steps_of(result: ScriptResult) -> list[int]:
    return [o.step for o in result.observations if isinstance(o, OptimizerStep)]


def test_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = ran(tmp_path, 30)
    assert (result.outcome.ended, result.outcome.steps) == ("returned", 30)
    assert steps_of(result) == [*range(30)]
    assert result.outcome.notes[-1] == only_steps_note(10)
    assert not any(isinstance(o, BadOp) for o in result.observations)  # ops are seen no more
    sites = [o for o in result.observations if isinstance(o, HalfSite)]
    assert [s.op for s in sites if s.step == 15] == ["torch.tensor", "Tensor.half"]  # casts are
    assert (tmp_path / "reached").exists()


@pytest.mark.parametrize(
    ("grace_s", "settings"),
    [(0.0, {}), (1e-9, {RUN_OUT_S: "0"})],  # --steps 10; a control of a script that is long
)
def test_no_further(tmp_path: Path, grace_s: float, settings: dict[str, str]) -> None:
    result = ran(tmp_path, 30, grace_s, **settings)
    assert (result.outcome.ended, steps_of(result)) == ("steps", [*range(10)])


def test_what_does_not_end_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was recorded when the steps had been made stands, however many follow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "LEAST_RUN_OUT_S", 0.01)

    def stops(run: script._Run) -> None:  # and does not end this process
        run.stopped = "steps"

    monkeypatch.setattr(script._Run, "_stop_run_out", stops)
    result = ran(tmp_path, 2_000)
    assert (result.outcome.ended, result.outcome.steps) == ("steps", 10)
    assert steps_of(result) == [*range(10)]
    assert only_steps_note(10) not in result.outcome.notes
