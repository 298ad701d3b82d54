"""``--skip-to``: steps that pass unrecorded, at the script's own speed, and what is seen then."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ampscope.capture.global_hooks import FORWARD_PRE
from ampscope.observations import BadOp, OptimizerStep, Outcome
from ampscope.records import Cadence, RunSpec
from ampscope.runner.script_ending import hard_limit_s
from ampscope.runner.script_recorder import ScriptRecorder
from ampscope.script_ends import ending

STEPS, BAD = 12, 9


def train(bad: int = BAD) -> list[float]:
    """A scaled fp16 training whose last layer overflows from step ``bad`` on; its losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[2].weight.fill_(64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):  # entered before the model is first called
            loss = model(torch.ones(4, 8) * (8192.0 if step >= bad else 1.0)).float().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def recorded(skip_to: int) -> tuple[ScriptRecorder, list[float], list[int]]:
    counts: list[int] = []
    recorder = ScriptRecorder(str(Path(__file__).parent), Cadence(0, 0, 0), counts.append, skip_to)
    with recorder.watching():
        losses = train()
    return recorder, losses, counts


def test_the_steps_keep_their_numbers_and_the_op_its_module() -> None:
    recorder, losses, counts = recorded(7)
    outcome = recorder.outcome("returned")
    seen = recorder.observations(outcome)
    assert [o.step for o in seen if isinstance(o, OptimizerStep)] == [*range(7, STEPS)]
    assert (outcome.slept, outcome.steps, counts) == (7, STEPS - 7, [*range(1, STEPS + 1)])
    assert outcome.uses_autocast == "fp16"
    bad = [o for o in seen if isinstance(o, BadOp) and o.reached_loss]
    assert [(o.module, o.step, o.autocast) for o in bad[:1]] == [("2", BAD, True)]
    assert losses == train()  # the training is what it was, bit by bit
    assert "7 optimizer steps (--skip-to 7)" in recorder.skip.note


@pytest.mark.parametrize("skip_to", [7, STEPS + 1])
def test_nothing_is_left_behind(skip_to: int) -> None:
    before = nn.Module.__call__, torch.Tensor.backward, torch.amp.GradScaler.step
    hooks = FORWARD_PRE._all
    recorded(skip_to)
    assert (nn.Module.__call__, torch.Tensor.backward, torch.amp.GradScaler.step) == before
    assert not _get_current_dispatch_mode_stack()
    assert hooks == FORWARD_PRE._all


def test_a_script_that_ends_before_says_so() -> None:
    recorder, _, _ = recorded(STEPS + 1)
    outcome = recorder.outcome("returned")
    assert isinstance(outcome, Outcome)
    assert (outcome.steps, outcome.slept) == (0, STEPS)
    sentence = ending(outcome, RunSpec("train.py", kind="script", skip_to=STEPS + 1))[1]
    assert sentence.startswith(f"The script made {STEPS} optimizer steps in all, and --skip-to 13")


def test_a_recomputed_forward_wakes_nothing() -> None:
    """Checkpointing calls modules within backward, where a step is half done."""
    recorder = ScriptRecorder("", Cadence(0, 0, 0), lambda count: None, 1)
    asleep = []

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            asleep.append(recorder.skip.is_waiting)
            return super().forward(x)

    model = Inner(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with recorder.watching():
        for _ in range(2):
            x = torch.ones(1, 2, requires_grad=True)
            loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
            optimizer.step()  # before backward: the count is reached, and backward recomputes
            loss.backward()
    assert asleep == [True, True, False, False]


def test_the_wait_has_a_time_limit_of_its_own() -> None:
    spec = RunSpec("train.py", kind="script", time_limit_s=100.0)
    skipping = RunSpec("train.py", kind="script", time_limit_s=100.0, skip_to=5)
    assert hard_limit_s(spec) == 155.0
    assert hard_limit_s(skipping) == 305.0
