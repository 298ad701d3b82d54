"""What a probe records is recorded of an untouched script too, step by step."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from ampscope.capture.script import optimizer_steps
from ampscope.capture.script.script_histograms import ScriptMeasurements
from ampscope.capture.tensors import opened
from ampscope.records import Cadence, Role, RunSpec
from ampscope.runner.script import RunCallbacks, ScriptResult, run_script
from tests.helpers import exponent_oracle as oracle

STEPS = 6
SCRIPT = f"""
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
x = torch.randn(32, 8)
for step in range({STEPS}):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    scaler.scale(loss).backward()
    UNSCALE
    torch.save([p.detach() for p in model.parameters()], FOLDER + f"/weights{{step}}.pt")
    torch.save([p.grad for p in model.parameters()], FOLDER + f"/grads{{step}}.pt")
    scaler.step(optimizer)
    scaler.update()
    print(scaler.get_scale())
"""


def run(folder: Path, text: str, cadence: Cadence) -> ScriptResult:
    file = folder / "train.py"
    file.write_text(text.replace("FOLDER", repr(str(folder))))
    spec = RunSpec(str(file), kind="script", steps=100, control="as_is", cadence=cadence)
    return run_script(spec, "native", RunCallbacks())


def measured(folder: Path, text: str, cadence: Cadence) -> ScriptMeasurements:
    return run(folder, text, cadence).measured


def row_of(tensors: list[torch.Tensor]) -> np.ndarray:
    return oracle.row_of(v for t in tensors for v in t.double().reshape(-1).tolist())


def test_weights_and_gradients_are_those_of_the_script(tmp_path: Path) -> None:
    found = measured(tmp_path, SCRIPT.replace("UNSCALE", "pass"), Cadence(1, 0, 0))
    assert [m.path for m in found.modules] == ["", "0", "1", "2"]
    by_role = {(f.role, f.step): f for f in found.frames}
    for step in range(STEPS):
        for role, name in ((Role.WEIGHT, "weights"), (Role.WEIGHT_GRAD, "grads")):
            frame = by_role[role, step]
            saved = torch.load(tmp_path / f"{name}{step}.pt")
            np.testing.assert_array_equal(frame.rows.sum(0), row_of(saved))
        assert by_role[Role.ACTIVATION, step].rows.sum() == 32 * (16 + 16 + 1)


def test_gradients_are_counted_scaled_also_where_the_script_unscales(tmp_path: Path) -> None:
    plain = measured(tmp_path, SCRIPT.replace("UNSCALE", "pass"), Cadence(1, 0, 0))
    other = tmp_path / "other"
    other.mkdir()
    text = SCRIPT.replace("UNSCALE", "scaler.unscale_(optimizer)")
    unscaled = measured(other, text, Cadence(1, 0, 0))
    pairs = [[f for f in found.frames if f.role is Role.WEIGHT_GRAD] for found in (plain, unscaled)]
    for first, second in zip(*pairs, strict=True):
        assert first.scale == second.scale
        np.testing.assert_array_equal(first.rows, second.rows)


def test_a_skip_names_the_parameters_in_backward_order(tmp_path: Path) -> None:
    text = SCRIPT.replace("UNSCALE", "pass").replace("2.0**24", "2.0**60")
    found = measured(tmp_path, text, Cadence(1, 0, 0))
    first = [r for r in found.nonfinite if r.step == 0]
    assert {r.parameter for r in first} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {r.parameter for r in first[:2]} == {"2.weight", "2.bias"}  # backward begins at the end
    for record, saved in zip(
        sorted(first, key=lambda r: r.parameter), ("0.bias", "0.weight", "2.bias", "2.weight"),
        strict=True,
    ):  # fmt: skip
        at = ["0.weight", "0.bias", "2.weight", "2.bias"].index(saved)
        gradient = torch.load(tmp_path / "grads0.pt")[at]
        assert record.nan == int(gradient.isnan().sum())
        assert record.pos_inf == int(gradient.isposinf().sum())


def test_ops_are_the_scripts_own(tmp_path: Path) -> None:
    found = measured(tmp_path, SCRIPT.replace("UNSCALE", "pass"), Cadence(0, 1, 0))
    assert set(found.op_sets) == set(range(STEPS))
    ops = dict(found.ops)[found.op_sets[3]]
    linears = [o for o in ops if o.op == "aten.addmm"]
    assert [(o.module, o.phase, o.inputs) for o in linears] == [
        (1, "forward", "fp16,fp16,fp16"), (3, "forward", "fp16,fp16,fp16"),
    ]  # fmt: skip
    assert not any(o.op in ("aten.isfinite", "aten.isnan", "aten.std") for o in ops)


def test_two_models_have_names_of_their_own_and_no_hook_stays(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def forward(self, x):
        return self.net(x)
maker, critic = nn.Linear(4, 4), Critic()
pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (maker, critic)]
for step in range(2):
    for model, optimizer in pairs:
        optimizer.zero_grad()
        critic(maker(torch.randn(3, 4))).mean().backward()
        optimizer.step()
import builtins
builtins.left = [maker, critic]
"""
    found = measured(tmp_path, text, Cadence(1, 1, 0))
    assert [m.path for m in found.modules] == ["", "Critic", "Critic.net"]
    import builtins

    for model in builtins.left:  # type: ignore[attr-defined]  # put there by the script
        for parameter in model.parameters():
            assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize("cadence", [Cadence(0, 0, 0), Cadence(3, 0, 0)])
