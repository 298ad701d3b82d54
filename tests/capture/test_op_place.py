"""Which module and phase an op belongs to: optimizer, accumulation, checkpointing, exceptions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ampscope.capture.model_map import ModelMap
from ampscope.capture.op_trace import OpTrace
from tests.helpers.op_tracing import Two, of, step, traced


def test_the_optimizers_ops_have_a_phase_of_their_own() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = OpTrace(ModelMap(model))
    with trace:
        model(torch.randn(1, 2)).sum().backward()
        trace.place.outside = "step"
        optimizer.step()
    _, records = trace.take()
    assert {r.op for r in records if r.phase == "step"} == {"aten.add_"}
    assert [r.count for r in records if r.op == "aten.add_"] == [2]
    with trace:  # the next step begins as forward again
        model(torch.randn(1, 2))
    assert {r.phase for r in trace.take()[1]} == {"forward"}


def test_a_second_forward_after_the_optimizers_step_is_forward() -> None:
    model = nn.Linear(2, 2)
    trace = OpTrace(ModelMap(model))
    with trace:
        trace.place.outside = "step"
        model(torch.randn(1, 2)).exp()
    assert {(r.op, r.phase) for r in trace.take()[1]} >= {
        ("aten.addmm", "forward"),
        ("aten.exp", "forward"),
    }


def test_a_gradient_that_is_accumulated_belongs_to_the_parameters_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def run() -> None:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()

    seen, _ = traced(model, run)
    added = {key[:2]: count for key, count in of(seen, "aten.add_").items()}
    assert added == {("0", "backward"): 2, ("1", "backward"): 2}


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_keeps_forward_and_backward_apart(reentrant: bool) -> None:
    model = Two()

    def run() -> None:
        x = torch.randn(5, 4, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()

    seen, _ = traced(model, run)
    assert of(seen, "aten.addmm") == {
        ("first", "forward", "aten.addmm", "fp32,fp32,fp32", "fp32"): 1,
        ("first", "backward", "aten.addmm", "fp32,fp32,fp32", "fp32"): 1,  # done again
    }
    assert of(seen, "aten.mm") == {
        ("last", "forward", "aten.mm", "fp32,fp32", "fp32"): 1,
        # Two gradients; done again only where checkpointing does not stop at what it needs.
        ("last", "backward", "aten.mm", "fp32,fp32", "fp32"): 3 if reentrant else 2,
        ("first", "backward", "aten.mm", "fp32,fp32", "fp32"): 2,
    }


def test_a_module_that_is_called_twice() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    seen, _ = traced(model, step(model, torch.randn(3, 2)))
    assert of(seen, "aten.addmm") == {("0", "forward", "aten.addmm", "fp32,fp32,fp32", "fp32"): 2}
    assert of(seen, "aten.mm") == {("0", "backward", "aten.mm", "fp32,fp32", "fp32"): 3}


def test_an_exception_in_a_module_does_not_upset_the_next_step() -> None:
    model = Two()
    trace = OpTrace(ModelMap(model))
    with pytest.raises(RuntimeError), trace:
        model(torch.randn(5, 7))
    with trace:
        torch.ones(1).exp()
    assert [(r.module, r.phase, r.op) for r in trace.take()[1] if r.op == "aten.exp"] == [
        (0, "forward", "aten.exp")
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_backward_runs_in_another_thread_and_finds_its_modules() -> None:
    model, x = Two().cuda(), torch.randn(5, 4, device="cuda")

    def run() -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).float().sum()
        loss.backward()

    seen, _ = traced(model, run)
    assert {key[:2] for key in of(seen, "aten.mm")} == {
        ("last", "forward"),
        ("last", "backward"),
        ("first", "backward"),
    }
    x.requires_grad_()
    seen, _ = traced(model, lambda: checkpoint(model, x, use_reentrant=True).sum().backward())
    assert of(seen, "aten.addmm").keys() >= {
        ("first", "forward", "aten.addmm", "fp32,fp32,fp32", "fp32"),
        ("first", "backward", "aten.addmm", "fp32,fp32,fp32", "fp32"),
    }
