"""The matmuls of one step of an unchanged script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from ampscope.errors import BadInput
from ampscope.measure.tensor_cores import script_step
from ampscope.records import RunSpec
from ampscope.workloads.catalog import is_script

CPU = torch.device("cpu")
TRAINING = """
import sys, torch
from torch import nn
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale={scale}, enabled={scaled})
for i in range({steps}):
    optimizer.zero_grad()
    for micro in range({micro}):
        scaler.scale(model(torch.randn(4, 6)).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with open(sys.argv[1], "a") as steps:
        steps.write("x")
"""


def written(folder: Path, **choices: object) -> RunSpec:
    """A spec of the script, which writes an x a step to ``steps`` in ``folder``."""
    script = folder / "train.py"
    script.write_text(
        TRAINING.format(**{"scale": 1.0, "scaled": True, "steps": 20, "micro": 1} | choices)
    )
    return RunSpec(str(script), kind="cores", args=(str(folder / "steps"),), control="as_is")


@pytest.mark.parametrize(
    "choices",
    [
        {"scaled": False},
        {"scaled": True},
        {"scale": 2.0**127},  # overflows: GradScaler leaves the first steps out
    ],
)
def test_one_step_and_then_the_script_is_ended(tmp_path: Path, choices: dict[str, object]) -> None:
    before = sys.argv, sys.modules["__main__"]
    step = script_step(written(tmp_path, **choices), CPU)
    assert (tmp_path / "steps").read_text() == "x"  # the second one was not finished
    places = {
        (step.names[index], phase): count
        for one in step.found
        for (index, phase), count in one.places.items()
        if one.call.name == "addmm"
    }
    assert places == {("0", "forward"): 1, ("2", "forward"): 1}
    assert sorted(one.flops for one in step.found) == sorted(
        # 2 x batch x in x out: forward; gradients of layer 2's input and of both weights
        [2 * 4 * 6 * 8, 2 * 4 * 8 * 2, 2 * 4 * 8 * 2, 2 * 4 * 8 * 2, 2 * 4 * 6 * 8]
    )
    assert (sys.argv, sys.modules["__main__"]) == before
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_accumulation_makes_one_step_of_several_passes(tmp_path: Path) -> None:
    step = script_step(written(tmp_path, micro=3), CPU)
    assert {count for one in step.found for count in one.places.values()} == {3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "The script raised ZeroDivisionError"),
        ("import sys; sys.exit(3)", "called sys.exit\\(3\\) after no optimizer step"),
        ("x = 1", "ended after no optimizer step"),
    ],
)
def test_a_script_without_two_steps_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(BadInput, match=words):
        script_step(RunSpec(str(script), kind="cores", control="as_is"), CPU)


def test_one_step_alone_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="ended after one optimizer step"):
        script_step(written(tmp_path, steps=1), CPU)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def build(seed): ...", False),
        ("from models import make as build", False),
        ("build = lambda seed: None", False),
        ("import torch\nfor i in range(3): pass", True),
        ("def train():\n    build = 1", True),
        ("not python (", True),
    ],
)
def test_a_file_with_a_build_is_a_workload(tmp_path: Path, text: str, expected: bool) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert is_script(str(file)) is expected
    assert not is_script(f"{file}:build")
    assert not is_script("gpt")