def test_the_cadence_is_kept(tmp_path: Path, cadence: Cadence) -> None:
    found = measured(tmp_path, SCRIPT.replace("UNSCALE", "pass"), cadence)
    steps = {f.step for f in found.frames}
    assert steps == ({0, 3} if cadence.histogram else set())
    assert not found.ops


def test_what_runs_without_gradients_is_no_training(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn
torch.manual_seed(0)
student, teacher = nn.Linear(4, 2), nn.Linear(4, 2)
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
for step in range(3):
    x = torch.randn(8, 4)
    with torch.no_grad():
        target = teacher(x)
        student(torch.randn(100, 4))
    optimizer.zero_grad()
    (student(x) - target).square().mean().backward()
    optimizer.step()
"""
    found = measured(tmp_path, text, Cadence(1, 0, 0))
    assert [m.path for m in found.modules] == [""]
    activations = [f.rows.sum() for f in found.frames if f.role is Role.ACTIVATION]
    assert activations == [8 * 2] * 3


NESTED = """
import torch
from torch import nn
class Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        super().__init__([p for g in base.param_groups for p in g["params"]], {})
        self.base = base
    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)
model = nn.Linear(4, 2)
optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""


def test_updates_of_a_step_around_another_are_counted(tmp_path: Path) -> None:
    found = measured(tmp_path, NESTED, Cadence(1, 0, 0))
    updates = {f.step: f.rows.sum() for f in found.frames if f.role is Role.UPDATE}
    assert updates == {0: 10, 1: 10, 2: 10, 3: 10}


def test_weights_that_cannot_be_copied_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensor: torch.Tensor) -> torch.Tensor:
        raise MemoryError("full")

    monkeypatch.setattr(optimizer_steps, "opened", full)
    result = run(tmp_path, NESTED, Cadence(1, 0, 0)).outcome
    assert (result.ended, result.steps) == ("returned", 4)
    assert any("the weights before a step (MemoryError: full)" in note for note in result.notes)


def test_the_time_of_copying_the_weights_is_none_of_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(tensor: torch.Tensor) -> torch.Tensor | None:
        time.sleep(0.25)
        return opened(tensor)

    monkeypatch.setattr(optimizer_steps, "opened", slow)
    started = time.perf_counter()
    result = run(tmp_path, NESTED, Cadence(0, 0, 0)).outcome  # 4 steps of 2 parameters
    assert time.perf_counter() - started - result.elapsed_s > 8 * 0.25


WAITS = """
import time
import torch

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.randn(4, 8)).square().mean().backward()
    time.sleep(0.3)  # as behind another process
    end = time.process_time() + WORK
    while time.process_time() < end:
        pass
    optimizer.step()
"""


def test_processor_time_of_a_step_is_none_of_what_it_waits_for(tmp_path: Path) -> None:
    took = {}
    for work in (0.0, 0.1):
        result = run(tmp_path, WAITS.replace("WORK", str(work)), Cadence(0, 0, 0)).outcome
        assert result.steps == 5
        assert result.elapsed_s > 5 * (0.3 + work)
        took[work] = result.step_cpu_s
    assert 0.05 < took[0.1] - took[0.0] < 0.2
    assert took[0.0] < 0.3
