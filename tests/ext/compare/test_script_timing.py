"""A whole script in another precision: what holds there, and where its regions are."""

from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ampscope.ext.compare.measure.script_timing import Clock, in_precision
from tests.helpers.tf32 import stays_fp32


def test_fp32_is_fp32_whatever_the_script_asks_for():
    stays_fp32(lambda: in_precision("fp32", Clock(1, 1.0, Path("unwritten"))))


def test_a_transform_on_the_cpu_does_not_take_the_models_region():
    """The step's region is that of the model's device: a module without parameters that is called
    before it, such as a transform of the data, opens none. Else bf16 on a GPU would be fp32."""
    model, fakes = nn.Linear(4, 4).requires_grad_(False), FakeTensorMode()
    for name, parameter in list(model.named_parameters()):
        there = FakeTensor(fakes, parameter.detach().to("meta"), torch.device("xpu"))
        setattr(model, name, nn.Parameter(there, requires_grad=False))
    x = FakeTensor(fakes, torch.ones(2, 4, device="meta"), torch.device("xpu"))
    with in_precision("bf16", Clock(1, 1.0, Path("unwritten"))):
        assert nn.Softmax(-1)(torch.ones(2, 4)).dtype is torch.float32
        assert not torch.is_autocast_enabled("cpu")
        with fakes:
            assert model(x).dtype is torch.bfloat16
        assert torch.is_autocast_enabled("xpu")  # until backward
    assert not torch.is_autocast_enabled("xpu")
