"""Kernels that inductor fused: their ops, and what they hand on unrounded."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch
import torch._inductor.config as inductor
from torch import Tensor

from ampscope.capture.fused_kernels import noting
from ampscope.observations import Kernel
from tests.helpers.inductor import needs_compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch.compile warns of its own code
    needs_compiler,
]


def gated(x: Tensor) -> Tensor:
    gate = torch.sigmoid(x)
    return gate * x


def noted(*, emulate: bool) -> tuple[list[Kernel], Tensor]:
    """The kernels of ``gated`` on bf16, and what it gives."""
    torch._dynamo.reset()
    kernels, failures = list[Kernel](), list[str]()
    with (
        inductor.patch(fx_graph_cache=False, emulate_precision_casts=emulate, compile_threads=1),
        functorch.patch(enable_autograd_cache=False),
        noting(kernels, failures.append),
    ):
        torch.manual_seed(0)
        made = torch.compile(gated)(torch.randn(64, dtype=torch.bfloat16))
    assert not failures
    return kernels, made


def test_a_result_that_stays_in_a_register_is_not_rounded() -> None:
    (kernel,), made = noted(emulate=False)
    assert (kernel.phase, kernel.ops) == ("forward", ("aten.sigmoid", "aten.mul"))
    assert (kernel.computed, kernel.writes) == ("fp32", ("bf16",))
    assert len(kernel.unrounded) == 1
    assert kernel.unrounded[0].startswith("aten.sigmoid to bf16, ")
    assert any(line.startswith(kernel.lines[0].partition(":")[0]) for line in kernel.lines)
    torch.manual_seed(0)
    x = torch.randn(64, dtype=torch.bfloat16)
    exact = (torch.sigmoid(x.float()) * x.float()).bfloat16()
    assert torch.equal(made, exact)  # as it says: no rounding in between
    assert not torch.equal(made, gated(x))


def test_with_emulated_casts_nothing_stays_unrounded() -> None:
    (kernel,), made = noted(emulate=True)
    assert not kernel.unrounded
    torch.manual_seed(0)
    assert torch.equal(made, gated(torch.randn(64, dtype=torch.bfloat16)))
