"""The patch is code that a person pastes: it is pasted here, and it must cure."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ampscope.rules.wording import island_patch


class Block(nn.Module):
    """65,536 in fp16 is infinite; the second argument is a keyword, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 4, bias=False)
        nn.init.constant_(self.wide.weight, 32.0)

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        out: Tensor = self.wide(x) * gate
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.ones((), dtype=torch.float16)
        out: Tensor = self.first(x, gate=gate) + self.second(x, gate=gate)
        return out


def loss_of(model: Model) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        return model(torch.full((2, 64), 32.0)).float().sum()


@pytest.mark.parametrize("paths", [("first.wide", "second.wide"), ("first", "second")])
def test_the_pasted_patch_cures(paths: tuple[str, ...]) -> None:
    model = Model()
    assert torch.isinf(loss_of(model))
    exec(island_patch(*paths), {"model": model})
    assert loss_of(model).item() == 2 * 2 * 4 * 64 * 32.0 * 32.0
    loss_of(model).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_a_patch_for_one_of_two_leaves_the_other_alone() -> None:
    model = Model()
    exec(island_patch("first"), {"model": model})
    assert torch.isinf(loss_of(model))


def test_without_a_module_it_is_a_form_for_an_expression() -> None:
    assert "enabled=False" in island_patch("")
    assert "get_submodule" not in island_patch("")
